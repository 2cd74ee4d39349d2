"""A mirror on fsspec's own file systems: what is there after each kind of copy, and what a resume takes from it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.checkpoint.helpers import commit, unreadable
from tests.checkpoint.mirror_places import OTHER, OURS, OWNER, THEIRS, marked
from trinity_sync.checkpoint.folder import catalog, deletion, resume_point
from trinity_sync.checkpoint.folder.contents import (
    STAGING,
    TRACKERS,
    Manifest,
    UnreadableError,
    read_manifest,
    step_dir,
    write_manifest,
)
from trinity_sync.checkpoint.folder.leases import pin
from trinity_sync.checkpoint.folder.owner import MARK, Owner, Recorded, write_mark
from trinity_sync.checkpoint.mirror import copies as storage_module
from trinity_sync.checkpoint.mirror import run_mirror
from trinity_sync.checkpoint.mirror.copies import ABANDONED, UPLOADING, DamagedError, ForeignError, Mirror, Storage
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import KeepLast
from trinity_sync.tracking.run_record import RunFolder

_numbers = itertools.count()
FILES = {"actor/model.pt": "weights", "actor/optim.pt": "moments", "actor/huggingface/config.json": "{}"}


class Broken(Storage):
    """A place whose line is cut while a file of this name is on its way."""

    at: str | None = None
    sent: list[str]

    def put(self, source: Path, name: str) -> None:
        if self.at is not None and name.endswith(self.at):
            self.write(name, source.read_text()[:-1])
            raise ConnectionResetError("line cut")
        self.sent.append(name.partition("/")[2])
        super().put(source, name)


@pytest.fixture(params=["memory", "path", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    names = {"path": str(tmp_path / "there"), "file": f"file://{tmp_path / 'there'}"}
    return names.get(request.param, f"memory://mirror-{next(_numbers)}/run")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there() -> str:
    return f"memory://mirror-{next(_numbers)}"


def mirror_at(place: str) -> Mirror:
    return Mirror(lambda: Storage(marked(place)), OWNER)


def broken_at(place: str, name: str | None) -> tuple[Mirror, list[str]]:
    """A mirror that cannot take this file, and the list of those it takes."""
    sent: list[str] = []

    def opened() -> Storage:
        storage = Broken(place)
        storage.at, storage.sent = name, sent
        return storage

    marked(place)
    return Mirror(opened, OWNER), sent


def committed_at(place: str) -> list[int]:
    mirror = mirror_at(place)
    return [step for step in mirror.steps() if mirror.manifest(step) is not None]


def tracker_at(place: str) -> str | None:
    return Storage(place).read(TRACKERS[FULL])


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*"])
def test_a_pattern_in_the_name_of_a_place_matches_nothing(name: str) -> None:
    base = f"memory://mirror-{next(_numbers)}"
    for place in ("run1", name):
        Storage(f"{base}/{place}").write("global_step_10/actor/model.pt", "precious")
        Storage(f"{base}/{place}").write("note", "precious")
    for deleted in ("global_step_10", "note", "note"):
        Storage(f"{base}/{name}").delete(deleted)
    assert Storage(f"{base}/{name}").names() == []
    assert Storage(f"{base}/run1").names() == ["global_step_10", "note"]


# ---- sending


def test_a_copy_is_a_checkpoint_there_and_comes_back_whole(place: str, here: Path, tmp_path: Path) -> None:
    manifest = commit(here, 20, FILES)
    mirror = mirror_at(place)
    assert mirror.upload(here, 20) == manifest.bytes
    assert tracker_at(place) == "20"
    assert set(Storage(place).files("global_step_20")) == {*FILES, "manifest.json"}
    assert mirror.download(tmp_path / "back") == 20
    assert catalog.verify(step_dir(tmp_path / "back", 20)).ok
    assert read_manifest(step_dir(tmp_path / "back", 20)) == read_manifest(step_dir(here, 20))


def test_a_copy_that_is_there_is_not_sent_again(place: str, here: Path) -> None:
    commit(here, 20, FILES)
    mirror_at(place).upload(here, 20)
    assert mirror_at(place).upload(here, 20) == 0


def test_the_tracker_there_does_not_go_back(here: Path, there: str) -> None:
    for step in (20, 10):
        commit(here, step)
        mirror_at(there).upload(here, step)
    assert tracker_at(there) == "20"


def test_a_checkpoint_that_is_damaged_here_is_none_there(here: Path, there: str) -> None:
    commit(here, 20, FILES)
    (step_dir(here, 20) / "actor/model.pt").write_text("WEIGHTS")
    with pytest.raises(DamagedError, match=r"step 20 is damaged here: actor/model\.pt was changed"):
        mirror_at(there).upload(here, 20)
    assert (committed_at(there), tracker_at(there)) == ([], None)


@pytest.mark.parametrize("cut", sorted(FILES))
def test_a_copy_that_broke_off_is_no_checkpoint_and_the_next_try_sends_the_rest(
    here: Path, there: str, cut: str
) -> None:
    commit(here, 20, FILES)
    broken, arrived = broken_at(there, cut)
    with pytest.raises(ConnectionResetError):
        broken.upload(here, 20)
    assert (committed_at(there), tracker_at(there)) == ([], None)
    whole, sent = broken_at(there, None)
    whole.upload(here, 20)
    assert sorted(arrived + sent) == sorted(FILES)
    assert committed_at(there) == [20]
    assert not Storage(there).files("global_step_20").keys() & {UPLOADING}


def test_a_torn_file_of_full_length_is_not_taken_for_the_whole(here: Path, there: str, tmp_path: Path) -> None:
    commit(here, 20, FILES)
    broken, _ = broken_at(there, "model.pt")
    with pytest.raises(ConnectionResetError):
        broken.upload(here, 20)
    Storage(there).write("global_step_20/actor/model.pt", "weighTS")
    mirror_at(there).upload(here, 20)
    assert mirror_at(there).download(tmp_path / "back") == 20


def test_files_of_another_attempt_are_not_mixed_in(here: Path, there: str, tmp_path: Path) -> None:
    commit(here, 20, FILES | {"actor/old.pt": "old"})
    mirror_at(there).upload(here, 20)
    commit(tmp_path / "again", 20, {name: text.upper() for name, text in FILES.items()}, attempt=1)
    broken, _ = broken_at(there, "model.pt")
    with pytest.raises(ConnectionResetError):
        broken.upload(tmp_path / "again", 20)
    assert committed_at(there) == []
    mirror_at(there).upload(tmp_path / "again", 20)
    assert set(Storage(there).files("global_step_20")) == {*FILES, "manifest.json"}
    assert mirror_at(there).download(tmp_path / "back") == 20
    assert (step_dir(tmp_path / "back", 20) / "actor/model.pt").read_text() == "WEIGHTS"


def test_a_file_that_went_missing_there_is_sent_again(here: Path, there: str) -> None:
    commit(here, 20, FILES)
    mirror_at(there).upload(here, 20)
    Storage(there).delete("global_step_20/actor/optim.pt")
    mirror, sent = broken_at(there, None)
    mirror.upload(here, 20)
    assert sent == ["actor/optim.pt"]
    assert committed_at(there) == [20]


def test_what_a_resume_left_behind_is_no_checkpoint_any_more(here: Path, there: str, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(here, step)
        mirror_at(there).upload(here, step)
    resume_point.set_start(here, 10, 1)
    commit(here, 15, attempt=1)
    mirror_at(there).upload(here, 15, start=10)
    assert (committed_at(there), tracker_at(there)) == ([10, 15], "15")
    assert ABANDONED in Storage(there).files("global_step_30")
    assert mirror_at(there).download(tmp_path / "back") == 15


def test_what_is_missing_there(here: Path, there: str) -> None:
    for step in (10, 20, 30):
        commit(here, step)
    mirror_at(there).upload(here, 20)
    assert mirror_at(there).missing(here, [30, 20, 10, 99]) == [10, 30]
    unreadable(step_dir(here, 20) / "manifest.json")
    assert mirror_at(there).missing(here, [30, 20, 10, 99]) == [10, 20, 30]


# ---- retention there


def test_the_policies_hold_there_too_and_so_do_pins(here: Path, there: str) -> None:
    for step in (10, 20, 30, 40):
        commit(here, step)
        mirror_at(there).upload(here, step)
    pin(here, 10)
    assert mirror_at(there).prune([KeepLast(2)], here, now=0.0) == [20]
    assert committed_at(there) == [10, 30, 40]
    assert mirror_at(there).steps() == [10, 30, 40]


def test_a_torn_copy_goes_when_its_checkpoint_is_gone_here(here: Path, there: str) -> None:
    for step in (10, 20, 30):
        commit(here, step)
    for step in (10, 20, 30):
        broken, _ = broken_at(there, "model.pt")
        with pytest.raises(ConnectionResetError):
            broken.upload(here, step)
    deletion.delete_folder(here, step_dir(here, 30))
    assert mirror_at(there).prune([KeepLast(1)], here, now=0.0) == [30]


def test_abandoned_copies_are_left_to_the_user_as_they_are_here(here: Path, there: str) -> None:
    Storage(there).write(f"global_step_30/{ABANDONED}", "{}")
    assert mirror_at(there).prune([KeepLast(1)], here, now=0.0) == []


# ---- fetching


@pytest.fixture
def filled(here: Path, there: str) -> str:
    """A mirror with steps 10, 20 and 30."""
    for step in (10, 20, 30):
        commit(here, step, FILES | {"actor/step": str(step)})
        mirror_at(there).upload(here, step)
    return there


def _damage(storage: Storage) -> None:
    storage.write("global_step_30/actor/model.pt", "WEIGHTS")


def _shorten(storage: Storage) -> None:
    storage.write("global_step_30/actor/model.pt", "weight")


def _lose(storage: Storage) -> None:
    storage.delete("global_step_30/actor/model.pt")


def _garble_manifest(storage: Storage) -> None:
    storage.write("global_step_30/manifest.json", "{")


def _change_manifest(storage: Storage) -> None:
    body = json.loads(storage.read("global_step_30/manifest.json") or "")
    storage.write("global_step_30/manifest.json", json.dumps(body | {"digest": "other"}))


@pytest.mark.parametrize("harm", [_damage, _shorten, _lose, _garble_manifest, _change_manifest])
def test_a_copy_that_is_damaged_is_passed_over_with_a_word(
    filled: str, tmp_path: Path, harm: Callable[[Storage], None]
) -> None:
    harm(Storage(filled))
    said: list[str] = []
    assert Mirror(lambda: Storage(filled), OWNER, said.append).download(tmp_path / "back") == 20
    assert [info.step for info in catalog.scan(tmp_path / "back")] == [20]
    assert catalog.verify(step_dir(tmp_path / "back", 20)).ok
    assert any("the mirror's copy of step 30 is skipped" in text for text in said)
    assert list((tmp_path / "back" / STAGING).iterdir()) == []


def test_the_word_names_the_file_of_the_copy_and_not_a_fetched_one_that_is_deleted(filled: str, tmp_path: Path) -> None:
    _damage(Storage(filled))
    said: list[str] = []
    Mirror(lambda: Storage(filled), OWNER, said.append).download(tmp_path / "back")
    assert any("copy of step 30 is skipped: actor/model.pt was changed" in text for text in said)


def test_half_a_copy_is_none(filled: str, tmp_path: Path) -> None:
    Storage(filled).delete("global_step_30/manifest.json")
    assert mirror_at(filled).download(tmp_path / "back") == 20


def test_only_what_is_newer_than_the_best_one_here_is_fetched(filled: str, tmp_path: Path) -> None:
    assert mirror_at(filled).download(tmp_path / "back", newer_than=(0, 30)) is None
    assert mirror_at(filled).download(tmp_path / "back", newer_than=(1, 25)) is None, "30 was abandoned by attempt 1"
    assert mirror_at(filled).download(tmp_path / "back", newer_than=(0, 20)) == 30


def test_the_latest_attempt_comes_first(filled: str, tmp_path: Path) -> None:
    commit(tmp_path / "later", 25, attempt=1)
    folder = step_dir(tmp_path / "later", 25)
    storage = Storage(filled)
    for name in ("actor/model.pt", "manifest.json"):
        storage.put(folder / name, f"global_step_25/{name}")
    assert mirror_at(filled).download(tmp_path / "back") == 25


def test_a_damaged_folder_here_makes_way_for_the_copy(filled: str, here: Path) -> None:
    (step_dir(here, 30) / "actor/model.pt").write_text("WEIGHTS")
    assert mirror_at(filled).download(here, newer_than=(0, 20)) == 30
    assert catalog.verify(step_dir(here, 30)).ok
    assert (here / "abandoned-global_step_30-attempt_0").is_dir()


def test_a_fetch_that_broke_off_goes_on_where_it_was(filled: str, tmp_path: Path) -> None:
    class Flaky(Storage):
        fetched: ClassVar[list[str]] = []
        cut = True

        def get(self, name: str, target: Path) -> None:
            if name.endswith("optim.pt") and self.cut:
                raise ConnectionResetError("line cut")
            self.fetched.append(name)
            super().get(name, target)

    with pytest.raises(ConnectionResetError):
        Mirror(lambda: Flaky(filled), OWNER).download(tmp_path / "back")
    assert catalog.scan(tmp_path / "back") == []
    Flaky.cut = False
    assert Mirror(lambda: Flaky(filled), OWNER).download(tmp_path / "back") == 30
    assert sorted(Flaky.fetched) == sorted(f"global_step_30/{name}" for name in [*FILES, "actor/step"])


def test_an_empty_place_has_nothing(place: str, tmp_path: Path) -> None:
    assert mirror_at(place).download(tmp_path / "back") is None


# ---- whose the place is


def at(place: str, owner: Owner = OWNER) -> Mirror:
    """A mirror as it is, also without a mark."""
    return Mirror(lambda: Storage(place), owner)


def foreign(place: str, step: int, kind: str) -> set[str]:
    """A folder there that this run has not written; returns its files."""
    storage, folder = Storage(place), f"global_step_{step}"
    storage.write(f"{folder}/actor/model.pt", "precious")
    text = replace(Manifest(step=step, attempt=0, kind=FULL), run=THEIRS).to_text()
    match kind:
        case "another run's":
            storage.write(f"{folder}/manifest.json", text)
        case "abandoned by another run":
            storage.write(f"{folder}/{ABANDONED}", text)
        case "begun by another run":
            storage.write(f"{folder}/{UPLOADING}", json.dumps({"run": THEIRS, "self": "x", "files": []}))
        case "garbled":
            storage.write(f"{folder}/{UPLOADING}", "{")
    return set(storage.files(folder))


FOREIGN = ["verl's", "another run's", "abandoned by another run", "begun by another run", "garbled"]


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_another_wrote_is_neither_deleted_nor_overwritten(here: Path, there: str, kind: str) -> None:
    mirror = mirror_at(there)
    for step in (10, 20):
        commit(here, step)
        mirror.upload(here, step)
    before = {step: foreign(there, step, kind) for step in (15, 30)}
    assert mirror.prune([KeepLast(1)], here, now=0.0) == [10]
    commit(here, 30)
    with pytest.raises(ForeignError, match="global_step_30 there is not a copy by this run"):
        mirror.upload(here, 30)
    resume_point.set_start(here, 20, 1)
    commit(here, 25, attempt=1)
    mirror.upload(here, 25, start=0)
    assert {step: set(Storage(there).files(f"global_step_{step}")) for step in (15, 30)} == before
    assert tracker_at(there) == "25"


def test_what_another_run_copied_is_not_fetched(filled: str, tmp_path: Path) -> None:
    foreign(filled, 40, "another run's")
    said: list[str] = []
    assert Mirror(lambda: Storage(filled), OWNER, said.append).download(tmp_path / "back") == 30
    assert any(f"step 40 is skipped: it is of another run, {THEIRS}" in text for text in said)


def test_the_tracker_there_names_no_step_of_another_run(here: Path, there: str) -> None:
    foreign(marked(there), 40, "another run's")
    commit(here, 20)
    mirror_at(there).upload(here, 20)
    assert tracker_at(there) == "20"


def test_a_free_place_gets_the_mark_and_nothing_else(place: str) -> None:
    at(place).claim()
    assert Owner.parse(Storage(place).read(MARK) or "", MARK) == OWNER
    assert Storage(place).names() == [MARK]


def test_a_place_of_another_run_is_refused_and_stays_as_it_is(place: str, here: Path) -> None:
    marked(place, OTHER)
    commit(here, 10)
    for work in (at(place).claim, at(place).check, lambda: at(place).upload(here, 10)):
        with pytest.raises(ForeignError, match=THEIRS):
            work()
    with pytest.raises(ForeignError):
        at(place).prune([], here, now=0.0)
    assert Storage(place).names() == [MARK]
    assert Storage(place).read(MARK) == OTHER.to_text()


def test_a_mark_that_cannot_be_understood_is_nobodys(place: str) -> None:
    Storage(place).write(MARK, "{")
    with pytest.raises(UnreadableError, match="is not the mark of a run"):
        at(place).claim()


def test_a_mark_that_cannot_be_read_now_is_not_taken_for_none(here: Path, tmp_path: Path) -> None:
    place = tmp_path / "there"
    marked(str(place))
    unreadable(place / MARK)
    commit(here, 10)
    for work in (at(str(place)).claim, lambda: at(str(place)).upload(here, 10)):
        with pytest.raises(OSError, match=r".*"):
            work()
    assert sorted(Storage(str(place)).names()) == [MARK]


def test_a_copy_is_not_begun_where_the_mark_is_gone(here: Path, tmp_path: Path) -> None:
    """As where another disk is mounted in the place, or none."""
    commit(here, 10)
    with pytest.raises(
        RunError, match=r"the mark of this run, \.run\.json, is not there any more; is the place mounted"
    ):
        at(str(tmp_path / "there")).upload(here, 10)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("change", [{"session": "9"}, {"run": THEIRS}])
def test_a_run_stops_where_another_start_has_taken_the_place_over(
    here: Path, there: str, change: dict[str, str]
) -> None:
    class TakenOver(Storage):
        def put(self, source: Path, name: str) -> None:
            super().put(source, name)
            self.write(MARK, replace(OWNER, **change).to_text())

    commit(here, 20)
    marked(there)
    with pytest.raises(ForeignError, match="was taken over by run"):
        Mirror(lambda: TakenOver(there), OWNER).upload(here, 20)
    assert committed_at(there) == []
    with pytest.raises(ForeignError, match="was taken over by run"):
        at(there).prune([KeepLast(1)], here, now=0.0)


def test_the_next_start_of_a_run_takes_its_place_over(here: Path, there: str) -> None:
    commit(here, 10)
    mirror_at(there).upload(here, 10)
    again = replace(OWNER, session="2")
    at(there, again).claim()
    commit(here, 20)
    at(there, again).upload(here, 20)
    assert committed_at(there) == [10, 20]


def test_a_copy_of_a_run_does_not_get_its_place(there: str, tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    for folder in (first, copy):
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"id": OURS}))
    marked(there, replace(OWNER, folder=str(first)))
    with pytest.raises(
        ForeignError, match=f"belongs to run {OURS} in {first} .* and {copy} may be a copy of it; give "
    ):
        at(there, replace(OWNER, folder=str(copy))).claim()
    (first / "run.json").unlink()
    at(there, replace(OWNER, folder=str(copy))).claim()


@pytest.mark.parametrize("why", ["another host", "not to be read"])
def test_a_run_that_may_be_a_copy_gets_the_place_where_it_is_named(there: str, tmp_path: Path, why: str) -> None:
    first, other = tmp_path / "closed" / "first", replace(OWNER, folder=str(tmp_path))
    first.mkdir(parents=True)
    (first / "run.json").write_text("{}")
    if why == "not to be read":
        unreadable(first / "run.json")
    marked(there, replace(OWNER, folder=str(first), host="there" if why == "another host" else OWNER.host))
    with pytest.raises(ForeignError, match=r"give checkpoint\.mirror=\.\.\. once more to take it over"):
        at(there, other).claim()
    at(there, other).claim(named=True)
    assert Owner.parse(Storage(there).read(MARK) or "", MARK) == other


def test_a_place_that_is_named_is_not_taken_with_what_the_run_has_no_record_of(there: str) -> None:
    foreign(there, 10, "another run's")
    with pytest.raises(ForeignError, match="holds checkpoints of another run already"):
        at(there).claim(named=True)


def test_the_checkpoint_folder_of_another_run_is_no_mirror(tmp_path: Path) -> None:
    root = tmp_path / "theirs" / "checkpoints"
    write_mark(root, Owner.new(THEIRS, tmp_path / "theirs"))
    with pytest.raises(ForeignError, match="is the checkpoint folder of a run"):
        at(str(root)).claim()
    assert Storage(str(root)).names() == [MARK]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Owner]:
    """A run that lives on this machine."""
    with RunFolder.open(tmp_path / "live", resume=False) as folder:
        yield Owner.new(THEIRS, folder.path)


def test_a_claim_that_a_killed_start_has_left_is_in_nobodys_way(there: str, tmp_path: Path) -> None:
    for claimant in (replace(OWNER, session="killed"), replace(OWNER, run=THEIRS, folder=str(tmp_path / "gone"))):
        Storage(there).write(f".claim-{claimant.session}-", claimant.to_text())
    at(there).claim()
    assert Storage(there).names() == [MARK]


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_claim_of_a_run_that_may_live_is_told(there: str, tmp_path: Path, live: Owner, host: str) -> None:
    claimant = live if host == "this" else OTHER
    name = f".claim-{claimant.session}"
    Storage(there).write(name, claimant.to_text())
    with pytest.raises(ForeignError, match=f"{claimant} is about to take it; start again, or delete {name} if"):
        at(there, Owner.new(OURS, tmp_path / "run")).claim()
    assert Storage(there).names() == [name]


def test_a_start_in_the_folder_of_one_that_ended_gets_its_place(there: str, live: Owner) -> None:
    """As where the run's folder was deleted, or its start ended before there was a record."""
    marked(there, live)
    at(there, replace(live, run=OURS)).claim()
    assert Owner.parse(Storage(there).read(MARK) or "", MARK).run == OURS


