"""Commit, scan, verify, resume on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, names, stage
from trinity_sync.checkpoint import store
from trinity_sync.checkpoint.layout import FileEntry, Manifest, read_manifest, staging_dir, step_dir
from trinity_sync.checkpoint.trackers import read_tracker, write_tracker
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT


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
    commit(tmp_path, 20, {"old.pt": "old"})
    commit(tmp_path, 20, {"new.pt": "new"}, attempt=1)
    assert names(step_dir(tmp_path, 20)) == {"new.pt", "manifest.json"}


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
