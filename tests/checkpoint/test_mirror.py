"""A mirror on fsspec's own file systems: what is there after each kind of copy, and what a resume takes from it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.checkpoint.helpers import commit, unreadable
from trinity_sync.checkpoint import catalog, rollback, verification
from trinity_sync.checkpoint.layout import STAGING, read_manifest, step_dir
from trinity_sync.checkpoint.leases import pin
from trinity_sync.checkpoint.mirror.copies import ABANDONED, UPLOADING, DamagedError, Mirror
from trinity_sync.checkpoint.mirror.storage import Storage
from trinity_sync.checkpoint.tracker_files import TRACKERS
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import KeepLast

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
    return Mirror(lambda: Storage(place))


def broken_at(place: str, name: str | None) -> tuple[Mirror, list[str]]:
    """A mirror that cannot take this file, and the list of those it takes."""
    sent: list[str] = []

    def opened() -> Storage:
        storage = Broken(place)
        storage.at, storage.sent = name, sent
        return storage

    return Mirror(opened), sent


def committed_at(place: str) -> list[int]:
    mirror = mirror_at(place)
    return [step for step in mirror.steps() if mirror.manifest(step) is not None]


def tracker_at(place: str) -> str | None:
    return Storage(place).read(TRACKERS[FULL])


# ---- sending


def test_a_copy_is_a_checkpoint_there_and_comes_back_whole(place: str, here: Path, tmp_path: Path) -> None:
    manifest = commit(here, 20, FILES)
    mirror = mirror_at(place)
    assert mirror.upload(here, 20).bytes == manifest.bytes
    assert tracker_at(place) == "20"
    assert set(Storage(place).files("global_step_20")) == {*FILES, "manifest.json"}
    assert mirror.download(tmp_path / "back") == 20
    assert verification.verify(step_dir(tmp_path / "back", 20)).ok
    assert read_manifest(step_dir(tmp_path / "back", 20)) == read_manifest(step_dir(here, 20))


def test_a_copy_that_is_there_is_not_sent_again(place: str, here: Path) -> None:
    commit(here, 20, FILES)
    mirror_at(place).upload(here, 20)
    again = mirror_at(place).upload(here, 20)
    assert (again.bytes, again.skipped) == (0, len(FILES))


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
    rollback.set_start(here, 10, 1)
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
    for step in (10, 20):
        commit(here, step)
    for step in (10, 20, 30):
        Storage(there).write(f"global_step_{step}/actor/model.pt", "half")
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
    assert Mirror(lambda: Storage(filled), said.append).download(tmp_path / "back") == 20
    assert [info.step for info in catalog.scan(tmp_path / "back")] == [20]
    assert verification.verify(step_dir(tmp_path / "back", 20)).ok
    assert any("the mirror's copy of step 30 is passed over" in text for text in said)
    assert list((tmp_path / "back" / STAGING).iterdir()) == []


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
    assert verification.verify(step_dir(here, 30)).ok
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
        Mirror(lambda: Flaky(filled)).download(tmp_path / "back")
    assert catalog.scan(tmp_path / "back") == []
    Flaky.cut = False
    assert Mirror(lambda: Flaky(filled)).download(tmp_path / "back") == 30
    assert sorted(Flaky.fetched) == sorted(f"global_step_30/{name}" for name in [*FILES, "actor/step"])


def test_an_empty_place_has_nothing(place: str, tmp_path: Path) -> None:
    assert mirror_at(place).download(tmp_path / "back") is None