@pytest.mark.parametrize("name", ["global_step_10/actor/model.pt", TRACKERS[FULL]])
def test_a_new_run_begins_in_no_place_whose_files_it_would_touch(place: str, name: str) -> None:
    Storage(place).write(name, "7")
    for work in (at(place).claim, at(place).check):
        with pytest.raises(ForeignError, match="holds checkpoints of another run already"):
            work()
    assert Storage(place).files() == {name: 1}


def test_a_new_run_leaves_other_files_of_the_place_alone(place: str, here: Path) -> None:
    Storage(place).write("notes.txt", "precious")
    at(place).claim()
    commit(here, 10)
    at(place).upload(here, 10)
    at(place).prune([], here, now=0.0)
    assert Storage(place).read("notes.txt") == "precious"


# ---- places of earlier releases, without a mark


def commits_in(root: Path) -> Recorded:
    known: Recorded = run_mirror._claim(root, MirrorSettings())["known"]
    return known


def test_a_place_without_a_mark_is_a_runs_whose_record_lists_its_copies(here: Path, there: str) -> None:
    manifest = commit(here, 10)
    mirror_at(there).upload(here, 10)
    Storage(there).write(f"global_step_20/{UPLOADING}", '{"self": "x", "files": []}')
    Storage(there).write(f"global_step_30/{ABANDONED}", replace(manifest, step=30).to_text())
    known = [(10, 0, manifest.digest, manifest.bytes)]
    Storage(there).delete(MARK)
    for recorded in ([], [(10, 0, "other", manifest.bytes)], [(11, 0, manifest.digest, manifest.bytes)]):
        with pytest.raises(ForeignError):
            at(there).claim(recorded)
        assert Storage(there).read(MARK) is None
    at(there).claim(known)
    assert Storage(there).read(MARK) == OWNER.to_text()


