"""Commit, scan, verify, resume on disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import commit, names, refuse, stage, unreadable
from trinity_sync.checkpoint import holds, store
from trinity_sync.checkpoint.holds import lease_checkpoint, pin, pinned, unpin
from trinity_sync.checkpoint.layout import (
    Manifest,
    ManifestError,
    UnreadableError,
    file_entry,
    read_manifest,
    staging_dir,
    step_dir,
    versions_dir,
)
from trinity_sync.checkpoint.trackers import read_tracker, write_tracker
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.protocol.files import FileEntry
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind


def test_a_committed_folder_holds_what_was_staged_and_a_manifest(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "huggingface/config.json": "{}"})
    folder = step_dir(tmp_path, 20)
    assert names(folder) == {"actor/model.pt", "huggingface/config.json", "manifest.json"}
    assert store.verify(folder).ok
    assert not staging_dir(tmp_path, 20, 0).exists()


def test_files_that_no_part_named_are_digested_and_listed(tmp_path: Path) -> None:
    manifest = commit(tmp_path, 20, {"a": "1", "sub/b": "2"}, reported=False)
    assert [entry.path for entry in manifest.files] == ["a", "sub/b"]
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_a_reported_file_that_is_missing_fails_the_commit_and_shows_nothing(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"a": "1"})
    ghost = FileEntry("model.pt", 5, "00")
    with pytest.raises(RunError, match=r"model.pt was reported with 5 bytes, but is not there"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(*files, ghost)))
    assert store.scan(tmp_path) == []


def test_a_file_that_is_shorter_than_reported_fails_the_commit(tmp_path: Path) -> None:
    (entry,) = stage(tmp_path, 20, {"a": "long"})
    (staging_dir(tmp_path, 20, 0) / "a").write_text("s")
    with pytest.raises(RunError, match="has 1 bytes"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(entry,)))


def test_the_upgrade_of_a_state_dict_shares_the_bytes_of_its_weights(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    before = (step_dir(tmp_path, 20) / "actor/model.pt").stat().st_ino
    manifest = commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert manifest.kind == FULL
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert (step_dir(tmp_path, 20) / "actor/model.pt").stat().st_ino == before
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_without_hard_links_the_weights_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    monkeypatch.setattr(os, "link", refuse)
    commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert store.verify(step_dir(tmp_path, 20)).ok
    assert read_manifest(step_dir(tmp_path, 20)).kind == FULL


def test_a_partial_commit_leaves_the_staging_folder_for_the_rest(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"actor/model.pt": "w"})
    (staging_dir(tmp_path, 20, 0) / "actor/optim.pt").write_text("half")
    store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=STATE_DICT, files=tuple(files)), partial=True)
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "manifest.json"}
    assert names(staging_dir(tmp_path, 20, 0)) == {"actor/model.pt", "actor/optim.pt"}
    (staging_dir(tmp_path, 20, 0) / "actor/optim.pt").write_text("whole")
    store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL))
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_a_small_file_that_is_written_again_does_not_change_the_committed_weights(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"huggingface/config.json": "{}"})
    store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=STATE_DICT, files=tuple(files)), partial=True)
    (staging_dir(tmp_path, 20, 0) / "huggingface/config.json").write_text("being rewritten")
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_files_written_straight_into_the_step_folder_are_committed_there(tmp_path: Path) -> None:
    folder = step_dir(tmp_path, 20)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/model.pt").write_text("w")
    store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL))
    assert store.verify(folder).ok
    assert [info.step for info in store.scan(tmp_path)] == [20]


def test_files_in_the_step_folder_are_kept_when_others_were_staged(tmp_path: Path) -> None:
    folder = step_dir(tmp_path, 20)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/model.pt").write_text("w")
    manifest = commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert [entry.path for entry in manifest.files] == ["actor/model.pt", "actor/optim.pt"]
    assert store.verify(folder).ok


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
        monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w", "optim.pt": "o"})
    unwanted = {"model.pt": "other"} if attempt else {"model.pt": "other", "optim.pt": "o"}
    commit(tmp_path, 20, unwanted, attempt=attempt)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "other"
    aside = [store.verify(path) for path in tmp_path.glob("abandoned-*")]
    assert [report.ok for report in aside] == ([True] if attempt else [])
    assert not list(tmp_path.glob(".replaced-*"))


@pytest.mark.parametrize("exchange", [True, False])
def test_what_a_commit_took_the_place_of_is_set_aside_after_a_crash_too(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w", "optim.pt": "o"})
    with monkeypatch.context() as crash:

        def die(place: Path, aside: Path, successor: Manifest) -> None:
            raise KeyboardInterrupt

        crash.setattr(store, "_let_go", die)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    store.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "other"
    assert [store.verify(path).ok for path in tmp_path.glob("abandoned-*")] == [True]
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
    real = store._exchange

    def then_it_cannot_be_read(first: Path, second: Path) -> bool:
        unreadable(second / "manifest.json")
        return exchange and real(first, second)

    monkeypatch.setattr(store, "_check_replaces", lambda *_: None)  # the pin came after that
    monkeypatch.setattr(store, "_exchange", then_it_cannot_be_read)
    with pytest.raises(UnreadableError, match="cannot be read now"):
        commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    monkeypatch.setattr(store, "_exchange", real)
    store.clean_staging(tmp_path, 20, 1)
    store.recover(tmp_path)
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
        failing.setattr(store, "_check_replaces", lambda *_: None)  # the pin came after that
        failing.setattr(store, "_holders_of", fail)
        if not exchange:
            failing.setattr(store, "_exchange", lambda first, second: False)
        if not put_back:
            failing.setattr(store, "_put_back", fail, raising=False)
        with pytest.raises(OSError, match="the disk fails"):
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1, created=2.0)
    store.clean_staging(tmp_path, 20, 1)
    store.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_what_is_staged_and_cannot_be_read_now_is_set_aside(tmp_path: Path) -> None:
    for attempt, tidy in ((0, lambda: store.clean_staging(tmp_path, 20, 0)), (1, lambda: store.recover(tmp_path))):
        commit(tmp_path, 20, {"model.pt": f"w{attempt}"}, attempt=attempt)
        unreadable(step_dir(tmp_path, 20) / "manifest.json")
        step_dir(tmp_path, 20).rename(staging_dir(tmp_path, 20, attempt))
        tidy()
    assert {(path / "model.pt").read_text() for path in tmp_path.glob("abandoned-global_step_20*")} == {"w0", "w1"}


def test_a_replacement_by_renames_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    commit(tmp_path, 20, {"model.pt": "w"})
    refuse(staging_dir(tmp_path, 20, 1), monkeypatch)
    with pytest.raises(OSError, match="Input/output error"):
        commit(tmp_path, 20, {"model.pt": "other"}, attempt=1)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert not list(tmp_path.glob(".replaced-*"))


# ---- files of others in a step's folder


def data(root: Path, step: int) -> Path:
    return step_dir(root, step) / "data.pt"


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("kind", [STATE_DICT, FULL])
def test_a_file_that_others_wrote_into_a_committed_folder_stays_with_the_step(
    tmp_path: Path, exchange: bool, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=kind)
    data(tmp_path, 8).write_text("where the data is")
    commit(tmp_path, 8, {"actor/model.pt": "w", "critic/model.pt": "c"})
    assert data(tmp_path, 8).read_text() == "where the data is"
    with data(tmp_path, 8).open("a") as still_being_written:
        still_being_written.write(" in all")
    report = store.verify(step_dir(tmp_path, 8))
    assert (report.ok, report.unlisted) == (True, ("data.pt",))


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("partial", [True, False])
def test_a_file_that_others_write_while_the_step_is_committed_stays_with_it(
    tmp_path: Path, exchange: bool, attempt: int, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = STATE_DICT if partial else FULL
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=kind)
    real = store._exchange

    def then_verl_writes(first: Path, second: Path) -> bool:
        data(tmp_path, 8).write_text("where the data is")
        return exchange and real(first, second)

    monkeypatch.setattr(store, "_exchange", then_verl_writes)
    files = {"actor/model.pt": "w", "actor/more.pt": "m"}
    commit(tmp_path, 8, files, kind=kind, attempt=attempt, partial=partial)
    assert data(tmp_path, 8).read_text() == "where the data is"
    assert store.verify(step_dir(tmp_path, 8)).unlisted == ("data.pt",)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_death_before_the_old_folder_goes_takes_no_files_of_others_with_it(
    tmp_path: Path, exchange: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Death(BaseException):
        pass

    commit(tmp_path, 8, {"actor/model.pt": "w"}, created=1.0)
    real = store._exchange

    def then_verl_writes(first: Path, second: Path) -> bool:
        data(tmp_path, 8).write_text("where the data is")
        return exchange and real(first, second)

    def die(*_: object) -> None:
        raise Death

    with monkeypatch.context() as crash:
        crash.setattr(store, "_exchange", then_verl_writes)
        crash.setattr(store, "_let_go", die)
        with pytest.raises(Death):
            commit(tmp_path, 8, {"actor/model.pt": "w", "actor/more.pt": "m"}, attempt=attempt, created=2.0)
    store.recover(tmp_path)
    assert data(tmp_path, 8).read_text() == "where the data is"
    assert store.verify(step_dir(tmp_path, 8)).ok
    assert read_manifest(step_dir(tmp_path, 8)).attempt == attempt
    assert not [path for path in names(tmp_path) if path.startswith((".staging", ".trash", ".replaced"))]


def test_weights_that_are_committed_first_take_nothing_of_what_others_write_in_the_steps_folder(tmp_path: Path) -> None:
    step_dir(tmp_path, 8).mkdir(parents=True)
    data(tmp_path, 8).write_text("where the data is")
    commit(tmp_path, 8, {"actor/model.pt": "w"}, kind=STATE_DICT, partial=True)
    assert data(tmp_path, 8).read_text() == "where the data is"


def test_saving_a_step_again_never_leaves_less_than_before(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a": "1"})
    commit(tmp_path, 20, {"a": "1"})
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_scan_lists_by_step_and_says_what_is_wrong(tmp_path: Path) -> None:
    commit(tmp_path, 100)
    commit(tmp_path, 20, kind=STATE_DICT)
    step_dir(tmp_path, 30).mkdir()
    (tmp_path / "notes").mkdir()
    found = store.scan(tmp_path)
    assert [(info.step, info.kind) for info in found] == [(20, STATE_DICT), (30, None), (100, FULL)]
    assert "no manifest.json" in found[1].problems[0]
    assert store.scan(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_text("weights 21"), "was changed"),
        (lambda path: path.write_text("short"), "bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_verify_finds_damage(tmp_path: Path, damage: object, word: str) -> None:
    commit(tmp_path, 20)
    damage(step_dir(tmp_path, 20) / "actor/model.pt")  # type: ignore[operator]
    report = store.verify(step_dir(tmp_path, 20))
    assert not report.ok
    assert word in report.problems[0]
    assert "model.pt" in report.problems[0]


def test_verify_names_files_that_nobody_committed(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    (step_dir(tmp_path, 20) / "stray").write_text("x")
    report = store.verify(step_dir(tmp_path, 20))
    assert report.ok
    assert report.unlisted == ("stray",)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a": "123", "b": "4567"})
    seen: list[tuple[int, int]] = []
    store.verify(step_dir(tmp_path, 20), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (7, 7)]


def test_a_resume_takes_the_newest_that_verifies_and_says_what_it_passed_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step)
    commit(tmp_path, 40, kind=STATE_DICT)
    (step_dir(tmp_path, 30) / "actor/model.pt").write_text("torn")
    (step_dir(tmp_path, 20) / "manifest.json").write_text("")
    skipped: list[str] = []
    found = store.newest_good(tmp_path, on_skip=skipped.append)
    assert found is not None
    assert found.step == 10
    assert [("step 30" in text, "step 20" in text) for text in skipped] == [(True, False), (False, True)]


def test_weights_can_be_taken_from_either_kind(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    commit(tmp_path, 40, kind=STATE_DICT)
    found = store.newest_good(tmp_path, kind=STATE_DICT)
    assert found is not None
    assert found.step == 40


def test_where_nothing_verifies_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    commit(tmp_path, 10, {})
    assert store.newest_good(tmp_path) is None


def test_a_resume_sets_the_trackers_back_and_puts_later_weights_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step)
    commit(tmp_path, 15, kind=STATE_DICT)
    write_tracker(tmp_path, FULL, 30)
    write_tracker(tmp_path, STATE_DICT, 30)
    stage(tmp_path, 40, {"a": "1"})
    abandoned = store.set_start(tmp_path, 10, 1)
    assert [path.name for path in abandoned] == [f"abandoned-global_step_{step}-attempt_0" for step in (15, 20, 30)]
    assert [info.step for info in store.scan(tmp_path)] == [10]
    assert (read_tracker(tmp_path, FULL).step, read_tracker(tmp_path, STATE_DICT).step) == (10, 10)
    assert not staging_dir(tmp_path, 40, 0).exists()


def test_abandoning_one_step_twice_keeps_both(tmp_path: Path) -> None:
    for _ in range(2):
        commit(tmp_path, 20)
        store.set_start(tmp_path, 0, 1)
    assert len(list(tmp_path.glob("abandoned-global_step_20-attempt_0*"))) == 2


def test_the_newest_attempt_counts_what_was_abandoned(tmp_path: Path) -> None:
    assert store.newest_attempt(tmp_path / "checkpoints") is None
    commit(tmp_path, 10)
    assert store.newest_attempt(tmp_path) == 0
    for attempt in (3, 3):
        commit(tmp_path, 20, attempt=attempt)
        store.set_start(tmp_path, 0, attempt + 1)
    assert store.scan(tmp_path) == []
    assert store.newest_attempt(tmp_path) == 3


def test_a_start_from_nothing_removes_the_trackers(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    store.set_start(tmp_path, 0, 1)
    assert read_tracker(tmp_path, FULL).step is None


def test_a_first_start_needs_no_folder(tmp_path: Path) -> None:
    assert store.set_start(tmp_path / "checkpoints", 0, 0) == []


def test_locate_understands_a_run_a_checkpoints_and_a_step_folder(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    commit(root, 20)
    assert store.locate(tmp_path) == (root, None)
    assert store.locate(root) == (root, None)
    assert store.locate(root / "global_step_20") == (root, 20)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_locate_refuses_what_is_none_of_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="step folder"):
        store.locate(tmp_path / name)


def test_a_trash_folder_that_resists_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f".trash-{name}").mkdir()
    remove = store.shutil.rmtree

    def resist(path: Path, **options: object) -> None:
        if path.name.endswith("a"):
            raise OSError("busy")
        remove(path, **options)

    monkeypatch.setattr(store.shutil, "rmtree", resist)
    problems = store.purge(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".trash-a"]
    assert len(problems) == 1
    assert "busy" in problems[0]


# ---- what may take whose place

WEIGHTS = {"actor/weights_rank-00000.safetensors": "version"}


def beside(root: Path, step: int, attempt: int) -> Path:
    return step_dir(versions_dir(root, attempt), step)


def leave(root: Path, step: int, files: dict[str, str], **options: Any) -> str:
    """What is said of a commit that is refused. The checkpoint that is there has lost nothing by it."""
    before = read_manifest(step_dir(root, step))
    with pytest.raises(RunError) as caught:
        commit(root, step, files, **options)
    assert read_manifest(step_dir(root, step)) == before
    assert store.verify(step_dir(root, step)).ok
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
        store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT))
    assert read_manifest(step_dir(tmp_path, 20)) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_what_somebody_holds_is_not_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    commit(tmp_path, 20)
    with lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60):
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
    monkeypatch.setattr(holds, "_CLAIM_S", -1.0)  # the commit was stopped for so long that its claim has run out
    commit(tmp_path, 20)
    real, leases = store._exchange, []

    def while_a_reader_comes(first: Path, second: Path) -> bool:
        if not leases:
            leases.append(lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60))
        return exchange and real(first, second)

    monkeypatch.setattr(store, "_exchange", while_a_reader_comes)
    said = leave(tmp_path, 20, {"actor/model.pt": "other"}, attempt=attempt)
    assert "held by explorer-7 since just now" in said
    assert not list(tmp_path.glob(".replaced-*"))


def test_a_reader_of_the_new_one_does_not_bring_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "_CLAIM_S", -1.0)
    commit(tmp_path, 20)
    real = store._exchange

    def then_a_reader_comes(first: Path, second: Path) -> bool:
        done = real(first, second)
        lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60)
        return done

    monkeypatch.setattr(store, "_exchange", then_a_reader_comes)
    commit(tmp_path, 20, {"actor/model.pt": "other"})
    assert (step_dir(tmp_path, 20) / "actor/model.pt").read_text() == "other"


def test_a_lease_on_what_is_replaced_at_the_same_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20)
    real = holds.write_atomic

    def replaced_first(path: Path, text: str, **options: bool) -> None:
        commit(tmp_path, 20, {"actor/model.pt": "other"})
        real(path, text, **options)

    monkeypatch.setattr(holds, "write_atomic", replaced_first)
    with pytest.raises(RunError, match="was replaced while explorer-7"):
        lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60)


def test_the_upgrade_of_weights_under_a_reader_and_a_pin_leaves_both_what_they_hold(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    pin(tmp_path, 20)
    with lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60) as lease:
        before = (lease.path / "actor/model.pt").stat().st_ino
        commit(tmp_path, 20, {"actor/optim.pt": "o"})
        assert (lease.path / "actor/model.pt").stat().st_ino == before
    assert read_manifest(step_dir(tmp_path, 20)).kind == FULL
    assert pinned(tmp_path) == {(20, 0)}


def test_weights_whose_place_is_taken_are_committed_beside_it(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    before = read_manifest(step_dir(tmp_path, 20))
    files = stage(tmp_path, 20, WEIGHTS, attempt=1)
    store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files)), beside=True)
    assert read_manifest(step_dir(tmp_path, 20)) == before
    assert store.verify(beside(tmp_path, 20, 1)).ok
    assert names(beside(tmp_path, 20, 1)) == {*WEIGHTS, "manifest.json"}
    assert [info.path for info in store.scan(tmp_path)] == [step_dir(tmp_path, 20)]
    place = beside(tmp_path, 20, 1).parent
    with lease_checkpoint(place, 20, holder="explorer-7", seconds=60):
        store.clear_versions(tmp_path, now=time.time())
        assert store.verify(beside(tmp_path, 20, 1)).ok
    store.set_start(tmp_path, 20, 2)
    assert not (tmp_path / ".versions").exists()
    assert read_manifest(step_dir(tmp_path, 20)) == before


def test_a_full_checkpoint_takes_in_the_weights_of_its_attempt_that_lie_beside(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    files = stage(tmp_path, 20, WEIGHTS, attempt=1)
    store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files)), beside=True)
    commit(tmp_path, 20, {"actor/model.pt": "new", "actor/optim.pt": "new"}, attempt=1)
    assert names(step_dir(tmp_path, 20)) == {*WEIGHTS, "actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert store.verify(step_dir(tmp_path, 20)).ok


def test_weights_that_nobody_staged_are_not_committed_beside(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    with pytest.raises(RunError, match="were not written to"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT), beside=True)
    assert not (tmp_path / ".versions").exists()


def test_a_manifest_that_cannot_be_read_is_put_aside_and_not_deleted(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"})
    (step_dir(tmp_path, 20) / "manifest.json").write_text("{}")
    commit(tmp_path, 20, {"actor/model.pt": "new"}, attempt=1)
    (aside,) = tmp_path.glob("abandoned-*")
    assert (aside / "actor/model.pt").read_text() == "w"
    (step_dir(tmp_path, 20) / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="is not valid"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=FULL))
    assert (step_dir(tmp_path, 20) / "manifest.json").read_text() == "{}"


def test_a_commit_in_place_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not there"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(FileEntry("a", 1, "00"),)))
    assert not step_dir(tmp_path, 20).exists()


def test_a_reader_that_comes_at_a_commit_in_place_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "_CLAIM_S", -1.0)  # the commit was stopped for so long that its claim has run out
    before = commit(tmp_path, 20)
    real, leases = store.write_manifest, []

    def when_a_reader_has_come(folder: Path, manifest: Manifest, **options: bool) -> None:
        if not leases:
            leases.append(lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60))
        real(folder, manifest, **options)

    monkeypatch.setattr(store, "write_manifest", when_a_reader_has_come)
    with pytest.raises(RunError, match="held by explorer-7 since just now"):
        store.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=FULL))
    assert read_manifest(step_dir(tmp_path, 20)) == before


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("fails_at", ["global_step_20", ".replaced-global_step_20"])
def test_the_first_error_is_told_though_it_cannot_be_taken_back(
    tmp_path: Path, exchange: bool, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 20, {"model.pt": "w"}, created=1.0)
    pin(tmp_path, 20)
    real = store._exchange
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
        failing.setattr(store, "_check_replaces", lambda *_: None)  # the pin came after that
        failing.setattr(store, "_holders_of", fail)
        failing.setattr(store, "_exchange", once)
        with pytest.raises(OSError, match="the leases cannot be read") as told:
            commit(tmp_path, 20, {"model.pt": "other"}, attempt=1, created=2.0)
    (note,) = told.value.__notes__
    assert ("Read-only" if exchange else "Input/output error") in note
    store.clean_staging(tmp_path, 20, 1)
    store.recover(tmp_path)
    assert (step_dir(tmp_path, 20) / "model.pt").read_text() == "w"
    assert store.verify(step_dir(tmp_path, 20)).ok
    assert [info.step for info in store.scan(tmp_path)] == [20]


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
    lease = lease_checkpoint(tmp_path, 20, holder="explorer-7", seconds=60)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_check_replaces", lambda *_: None)  # the reader had not come yet
        patch.setattr(store, "_holders_of", die)
        if not exchange:
            patch.setattr(store, "_exchange", lambda first, second: False)
        with pytest.raises(Death):
            commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1, created=2.0)
    assert read_manifest(step_dir(tmp_path, 20)).attempt == 1
    store.recover(tmp_path)
    assert read_manifest(step_dir(tmp_path, 20)) == before
    assert store.verify(lease.path).ok
    assert not [path for path in names(tmp_path) if path.startswith((".staging", ".trash", ".replaced"))]


def test_a_resume_from_the_beginning_names_no_weights_as_a_full_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 0, kind=STATE_DICT)
    store.set_start(tmp_path, 0, 1)
    assert (read_tracker(tmp_path, FULL).step, read_tracker(tmp_path, STATE_DICT).step) == (None, 0)


def fail_to_sync(monkeypatch: pytest.MonkeyPatch, folder: Path, *, times: int) -> None:
    """Let the names in a folder not become durable that often."""
    real, failed = os.fsync, []

    def fsync(descriptor: int) -> None:
        if len(failed) < times and os.path.samestat(os.fstat(descriptor), folder.stat()):
            failed.append(descriptor)
            raise OSError(errno.EIO, "the disk fails")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("partial", [True, False])
def test_a_first_commit_that_fails_is_not_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool, times: int
) -> None:
    with monkeypatch.context() as failing:
        fail_to_sync(failing, tmp_path, times=times)
        with pytest.raises(OSError, match="the disk fails") as told:
            commit(tmp_path, 20, {"model.pt": "w"}, partial=partial)
    assert list(getattr(told.value, "__notes__", [])) == (
        [] if times == 1 else ["it could not be taken back either: [Errno 5] the disk fails"]
    )
    assert store.scan(tmp_path) == []
    commit(tmp_path, 20, {"model.pt": "w"}, partial=partial)
    assert store.verify(step_dir(tmp_path, 20)).ok


@pytest.mark.parametrize("times", [1, 9])
def test_a_first_commit_in_place_that_fails_is_not_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    folder = step_dir(tmp_path, 20)
    folder.mkdir()
    (folder / "model.pt").write_text("w")
    draft = Manifest(step=20, attempt=0, kind=FULL, files=(file_entry(folder, "model.pt"),))
    with monkeypatch.context() as failing:
        failing.setattr(store, "_sync_tree", lambda folder: None)  # that succeeded
        fail_to_sync(failing, folder, times=times)
        with pytest.raises(OSError, match="the disk fails") as told:
            store.commit_folder(tmp_path, draft)
    assert len(getattr(told.value, "__notes__", [])) == (times > 1)
    assert [info.manifest for info in store.scan(tmp_path)] == [None]
    assert names(folder) == {"model.pt"}
    store.commit_folder(tmp_path, draft)
    assert store.verify(folder).ok


def test_a_replacement_beside_the_step_folders_that_died_half_way_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(created: float) -> None:
        files = tuple(stage(tmp_path, 20, WEIGHTS, attempt=1))
        draft = Manifest(step=20, attempt=1, kind=STATE_DICT, created=created, files=files)
        store.commit_folder(tmp_path, draft, beside=True)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    commit(tmp_path, 20)
    again(1.0)
    monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    for seen, created in (("_replaced", 2.0), ("_let_go", 3.0)):
        with monkeypatch.context() as crash:
            if seen == "_let_go":
                crash.setattr(store, "_let_go", die)
            else:
                crash.setattr(Path, "rename", dying_after(".replaced-global_step_20"))
            with pytest.raises(KeyboardInterrupt):
                again(created)
        assert list(tmp_path.glob(".versions/1/.replaced-*"))
        store.recover(tmp_path, attempt=1)
        assert not list(tmp_path.glob(".versions/1/.replaced-*"))
        assert read_manifest(beside(tmp_path, 20, 1)).created == (3.0 if seen == "_let_go" else 1.0)
        assert store.verify(beside(tmp_path, 20, 1)).ok


def dying_after(name: str) -> Any:
    """A `Path.rename` that is the last thing that a program does, where it gives something this name."""
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        real(path, target)
        if target.name == name:
            raise KeyboardInterrupt
        return target

    return rename


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_without_hard_links_what_others_write_moves_with_the_step(
    tmp_path: Path, exchange: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda first, second: False)

    def refuse_links(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    commit(tmp_path, 20)
    with open(data(tmp_path, 20), "w") as writing, monkeypatch.context() as failing:
        failing.setattr(os, "link", refuse_links)
        if fails:
            put_away = store._put_out_of_sight

            def fail(place: Path, path: Path) -> Path:
                raise OSError(errno.EIO, "the disk fails")

            failing.setattr(store, "_put_out_of_sight", fail)
            with pytest.raises(OSError, match="the disk fails"):
                commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
            failing.setattr(store, "_put_out_of_sight", put_away)
        else:
            commit(tmp_path, 20, {"actor/model.pt": "other"}, attempt=1)
        writing.write("state of the data")
    assert read_manifest(step_dir(tmp_path, 20)).attempt == (0 if fails else 1)
    assert data(tmp_path, 20).read_text() == "state of the data"
