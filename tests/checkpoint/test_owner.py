"""Whose a checkpoint folder is: its mark, what a mark forbids, and folders of earlier releases, which have none."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, stage, unreadable, verls
from trinity_sync.checkpoint.folder import catalog, commits, owner, resume_point
from trinity_sync.checkpoint.folder.contents import Manifest, UnreadableError, read_manifest, step_dir, write_manifest
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.checkpoint.folder.lock import locked
from trinity_sync.checkpoint.folder.owner import MARK, Owner
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import KeepLast
from trinity_sync.tracking.run_record import RunFolder

OURS, THEIRS = "a" * 32, "b" * 32


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begun(tmp_path / "run", OURS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere"


def begun(folder: Path, id: str) -> Path:
    """The folder of a run."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"attempt": 0, "id": id}))
    return folder


def of_run(root: Path, step: int, id: str | None) -> Manifest:
    """A checkpoint that names a run; None: as earlier releases wrote it."""
    manifest = replace(commit(root, step), run=id)
    write_manifest(step_dir(root, step), manifest)
    return manifest


def recorded(manifest: Manifest) -> owner.Recorded:
    return [(manifest.step, manifest.attempt, manifest.digest, manifest.bytes)]


# ---- the mark


def test_a_mark_says_who_owns_the_folder(root: Path, run: Path) -> None:
    mine = Owner.new(OURS, run)
    owner.write_mark(root, mine)
    assert owner.read_mark(root) == mine


def test_each_start_of_a_run_is_a_session_of_its_own(run: Path) -> None:
    assert Owner.new(OURS, run).session != Owner.new(OURS, run).session


def test_a_mark_inside_the_runs_folder_moves_with_it(run: Path, tmp_path: Path) -> None:
    owner.write_mark(run / "checkpoints", Owner.new(OURS, run))
    run.rename(tmp_path / "moved")
    mark = owner.read_mark(tmp_path / "moved" / "checkpoints")
    assert mark is not None
    assert mark.folder == str(tmp_path / "moved")


def test_a_mark_behind_a_link_does_not_move_with_the_runs_folder(run: Path, root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (run / "checkpoints").symlink_to(root)
    owner.write_mark(run / "checkpoints", Owner.new(OURS, run))
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    with pytest.raises(ConfigError, match="may be a copy"):
        owner.check(copy / "checkpoints", Owner.new(OURS, copy), recorded=())


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"run": "x"}', '{"run": 1, "folder": 2}'])
def test_a_damaged_mark_is_no_mark_of_anybody(root: Path, text: str) -> None:
    root.mkdir()
    (root / MARK).write_text(text)
    with pytest.raises(UnreadableError, match=rf"{MARK} is not the mark of a run"):
        owner.read_mark(root)


def test_a_mark_that_cannot_be_read_now_is_not_taken_for_none(root: Path, run: Path) -> None:
    owner.write_mark(root, Owner.new(OURS, run))
    unreadable(root / MARK)
    commit(root, 10)
    with pytest.raises(UnreadableError, match="cannot be read now"):
        catalog.scan(root)
    with pytest.raises(ConfigError, match="cannot be read now"):
        owner.check(root, Owner.new(OURS, run), recorded=())


def test_a_program_without_a_run_folder_keeps_the_id_of_its_folder(root: Path) -> None:
    root.mkdir()
    first = owner.adopt(root)
    assert owner.adopt(root) == first
    assert len(first) == 32


def test_a_program_whose_mark_was_lost_keeps_the_id_of_its_checkpoints(root: Path) -> None:
    of_run(root, 10, OURS)
    of_run(root, 20, None)
    assert owner.adopt(root) == OURS


# ---- whose folder it is


def test_an_empty_folder_is_anybodys(root: Path, run: Path) -> None:
    owner.check(root, Owner.new(OURS, run), recorded=())
    owner.check(root, Owner.new("", run), recorded=None)


def test_a_folder_of_another_run_is_refused(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, Owner.new(THEIRS, tmp_path / "theirs"))
    commit(root, 10)
    for named in (False, True):
        with pytest.raises(ConfigError, match=rf"belongs to another run: run {THEIRS} in {tmp_path}/theirs"):
            owner.check(root, Owner.new(OURS, run), recorded=(), named=named)