@pytest.mark.parametrize("again", [False, True])
def test_checkpoints_that_are_here_count_as_recorded(here: Path, there: str, again: bool) -> None:
    commit(here, 10)
    mirror_at(there).upload(here, 10)
    Storage(there).delete(MARK)
    at(there).claim(commits_in(here), again=again)
    assert Storage(there).read(MARK) == OWNER.to_text()


def test_a_lost_mark_is_put_back_where_the_manifests_name_the_run(here: Path, there: str) -> None:
    manifest = replace(commit(here, 10), run=OURS)
    write_manifest(step_dir(here, 10), manifest)
    mirror_at(there).upload(here, 10)
    Storage(there).delete(MARK)
    at(there).claim([(1, 0, None, 1)])
    assert Storage(there).read(MARK) == OWNER.to_text()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["verl's", "another run's"])
def test_one_folder_that_no_record_lists_keeps_the_mark_away(here: Path, there: str, kind: str, again: bool) -> None:
    commit(here, 10)
    mirror_at(there).upload(here, 10)
    foreign(there, 20, kind)
    Storage(there).delete(MARK)
    with pytest.raises(ForeignError, match="it holds global_step_20, and /runs/ours has no record of it"):
        at(there).claim(commits_in(here), again=again)


# ---- two at the same instant


