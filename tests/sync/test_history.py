"""The history of a run: every version is restored from bases and deltas, bit for bit, or it is told why not."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sync.helpers import LIMIT, PretendTrainer, empty, make_loader
from tests.sync.test_deltas import Run, also, assert_holds, flip, make_trainer
from tests.sync.test_loading import FolderStore, side_of
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.checkpoint.export import restore_version
from trinity_sync.checkpoint.folder.catalog import history, history_bytes, verify
from trinity_sync.checkpoint.folder.commits import keep_weights
from trinity_sync.checkpoint.folder.contents import Manifest, file_entry, write_manifest
from trinity_sync.checkpoint.folder.leases import lease_checkpoint
from trinity_sync.checkpoint.folder.recovery import recover
from trinity_sync.checkpoint.reading.verl_shards import open_parts
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import STATE_DICT, version_folder
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer, checkpoint
from trinity_sync.sync.checkpoint import DeltaPublisher
from trinity_sync.weights.part_delta import Point, Route, VersionIndex, find_route

BASE_EVERY = 18


class CommittedStore(FolderStore):
    """Weights-only checkpoints of which bases can be kept."""

    def begin(self, version: Version, nodes: list[str]) -> Path:
        return self._root / f"global_step_{version.step}"

    def commit(self, version: Version, digest: str | None) -> Path:
        folder = self.begin(version, [])
        files = tuple(file_entry(folder, f"actor/{path.name}") for path in sorted((folder / "actor").iterdir()))
        write_manifest(folder, Manifest(step=version.step, attempt=0, kind=STATE_DICT, files=files, digest=digest))
        return folder

    def keep(self, folder: Path, target: Path) -> None:
        keep_weights(folder, target, durable=False)


class Remembered(Run):
    """A trainer that keeps every version of its run."""

    def __init__(self, trainer: PretendTrainer, root: Path) -> None:
        self.digests: dict[Version, str] = {}
        super().__init__(trainer, root)

    def restart(self) -> None:
        side = replace(side_of(self.trainer), base_every=BASE_EVERY)
        self.publisher = DeltaPublisher(side, CommittedStore(self.root), False, self.deltas, self._mode._delta)

    def publish(self, count: int = 1, share: float = 0.02) -> SealedVersion:
        for _ in range(count):
            sealed = super().publish(share=share)
            self.digests[sealed.version] = reference_digest(self.weights, "BF16")
        return sealed

    def restored(self, version: Version) -> str:
        """The digest of a restored version."""
        into = self.root.with_name(f"{self.root.name}-made")
        into.mkdir(exist_ok=True)
        made = restore_version(self.root, version, into)
        assert (made.manifest.attempt, made.manifest.step, made.manifest.digest) == (*version, self.digests[version])
        found = {name: tensor.read() for name, tensor in open_parts(made.files).items()}
        shutil.rmtree(into)
        return reference_digest(found, "BF16")

    def lose_delta(self, end: int, length: int, harm: Callable[[Path], None] = Path.unlink) -> Path:
        """Harm the delta to a version, by its number, from so many versions before."""
        before = self.published[end - length]
        folder = self.deltas / f"0-{self.published[end].step}"
        path = folder / f"rank-00001-from-0-{before.step}.delta"
        harm(path)
        return path

    def folder_of(self, version: Version) -> Path:
        return self.deltas / f"0-{version.step}"

    def base(self, number: int) -> Path:
        step = self.published[number].step
        return self.deltas / f"0-{step}" / f"global_step_{step}"


@pytest.fixture(scope="module")
def trainer(synchronizer: Synchronizer, make_agent: Callable[..., AgentClient]) -> PretendTrainer:
    return make_trainer(synchronizer, make_agent(synchronizer.client))


@pytest.fixture(scope="module")
def template(trainer: PretendTrainer, tmp_path_factory: pytest.TempPathFactory) -> Remembered:
    """A run of two bases, which tests copy."""
    run = Remembered(trainer, tmp_path_factory.mktemp("run"))
    run.publish(share=0.003)
    copy = run.folder_of(run.published[0]) / "full-explorer-0" / "actor"  # of an explorer that was killed
    copy.mkdir(parents=True)
    (copy / "weights").touch()
    run.publish(BASE_EVERY + 16, share=0.003)
    return run


@pytest.fixture
def run(template: Remembered, tmp_path: Path) -> Remembered:
    copy = object.__new__(Remembered)
    copy.__dict__ |= template.__dict__
    copy.root = tmp_path / "checkpoints"
    copy.deltas = copy.root / ".deltas"
    shutil.copytree(template.root, copy.root, copy_function=shutil.copyfile)
    return copy


@pytest.mark.parametrize("every", [4, *also(1)])
def test_every_version_is_restored_bit_for_bit(run: Remembered, every: int) -> None:
    assert history(run.root) == run.published
    for path in run.root.glob("global_step_*"):  # retention has deleted them
        shutil.rmtree(path)
    for version in run.published[::every]:
        assert run.restored(version) == run.digests[version]


def test_a_base_is_kept_every_so_many_versions_and_shares_the_bytes_of_its_checkpoint(template: Remembered) -> None:
    bases = sorted(template.deltas.glob("*/global_step_*"))
    assert bases == sorted([template.base(0), template.base(BASE_EVERY)])
    for base in bases:
        for path in base.glob("actor/*"):
            assert path.samefile(template.root / base.name / "actor" / path.name)


def test_what_only_readers_need_goes_once_none_needs_it(template: Remembered) -> None:
    """The single steps, the spans of 4 and what leads from a base stay."""
    retired = [version for version in template.published if not (template.folder_of(version) / "index.json").exists()]
    assert retired == template.published[: BASE_EVERY + 6]
    lengths = set()
    for number, version in enumerate(retired):
        for path in template.folder_of(version).glob("rank-00000-*.delta"):
            step = int(path.stem.rpartition("-")[2])
            lengths.add(number - template.published.index(Version(0, step)))
    assert lengths == {1, 4, 16}


def test_the_copy_of_a_killed_explorer_goes_with_what_only_readers_need(template: Remembered) -> None:
    assert not list(template.deltas.glob("*/full-*"))


def history_route(run: Remembered, number: int) -> Route:
    """The way to a version by the records of the history."""
    read = lambda version: VersionIndex.read(version_folder(run.deltas, version) / "history.json")  # noqa: E731
    route = find_route(run.published[number], None, 0, read, math.inf)
    assert route is not None
    return route


def test_few_deltas_lead_from_a_base_to_any_version(template: Remembered) -> None:
    assert max(len(history_route(template, number).starts) for number in range(len(template.published))) <= 7
    assert history_route(template, 34).starts == tuple(template.published[at] for at in (BASE_EVERY, 32, 33))


@pytest.fixture
def short(trainer: PretendTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remembered:
    """A run of three versions, of which the next one will have a delta from the base."""
    monkeypatch.setattr(checkpoint, "FROM_BASE_EVERY", 3)
    run = Remembered(trainer, tmp_path / "checkpoints")
    run.publish(3)
    return run


def test_a_version_with_a_delta_from_its_base_counts_its_bytes(short: Remembered) -> None:
    short.publish()
    files = list(short.folder_of(short.published[-1]).glob("*.delta"))
    assert len(files) == 4
    assert short.sent[-1].nbytes == sum(path.stat().st_size for path in files)
    assert short.restored(short.published[-1]) == short.digests[short.published[-1]]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_base_that_cannot_be_read_costs_the_delta_from_it_and_is_told(
    short: Remembered, harm: Callable[[Path], object]
) -> None:
    path = next(short.base(0).glob("actor/*"))
    data = path.read_bytes()
    harm(path)
    short.publish()
    assert path.name in str(short.sent[-1].fault)
    path.write_bytes(data)
    assert len(history_route(short, 3).starts) == 3
    assert short.restored(short.published[-1]) == short.digests[short.published[-1]]
    short.publish()
    assert short.sent[-1].fault is None


def test_the_size_of_a_history_is_that_of_its_files(run: Remembered) -> None:
    assert history_bytes(run.root) == sum(path.stat().st_size for path in run.deltas.rglob("*") if path.is_file())


def test_readers_in_the_run_do_not_search_the_history(template: Remembered) -> None:
    def index_of(version: Point) -> VersionIndex | None:
        path = template.folder_of(Version(*version)) / "index.json"
        return VersionIndex.read(path) if path.exists() else None

    route = find_route(template.published[-1], template.published[0], template.full_bytes, index_of)
    assert route is not None
    assert route.full is not None


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["lost", "damaged"])
def test_another_way_is_taken_where_a_delta_cannot_be_used(run: Remembered, harm: Callable[[Path], None]) -> None:
    run.lose_delta(16, 16, harm)
    assert run.restored(run.published[17]) == run.digests[run.published[17]]


def test_a_version_is_lost_with_the_only_delta_to_it_and_later_ones_are_not(run: Remembered) -> None:
    path = run.lose_delta(10, 1)
    for number in (9, 12, 15):
        assert run.restored(run.published[number]) == run.digests[run.published[number]]
    for number in (10, 11):
        with pytest.raises(RunError, match=f"no base and deltas lead to it: {path} cannot be read"):
            run.restored(run.published[number])


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["lost", "damaged"])
def test_a_base_that_cannot_be_used_is_made_up_for_by_the_one_before(
    run: Remembered, harm: Callable[[Path], None]
) -> None:
    harm(next(run.base(BASE_EVERY).glob("actor/*")))
    assert run.restored(run.published[-1]) == run.digests[run.published[-1]]
    harm(next(run.base(0).glob("actor/*")))
    with pytest.raises(RunError, match=r"no base and deltas lead to it: .*global_step"):
        run.restored(run.published[3])


def test_the_nearest_base_is_taken_and_no_record_before_it_is_read(
    run: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = VersionIndex.read
    seen: set[str] = set()

    def counted(path: Path) -> VersionIndex:
        seen.add(path.parent.name)
        return read(path)

    monkeypatch.setattr(VersionIndex, "read", counted)
    number = BASE_EVERY + 1
    assert run.restored(run.published[number]) == run.digests[run.published[number]]
    assert seen == {run.folder_of(version).name for version in run.published[BASE_EVERY : number + 1]}


def test_a_base_that_was_begun_before_is_made_again(run: Remembered, tmp_path: Path) -> None:
    """As after a copy that a full disk cut, where there are no links."""
    base = tmp_path / run.base(0).name
    keep_weights(run.base(0), base, durable=True)
    path = next(base.glob("actor/*"))
    path.unlink()
    path.write_bytes(b"cut")
    keep_weights(run.base(0), base, durable=True)
    assert verify(base).ok
    assert [path.name for path in tmp_path.iterdir() if "global_step" in path.name] == [base.name]


def repr_of(text: str | None) -> str:
    return repr(text)[:20]


@pytest.mark.parametrize(
    "text", [None, "", "[]", "[" * 99999, '{"format": 2, "full": null, "deltas": []}'], ids=repr_of
)
def test_a_version_whose_record_is_lost_is_an_error_and_others_are_restored(run: Remembered, text: str | None) -> None:
    path = run.folder_of(run.published[5]) / "history.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(RunError, match=r"history.json cannot be read"):
        run.restored(run.published[5])
    assert run.restored(run.published[16]) == run.digests[run.published[16]]


def test_a_delta_of_another_version_is_not_taken(run: Remembered) -> None:
    path, other = run.lose_delta(3, 1, lambda path: None), run.lose_delta(4, 1, lambda path: None)
    path.write_bytes(other.read_bytes())
    with pytest.raises(RunError, match="leads from version"):
        run.restored(run.published[3])


# ---- the folder after the end of an attempt


def test_a_history_survives_the_end_of_its_attempt_without_leftovers(run: Remembered) -> None:
    kept = {path.relative_to(run.root) for path in run.deltas.rglob("*")}
    newest = run.folder_of(run.published[-1])
    (newest / "full-explorer-0" / "actor").mkdir(parents=True)  # of a killed explorer
    torn = run.deltas / "0-999999"  # of a publisher that was killed before the record
    shutil.copytree(run.folder_of(run.published[7]), torn)
    (torn / "history.json").unlink()
    for _ in range(2):
        recover(run.root)
        assert {path.relative_to(run.root) for path in run.deltas.rglob("*")} == kept


def test_deltas_without_a_history_go_with_their_attempt(run: Remembered) -> None:
    for path in run.deltas.glob("*/history.json"):
        path.unlink()
    recover(run.root)
    assert not run.deltas.exists()


def test_a_version_is_taken_in_full_where_explorers_lease_the_folders_that_they_read(
    trainer: PretendTrainer, tmp_path: Path
) -> None:
    """The files that agents write for one explorer are no checkpoint, so there is nothing to lease."""

    @contextmanager
    def lease(folder: Path, version: Version) -> Iterator[Callable[[], None]]:
        with lease_checkpoint(folder.parent, version.step, reader="explorer-0", seconds=LIMIT) as held:
            yield lambda: held.renew(LIMIT)

    run = Run(trainer, tmp_path, store=CommittedStore(tmp_path))
    here = empty(run.weights)
    loader = make_loader(trainer, here, transport=run._mode.transport(run.side(lease_folder=lease)))
    for _ in range(2):
        run.publish()
        assert assert_holds(loader, here, run).fault is None
    run.publish()
    run.lose()
    assert "cannot be read" in str(assert_holds(loader, here, run).fault)