def test_a_mark_of_a_run_that_saved_nothing_is_in_nobodys_way(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, Owner.new(THEIRS, tmp_path / "theirs"))
    with locked(root, tmp_path / "theirs"):
        pass
    owner.check(root, Owner.new(OURS, run), recorded=())
    owner.check(root, Owner.new("", run), recorded=None)


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_folder_with_the_mark_of_a_run_that_may_live_is_refused(
    root: Path, run: Path, tmp_path: Path, host: str
) -> None:
    """As the mirror of a run that has copied nothing yet."""
    with RunFolder.open(tmp_path / "theirs", resume=False) as theirs:
        mark = Owner.new(THEIRS, theirs.path)
        root.mkdir()
        (root / MARK).write_text((mark if host == "this" else replace(mark, host="there")).to_text())
        for recorded in (None, ()):
            with pytest.raises(ConfigError, match=f"belongs to another run: run {THEIRS} in {theirs.path}"):
                owner.check(root, Owner.new(OURS, run), recorded=recorded)


def test_a_run_whose_lock_cannot_be_tried_may_live(
    root: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with RunFolder.open(tmp_path / "theirs", resume=False) as theirs:
        owner.write_mark(root, Owner.new(THEIRS, theirs.path))
        monkeypatch.setattr("fcntl.flock", flock)
        with pytest.raises(ConfigError, match=f"belongs to another run: run {THEIRS}"):
            owner.check(root, Owner.new(OURS, run), recorded=())


@pytest.mark.parametrize("folder", ["the run's", "the place"])
def test_a_start_that_ended_early_is_not_in_the_way_of_the_next(root: Path, run: Path, folder: str) -> None:
    """The next one has the locks of both when it looks."""
    with RunFolder.open(run.with_name("new"), resume=False) as own, locked(root, own.path):
        owner.write_mark(root, Owner.new(THEIRS, own.path if folder == "the run's" else root))
        owner.check(root, Owner.new("", own.path), recorded=None)


def test_a_run_on_another_host_may_be_a_copy(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, replace(Owner.new(OURS, tmp_path / "moved"), host="there"))
    with pytest.raises(ConfigError, match=rf"and {run} may be a copy of it; give checkpoint.dir={root}"):
        owner.check(root, Owner.new(OURS, run), recorded=())
    owner.check(root, Owner.new(OURS, run), recorded=(), named=True)


def test_a_moved_run_keeps_its_folder(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, Owner.new(OURS, run))
    commit(root, 10)
    run.rename(tmp_path / "moved")
    owner.check(root, Owner.new(OURS, tmp_path / "moved"), recorded=())


def test_a_copied_run_does_not_get_the_folder_of_the_first_one(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, Owner.new(OURS, run))
    commit(root, 10)
    copy = shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(ConfigError, match=rf"belongs to run {OURS} in {run} on .*, and {copy} may be a copy of it"):
        owner.check(root, Owner.new(OURS, copy), recorded=())
    owner.check(root, Owner.new(OURS, copy), recorded=(), named=True)
    owner.check(root, Owner.new(OURS, run), recorded=())


def test_a_run_in_the_place_of_a_moved_one_does_not_count_for_it(root: Path, run: Path, tmp_path: Path) -> None:
    owner.write_mark(root, Owner.new(OURS, run))
    run.rename(tmp_path / "moved")
    begun(run, THEIRS)
    owner.check(root, Owner.new(OURS, tmp_path / "moved"), recorded=())


@pytest.mark.parametrize(
    "make",
    [
        lambda root: commit(root, 10),
        lambda root: commit(root, 10) and (root / "global_step_10").rename(root / "abandoned-global_step_10"),
        lambda root: verls(root, 10),
        lambda root: stage(root, 10, {"x": "x"}),
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("10"),
        lambda root: (root / ".trash-precious").mkdir(),
        lambda root: (root / ".versions" / "1").mkdir(parents=True),
    ],
)
def test_a_new_run_begins_in_no_folder_whose_files_it_would_touch(
    root: Path, run: Path, make: Callable[[Path], object]
) -> None:
    root.mkdir()
    make(root)
    with pytest.raises(ConfigError, match="holds checkpoints of another run already"):
        owner.check(root, Owner.new("", run), recorded=None)


# ---- folders of earlier releases


def test_a_folder_without_a_mark_is_a_runs_whose_record_lists_its_checkpoints(root: Path, run: Path) -> None:
    manifest = of_run(root, 10, None)
    with pytest.raises(ConfigError, match="has no record"):
        owner.check(root, Owner.new(OURS, run), recorded=())
    owner.check(root, Owner.new(OURS, run), recorded=(), named=True)
    owner.check(root, Owner.new(OURS, run), recorded=recorded(manifest))


@pytest.mark.parametrize("change", [{"digest": "x"}, {"attempt": 1}, {"step": 7}, {"bytes": 1}])
def test_one_checkpoint_that_is_not_in_the_record_shows_that_a_folder_is_anothers(
    root: Path, run: Path, change: dict[str, object]
) -> None:
    first, second = of_run(root, 10, None), of_run(root, 20, None)
    other = {"step": 20, "attempt": 0, "digest": second.digest, "bytes": second.bytes} | change
    with pytest.raises(ConfigError, match=f"holds step 20, and {run} has no record of it; give checkpoint.dir="):
        owner.check(root, Owner.new(OURS, run), recorded=[*recorded(first), tuple(other.values())])
    owner.check(root, Owner.new(OURS, run), recorded=[*recorded(first), *recorded(second)])


def test_a_folder_without_a_mark_whose_checkpoints_name_another_run_is_refused(root: Path, run: Path) -> None:
    manifest = of_run(root, 10, THEIRS)
    with pytest.raises(ConfigError, match=f"holds step 10 of run {THEIRS}, .*; name another folder"):
        owner.check(root, Owner.new(OURS, run), recorded=recorded(manifest), named=True)


def refused(path: Path) -> Iterator[Path]:
    raise PermissionError(13, "denied")


@pytest.mark.parametrize("what", ["manifest", "folder"])
@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_read_now_is_not_taken_for_nothing(
    root: Path, run: Path, monkeypatch: pytest.MonkeyPatch, what: str, named: bool
) -> None:
    of_run(root, 10, THEIRS)
    if what == "manifest":
        unreadable(step_dir(root, 10) / "manifest.json")
    else:
        monkeypatch.setattr(Path, "iterdir", refused)
        with pytest.raises(ConfigError, match="cannot be read now"):
            owner.check(root, Owner.new("", run), recorded=None)
    with pytest.raises(ConfigError, match="cannot be read now"):
        owner.check(root, Owner.new(OURS, run), recorded=(), named=named)
    with pytest.raises(UnreadableError, match="cannot be read now"):
        owner.adopt(root)


def test_a_folder_without_a_mark_inside_the_runs_own_folder_is_its_own(run: Path) -> None:
    of_run(run / "checkpoints", 10, None)
    owner.check(run / "checkpoints", Owner.new(OURS, run), recorded=())


# ---- a checkpoint of another run in a folder of ours


@pytest.fixture
def mixed(root: Path, run: Path) -> Path:
    """A folder of ours with steps 10 (of an earlier release), 20 (ours) and 30 (another run's)."""
    owner.write_mark(root, Owner.new(OURS, run))
    for step, id in ((10, None), (20, OURS), (30, THEIRS)):
        of_run(root, step, id)
    return root


def test_a_checkpoint_of_another_run_is_known_for_one(mixed: Path) -> None:
    assert [info.state for info in catalog.scan(mixed)] == ["committed", "committed", "foreign"]


def test_a_checkpoint_of_another_run_is_not_gone_on_from(mixed: Path) -> None:
    said: list[str] = []
    found = resume_point.find(mixed, say=said.append)
    assert found is not None
    assert found.step == 20
    assert THEIRS in said[0]


def test_a_checkpoint_of_another_run_is_neither_deleted_nor_moved(mixed: Path) -> None:
    plan = prune_plan(mixed, [KeepLast(1)], now=0.0)
    assert [deleted["step"] for deleted in prune(mixed, plan, now=0.0)[0]] == [10]
    with pytest.raises(RunError, match="it is left where it is"):
        resume_point.set_start(mixed, 20, 1)
    assert read_manifest(step_dir(mixed, 30)).run == THEIRS


@pytest.mark.parametrize("staged", [True, False])
def test_a_checkpoint_of_another_run_is_not_replaced(mixed: Path, staged: bool) -> None:
    if staged:
        stage(mixed, 30, {"actor/model.pt": "ours"})
    with pytest.raises(RunError, match="it is left where it is"):
        commits.commit_folder(mixed, Manifest(step=30, attempt=0, kind=FULL, run=OURS))
    assert read_manifest(step_dir(mixed, 30)).run == THEIRS


def test_a_manifest_names_its_run(root: Path) -> None:
    manifest = of_run(root, 10, OURS)
    assert read_manifest(step_dir(root, 10)) == manifest
    assert manifest.to_json()["run"] == OURS
    assert "run" not in replace(manifest, run=None).to_json()