class Racing(Storage):
    """A place where something happens just before a name is written, once."""

    before: ClassVar[dict[str, Callable[[], object]]] = {}

    def write(self, name: str, text: str) -> None:
        for prefix in [prefix for prefix in self.before if name.startswith(prefix)]:
            self.before.pop(prefix)()
        super().write(name, text)


@pytest.mark.parametrize("point", [".claim-", MARK])
def test_of_two_runs_that_start_at_once_one_at_most_gets_the_place(there: str, point: str) -> None:
    outcomes: list[str] = []

    def claim(mirror: Mirror) -> None:
        try:
            mirror.claim()
            outcomes.append("claimed")
        except ForeignError:
            outcomes.append("refused")

    Racing.before = {point: lambda: claim(at(there, OTHER))}
    claim(Mirror(lambda: Racing(there), OWNER))
    assert sorted(outcomes) == ["claimed", "refused"]
    assert Storage(there).names() == [MARK]


# ---- a run that has copied nothing


def test_a_place_where_a_dead_run_of_this_machine_has_copied_nothing_is_free(place: str, tmp_path: Path) -> None:
    dead = replace(OTHER, host=OWNER.host, folder=str(tmp_path / "dead"))
    marked(place, dead)
    with RunFolder.open(tmp_path / "dead", resume=False), pytest.raises(ForeignError, match="belongs to another run"):
        at(place).claim()
    with pytest.raises(ForeignError, match="belongs to another run"):
        at(place, replace(OWNER, host="elsewhere")).claim()
    at(place).claim()
    assert Storage(place).read(MARK) == OWNER.to_text()


