"""Commits that find nothing in their way, beside what does, and in place."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import WEIGHTS, beside, commit, names, stage
from trinity_sync.checkpoint.folder import catalog, commits, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import Manifest, file_entry, read_manifest, staging_dir, step_dir
from trinity_sync.checkpoint.folder.leases import lease_checkpoint
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT, FileEntry


def test_a_committed_folder_holds_what_was_staged_and_a_manifest(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "huggingface/config.json": "{}"})
    folder = step_dir(tmp_path, 20)
    assert names(folder) == {"actor/model.pt", "huggingface/config.json", "manifest.json"}
    assert catalog.verify(folder).ok
    assert not staging_dir(tmp_path, 20, 0).exists()


def test_files_that_no_part_named_are_digested_and_listed(tmp_path: Path) -> None:
    manifest = commit(tmp_path, 20, {"a": "1", "sub/b": "2"}, reported=False)
    assert [entry.path for entry in manifest.files] == ["a", "sub/b"]
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_a_reported_file_that_is_missing_fails_the_commit_and_shows_nothing(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"a": "1"})
    ghost = FileEntry("model.pt", 5, "00")
    with pytest.raises(RunError, match=r"model.pt was reported with 5 bytes, but is not there"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(*files, ghost)))
    assert catalog.scan(tmp_path) == []


def test_a_file_that_is_shorter_than_reported_fails_the_commit(tmp_path: Path) -> None:
    (entry,) = stage(tmp_path, 20, {"a": "long"})
    (staging_dir(tmp_path, 20, 0) / "a").write_text("s")
    with pytest.raises(RunError, match="has 1 bytes"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(entry,)))


def test_the_upgrade_of_a_state_dict_shares_the_bytes_of_its_weights(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    before = (step_dir(tmp_path, 20) / "actor/model.pt").stat().st_ino
    manifest = commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert manifest.kind == FULL
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert (step_dir(tmp_path, 20) / "actor/model.pt").stat().st_ino == before
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_without_hard_links_the_weights_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    commit(tmp_path, 20, {"actor/model.pt": "w"}, kind=STATE_DICT)
    monkeypatch.setattr(os, "link", refuse)
    commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert catalog.verify(step_dir(tmp_path, 20)).ok
    assert read_manifest(step_dir(tmp_path, 20)).kind == FULL


def test_a_partial_commit_leaves_the_staging_folder_for_the_rest(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"actor/model.pt": "w"})
    (staging_dir(tmp_path, 20, 0) / "actor/optim.pt").write_text("half")
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=STATE_DICT, files=tuple(files)), partial=True)
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "manifest.json"}
    assert names(staging_dir(tmp_path, 20, 0)) == {"actor/model.pt", "actor/optim.pt"}
    (staging_dir(tmp_path, 20, 0) / "actor/optim.pt").write_text("whole")
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL))
    assert names(step_dir(tmp_path, 20)) == {"actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_a_small_file_that_is_written_again_does_not_change_the_committed_weights(tmp_path: Path) -> None:
    files = stage(tmp_path, 20, {"huggingface/config.json": "{}"})
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=STATE_DICT, files=tuple(files)), partial=True)
    (staging_dir(tmp_path, 20, 0) / "huggingface/config.json").write_text("being rewritten")
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_files_written_straight_into_the_step_folder_are_committed_there(tmp_path: Path) -> None:
    folder = step_dir(tmp_path, 20)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/model.pt").write_text("w")
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL))
    assert catalog.verify(folder).ok
    assert [info.step for info in catalog.scan(tmp_path)] == [20]


def test_files_in_the_step_folder_are_kept_when_others_were_staged(tmp_path: Path) -> None:
    folder = step_dir(tmp_path, 20)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/model.pt").write_text("w")
    manifest = commit(tmp_path, 20, {"actor/optim.pt": "o"})
    assert [entry.path for entry in manifest.files] == ["actor/model.pt", "actor/optim.pt"]
    assert catalog.verify(folder).ok


def test_saving_a_step_again_never_leaves_less_than_before(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"a": "1"})
    commit(tmp_path, 20, {"a": "1"})
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_weights_whose_place_is_taken_are_committed_beside_it(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    before = read_manifest(step_dir(tmp_path, 20))
    files = stage(tmp_path, 20, WEIGHTS, attempt=1)
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files)), beside=True)
    assert read_manifest(step_dir(tmp_path, 20)) == before
    assert catalog.verify(beside(tmp_path, 20, 1)).ok
    assert names(beside(tmp_path, 20, 1)) == {*WEIGHTS, "manifest.json"}
    assert [info.path for info in catalog.scan(tmp_path)] == [step_dir(tmp_path, 20)]
    place = beside(tmp_path, 20, 1).parent
    with lease_checkpoint(place, 20, reader="explorer-7", seconds=60):
        recovery.clean_versions(tmp_path, now=time.time())
        assert catalog.verify(beside(tmp_path, 20, 1)).ok
    resume_point.set_start(tmp_path, 20, 2)
    assert not (tmp_path / ".versions").exists()
    assert read_manifest(step_dir(tmp_path, 20)) == before


def test_a_full_checkpoint_takes_in_the_weights_of_its_attempt_that_lie_beside(tmp_path: Path) -> None:
    commit(tmp_path, 20, {"actor/model.pt": "w", "actor/optim.pt": "o"})
    files = stage(tmp_path, 20, WEIGHTS, attempt=1)
    commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT, files=tuple(files)), beside=True)
    commit(tmp_path, 20, {"actor/model.pt": "new", "actor/optim.pt": "new"}, attempt=1)
    assert names(step_dir(tmp_path, 20)) == {*WEIGHTS, "actor/model.pt", "actor/optim.pt", "manifest.json"}
    assert catalog.verify(step_dir(tmp_path, 20)).ok


def test_weights_that_nobody_staged_are_not_committed_beside(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    with pytest.raises(RunError, match="were not written to"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=1, kind=STATE_DICT), beside=True)
    assert not (tmp_path / ".versions").exists()


def test_a_commit_in_place_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not there"):
        commits.commit_folder(tmp_path, Manifest(step=20, attempt=0, kind=FULL, files=(FileEntry("a", 1, "00"),)))
    assert not step_dir(tmp_path, 20).exists()


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
        [] if times == 1 else ["it could not be undone either: [Errno 5] the disk fails"]
    )
    assert catalog.scan(tmp_path) == []
    commit(tmp_path, 20, {"model.pt": "w"}, partial=partial)
    assert catalog.verify(step_dir(tmp_path, 20)).ok


@pytest.mark.parametrize("times", [1, 9])
def test_a_first_commit_in_place_that_fails_is_not_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    folder = step_dir(tmp_path, 20)
    folder.mkdir()
    (folder / "model.pt").write_text("w")
    draft = Manifest(step=20, attempt=0, kind=FULL, files=(file_entry(folder, "model.pt"),))
    with monkeypatch.context() as failing:
        failing.setattr(commits, "sync_tree", lambda folder: None)  # that succeeded
        fail_to_sync(failing, folder, times=times)
        with pytest.raises(OSError, match="the disk fails") as told:
            commits.commit_folder(tmp_path, draft)
    assert len(getattr(told.value, "__notes__", [])) == (times > 1)
    assert [info.manifest for info in catalog.scan(tmp_path)] == [None]
    assert names(folder) == {"model.pt"}
    commits.commit_folder(tmp_path, draft)
    assert catalog.verify(folder).ok
