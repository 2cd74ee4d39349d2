"""What may take the place of a checkpoint, and deaths and errors while it does."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import WEIGHTS, beside, commit, names, refuse, stage, unreadable
from trinity_sync.checkpoint.folder import catalog, commits, contents, leases, recovery
from trinity_sync.checkpoint.folder.contents import (
    Manifest,
    ManifestError,
    UnreadableError,
    read_manifest,
    staging_dir,
    step_dir,
)
from trinity_sync.checkpoint.folder.leases import lease_checkpoint, pin, pinned, unpin
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT


def test_the_same_step_of_an_earlier_attempt_is_replaced_whole(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a.pt": "old"})
    commit(tmp_path, 20, {"a.pt": "new", "b.pt": "new"}, attempt=1)
    assert names(tmp_path) == {f"global_step_20/{name}" for name in ("a.pt", "b.pt", "manifest.json")}
    assert (step_dir(tmp_path, 20) / "a.pt").read_text() == "new"


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_full_checkpoint_with_files_that_the_new_one_lacks_is_set_aside(
    tmp_path: Path, exchange: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w", "optim.pt": "o"})
    unwanted = {"model.pt": "other"} if attempt else {"model.pt": "other", "optim.pt": "o"}
    commit(tmp_path, 20, unwanted, attempt=attempt)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "other"
    aside = [catalog.verify(path) for path in tmp_path.glob("abandoned-*")]
    assert [report.ok for report in aside] == ([True] if attempt else [])
    assert not list(tmp_path.glob(".replaced-*"))


@pytest.mark.parametrize("exchange", [True, False])
def test_what_a_commit_took_the_place_of_is_set_aside_after_a_crash_too(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w", "optim.pt": "o"})
    with monkeypatch.context() as crash:

        def die(place: Path, aside: Path, successor: Manifest) -> None:
            raise KeyboardInterrupt

        crash.setattr(commits, "_trash_or_abandon", die)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    recovery.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "other"
    assert [catalog.verify(path).ok for path in tmp_path.glob("abandoned-*")] == [True]
    assert names(tmp_path) == {
        *(f"abandoned-global_step_20-attempt_0/{name}" for name in ("model.pt", "optim.pt", "manifest.json")),
        *(f"global_step_20/{name}" for name in ("model.pt", "manifest.json")),
    }


@pytest.mark.parametrize("exchange", [True, False])
def test_what_cannot_be_read_any_more_when_it_is_replaced_gets_its_place_back(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20, {"model.pt": "w"})
    pin(tmp_path, 20)
    unpinned = pinned(tmp_path)
    real = contents.exchange

    def then_it_cannot_be_read(first: Path, second: Path) -> bool:
        unreadable(second / "manifest.json")
        return exchange and real(first, second)

    monkeypatch.setattr(commits, "check_replaces", lambda *_: None)  # the pin came after that
    monkeypatch.setattr(contents, "exchange", then_it_cannot_be_read)
    with pytest.raises(UnreadableError, match="cannot be read now"):
        commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    monkeypatch.setattr(contents, "exchange", real)
    recovery.clean_staging(tmp_path, 20, 1)
    recovery.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert pinned(tmp_path) == unpinned


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("put_back", [True, False])
def test_an_error_after_folders_changed_places_costs_nobody_what_is_pinned(
    tmp_path: Path, exchange: bool, put_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20, {"model.pt": "w"}, created=1.0)
    pin(tmp_path, 20)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk fails")

    with monkeypatch.context() as failing:
        failing.setattr(commits, "check_replaces", lambda *_: None)  # the pin came after that
        failing.setattr(commits, "_blockers_of", fail)
        if not exchange:
            failing.setattr(contents, "exchange", lambda first, second: False)
        if not put_back:
            failing.setattr(commits, "_put_back", fail, raising=False)
        with pytest.raises(OSError, match="the disk fails"):
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1, created=2.0)
    recovery.clean_staging(tmp_path, 20, 1)
    recovery.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_what_is_staged_and_cannot_be_read_now_is_set_aside(tmp_path: Path) -> None:
    tidied = (lambda: recovery.clean_staging(tmp_path, 20, 0), lambda: recovery.recover(tmp_path))
    for attempt, tidy in enumerate(tidied):
        commit(tmp_path, 20, {"model.pt": f"w{attempt}"}, attempt=attempt)
        unreadable(step_dir(tmp_path, 20) / "manifest.json")
        step_dir(tmp_path, 20).rename(staging_dir(tmp_path, 20, attempt))
        tidy()
    assert {(path / "model.pt").read_text() for path in tmp_path.glob("abandoned-global_step_20*")} == {"w0", "w1"}


def test_a_replacement_by_renames_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w"})
    refuse(staging_dir(tmp_path, 20, 1), monkeypatch)
    with pytest.raises(OSError, match="Input/output error"):
        commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert not list(tmp_path.glob(".replaced-*"))


def leave(root: Path, step: int, files: dict[str, str], **options: Any) -> str:
    """What is said of a commit that is refused. The checkpoint that is there has lost nothing by it."""
    before = read_manifest(step_dir(root, step))
    with pytest.raises(RunError) as caught:
        commit(root, step, files, **options)
    assert read_manifest(step_dir(root, step)) == before
    assert catalog.verify(step_dir(root, step)).ok
    return str(caught.value)


@pytest.mark.parametrize("attempt", [0, 1])
def test_weights_alone_never_take_the_place_of_a_full_checkpoint(tmp_path: Path, attempt: int) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    said = leave(tmp_path, 20, WEIGHTS, kind=STATE_DICT, attempt=attempt)
    assert f"step 20 cannot be committed as state_dict by attempt {attempt}" in said
    assert "is a full checkpoint of attempt 0, which weights alone do not replace" in said


def test_files_in_a_full_checkpoints_own_folder_do_not_make_it_weights(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    before = read_manifest(step_dir(tmp_path, 20))
    with pytest.raises(RunError, match="which weights alone do not replace"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT))
    assert read_manifest(step_dir(tmp_path, 20)) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_what_somebody_holds_is_not_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    commit(tmp_path, 20)
    with lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60):
        assert "held by explorer-7" in leave(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
        assert "held by explorer-7" in leave(tmp_path, 20, {"actor/model.pt": "other"})
    pin(tmp_path, 20)
    assert "held by a pin" in leave(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
    unpin(tmp_path, 20)
    commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
    assert read_manifest(step_dir(tmp_path, 20)).attempt == 1


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_reader_that_comes_while_folders_change_places_keeps_its_own(
    tmp_path: Path, exchange: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_CLAIM_S", -1.0)  # the commit was stopped for so long that its claim has run out
    commit(tmp_path, 20)
    real, taken = contents.exchange, []

    def while_a_reader_comes(first: Path, second: Path) -> bool:
        if not taken:
            taken.append(lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60))
        return exchange and real(first, second)

    monkeypatch.setattr(contents, "exchange", while_a_reader_comes)
    said = leave(tmp_path, 20, {"actor/model.pt": "other"}, attempt=attempt)
    assert "held by explorer-7 since just now" in said
    assert not list(tmp_path.glob(".replaced-*"))


def test_a_reader_of_the_new_one_does_not_bring_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_CLAIM_S", -1.0)
    commit(tmp_path, 20)
    real = contents.exchange

    def then_a_reader_comes(first: Path, second: Path) -> bool:
        done = real(first, second)
        lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60)
        return done

    monkeypatch.setattr(contents, "exchange", then_a_reader_comes)
    commit(tmp_path, 20, {"actor/model.pt": "other"})
    assert (step_dir(tmp_path, 20) / "actor/model.pt").read_text() == "other"


def test_a_lease_on_what_is_replaced_at_the_same_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20)
    real = leases.replace_file

    def replaced_first(path: Path, text: str, **options: bool) -> None:
        commit(tmp_path, 20, {"actor/model.pt": "other"})
        real(path, text, **options)

    monkeypatch.setattr(leases, "replace_file", replaced_first)
    with pytest.raises(RunError, match="was replaced while explorer-7"):
        lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60)


def test_the_upgrade_of_weights_under_a_reader_and_a_pin_leaves_both_what_they_hold(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    pin(tmp_path, 20)
    with lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60) as lease:
        before = (lease.path / "actor/model.pt").stat().st_ino
        commit(tmp_path, 20, {"actor/optim.pt": "o"})
        assert (lease.path / "actor/model.pt").stat().st_ino == before
    assert read_manifest(step_dir(tmp_path, 20)).kind == FULL
    assert pinned(tmp_path) == {(20, 0)}


def test_a_manifest_that_cannot_be_read_is_put_aside_and_not_deleted(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"})
    (step_dir(tmp_path, 20) / "manifest.json").write_text("{}")
    commit(tmp_path, 20, {"actor/model.pt": "new"}, attempt=1)
    (aside,) = tmp_path.glob("abandoned-*")
    assert (aside / "actor/model.pt").read_text() == "w"
    (step_dir(tmp_path, 20) / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="is not valid"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=FULL))
    assert (step_dir(tmp_path, 20) / "manifest.json").read_text() == "{}"


def test_a_reader_that_comes_at_a_commit_in_place_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_CLAIM_S", -1.0)  # the commit was stopped for so long that its claim has run out
    before = commit(tmp_path, 20)
    real, taken = commits.write_manifest, []

    def when_a_reader_has_come(folder: Path, manifest: Manifest, **options: bool) -> None:
        if not taken:
            taken.append(lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60))
        real(folder, manifest, **options)

    monkeypatch.setattr(commits, "write_manifest", when_a_reader_has_come)
    with pytest.raises(RunError, match="held by explorer-7 since just now"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=FULL))
    assert read_manifest(step_dir(tmp_path, 20)) == before


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("fails_at", ["global_step_20", ".replaced-global_step_20"])
def test_the_first_error_is_told_though_it_cannot_be_taken_back(
    tmp_path: Path, exchange: bool, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20, {"model.pt": "w"}, created=1.0)
    pin(tmp_path, 20)
    real = contents.exchange
    exchanged: list[bool] = []

    def once(first: Path, second: Path) -> bool:
        if exchanged:
            raise OSError(errno.EROFS, "Read-only file system")
        exchanged.append(True)
        return exchange and real(first, second)

    def fail(*_: object, **__: object) -> None:
        if not exchange:
            refuse(tmp_path / fails_at, failing)
        raise OSError(errno.EIO, "the leases cannot be read")

    with monkeypatch.context() as failing:
        failing.setattr(commits, "check_replaces", lambda *_: None)  # the pin came after that
        failing.setattr(commits, "_blockers_of", fail)
        failing.setattr(contents, "exchange", once)
        with pytest.raises(OSError, match="the leases cannot be read") as told:
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1, created=2.0)
    (note,) = told.value.__notes__
    assert ("Read-only" if exchange else "Input/output error") in note
    recovery.clean_staging(tmp_path, 20, 1)
    recovery.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert catalog.verify(step_dir(tmp_path, 20)).ok
    assert [info.step for info in catalog.scan(tmp_path)] == [20]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_death_before_the_last_look_at_who_holds_the_old_is_made_good(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Death(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Death

    commit(tmp_path, 20, created=1.0)
    before = read_manifest(step_dir(tmp_path, 20))
    lease = lease_checkpoint(tmp_path, 20, reader="explorer-7", seconds=60)
    with monkeypatch.context() as patch:
        patch.setattr(commits, "check_replaces", lambda *_: None)  # the reader had not come yet
        patch.setattr(commits, "_blockers_of", die)
        if not exchange:
            patch.setattr(contents, "exchange", lambda first, second: False)
        with pytest.raises(Death):
            commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1, created=2.0)
    assert read_manifest(step_dir(tmp_path, 20)).attempt == 1
    recovery.recover(tmp_path)
    assert read_manifest(step_dir(tmp_path, 20)) == before
    assert catalog.verify(lease.path).ok
    assert not [path for path in names(tmp_path) if path.startswith((".staging", ".trash", ".replaced"))]


def test_a_replacement_beside_the_step_folders_that_died_half_way_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(created: float) -> None:
        files = tuple(stage(tmp_path, 20, WEIGHTS, attempt=1))
        draft = Manifest(step=20, attempt=1, kind=STATE_DICT, created=created, files=files)
        commits.commit_folder(tmp_path, draft, beside=True)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    commit(tmp_path, 20)
    again(1.0)
    monkeypatch.setattr(contents, "exchange", lambda first, second: False)
    for seen, created in (("_replaced", 2.0), ("_trash_or_abandon", 3.0)):
        with monkeypatch.context() as crash:
            if seen == "_trash_or_abandon":
                crash.setattr(commits, "_trash_or_abandon", die)
            else:
                crash.setattr(Path, "rename", dying_after(".replaced-global_step_20"))
            with pytest.raises(KeyboardInterrupt):
                again(created)
        assert list(tmp_path.glob(".versions/1/.replaced-*"))
        recovery.recover(tmp_path, attempt=1)
        assert not list(tmp_path.glob(".versions/1/.replaced-*"))
        assert read_manifest(beside(tmp_path, 20, 1)).created == (3.0 if seen == "_trash_or_abandon" else 1.0)
        assert catalog.verify(beside(tmp_path, 20, 1)).ok


@pytest.mark.parametrize("linked", ["global_step_20", ".replaced-global_step_20"])
def test_a_replacement_is_finished_without_files_from_or_to_behind_a_link(tmp_path: Path, linked: str) -> None:
    root, theirs = tmp_path / "root", tmp_path / "theirs"
    root.mkdir()
    for name in ("global_step_20", ".replaced-global_step_20"):
        place = theirs if name == linked else root
        commit(place, 20)
        step_dir(place, 20).rename(place / name)
        (place / name / f"of {place.name}").touch()
    (root / linked).symlink_to(theirs / linked)
    recovery.recover(root)
    assert list(theirs.rglob("of *")) == [theirs / linked / "of theirs"]
    assert not (root / ".replaced-global_step_20").exists()
    assert linked == "global_step_20" or [path.name for path in root.rglob("of *")] == ["of root"]


def dying_after(name: str) -> Any:
    """A `Path.rename` that is the last thing that a program does, where it gives something this name."""
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        real(path, target)
        if target.name == name:
            raise KeyboardInterrupt
        return target

    return rename