def test_a_place_of_a_run_whose_lock_cannot_be_read_now_is_not_free(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / ".lock").symlink_to(".lock")  # an error for root, too
    marked(place, replace(OTHER, host=OWNER.host, folder=str(folder)))
    with pytest.raises(ForeignError, match="belongs to another run"):
        at(place).claim()


def test_a_place_where_a_dead_run_has_copied_something_is_not_free(here: Path, there: str, tmp_path: Path) -> None:
    dead = replace(OTHER, host=OWNER.host, folder=str(tmp_path / "dead"))
    commit(here, 10)
    at(there, dead).claim()
    at(there, dead).upload(here, 10)
    with pytest.raises(ForeignError, match="belongs to another run"):
        at(there).claim()


# ---- a deletion that breaks off, and power cuts


@pytest.mark.parametrize("after", range(4))
def test_a_deletion_that_breaks_off_is_gone_on_with(here: Path, there: str, after: int) -> None:
    class Cut(Storage):
        left = after

        def delete(self, name: str) -> None:
            if name.startswith("global_step_10"):
                if Cut.left == 0:
                    raise ConnectionResetError("line cut")
                Cut.left -= 1
            super().delete(name)

    for step in (10, 20):
        commit(here, step, FILES)
        mirror_at(there).upload(here, step)
    deletion.delete_folder(here, step_dir(here, 10))
    with pytest.raises(ConnectionResetError):
        Mirror(lambda: Cut(there), OWNER).prune([KeepLast(1)], here, now=0.0)
    mirror_at(there).prune([KeepLast(1)], here, now=0.0)
    assert mirror_at(there).steps() == [20]
    assert Storage(there).files("global_step_10") == {}


def test_on_a_path_of_this_machine_a_copy_is_durable_before_its_manifest_and_that_before_the_tracker(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, order = tmp_path / "there", []
    commit(here, 20, FILES)
    marked(str(place))
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    at(str(place)).upload(here, 20)
    names = [path.relative_to(place).as_posix() for path in order if path.is_relative_to(place)]
    manifest = next(at for at, name in enumerate(names) if name.startswith("global_step_20/.manifest.json"))
    tracker = next(at for at, name in enumerate(names) if name.startswith(f".{TRACKERS[FULL]}"))
    assert {f"global_step_20/{name}" for name in FILES} <= set(names[:manifest])
    assert "global_step_20/actor/huggingface" in names[:manifest]
    assert "global_step_20" in names[manifest:tracker]
    assert "." in names[tracker:]


def test_what_is_fetched_is_durable_before_it_is_a_checkpoint_also_what_an_earlier_try_brought(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, back = tmp_path / "there", tmp_path / "back"
    commit(here, 20, FILES)
    marked(str(place))
    at(str(place)).upload(here, 20)
    staging = back / STAGING / f"mirror-20-{read_manifest(step_dir(here, 20)).attempt}"
    first = min(FILES)
    (staging / first).parent.mkdir(parents=True)
    shutil.copy(here / "global_step_20" / first, staging / first)
    synced: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert at(str(place)).download(back) == 20
    assert {staging / name for name in FILES} <= set(synced)


def test_a_deletion_on_a_path_of_this_machine_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path / "there"))
    storage.write("folder/name", "text")
    synced: list[Path] = []
    monkeypatch.setattr(storage_module, "sync_folder", synced.append)
    storage.delete("folder/name")
    assert synced == [tmp_path / "there" / "folder"]


def test_a_small_file_on_a_path_of_this_machine_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(f"file://{tmp_path}")
    storage.write("name", "old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        storage.write("name", "new")
    assert storage.read("name") == "old"
