"""A checkpoint folder that a resume sets back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit, stage
from trinity_sync.checkpoint.folder import catalog, contents, resume_point
from trinity_sync.checkpoint.folder.contents import read_tracker, staging_dir, step_dir, write_tracker
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL, STATE_DICT


def test_a_resume_sets_the_trackers_back_and_puts_later_weights_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(tmp_path, step)
    commit(tmp_path, 15, kind=STATE_DICT)
    write_tracker(tmp_path, FULL, 30)
    write_tracker(tmp_path, STATE_DICT, 30)
    stage(tmp_path, 40, {"a": "1"})
    abandoned = resume_point.set_start(tmp_path, 10, 1)
    assert [path.name for path in abandoned] == [f"abandoned-global_step_{step}-attempt_0" for step in (15, 20, 30)]
    assert [info.step for info in catalog.scan(tmp_path)] == [10]
    assert (read_tracker(tmp_path, FULL).step, read_tracker(tmp_path, STATE_DICT).step) == (10, 10)
    assert not staging_dir(tmp_path, 40, 0).exists()


def test_no_tracker_names_what_another_program_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        commit(tmp_path, step, kind=STATE_DICT)

    def delete(root: Path, step: int) -> None:
        shutil.rmtree(step_dir(root, 10), ignore_errors=True)

    monkeypatch.setattr(contents, "write_committed", delete)  # once the folder was read
    resume_point.set_start(tmp_path, 10, 1)
    assert read_tracker(tmp_path, STATE_DICT).step == 5


@pytest.mark.parametrize("place", [".staging", ".versions", ".staging/20-0", ".versions/1", ".leases"])
def test_a_link_in_the_place_of_a_folder_of_ours_is_not_followed(tmp_path: Path, place: str) -> None:
    (tmp_path / "mine" / "global_step_1").mkdir(parents=True)
    (tmp_path / "mine" / "notes.json").write_text("{}")
    link = tmp_path / "checkpoints" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match=f"{link} is a link"):
        resume_point.set_start(tmp_path / "checkpoints", 0, 1)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["global_step_1", "notes.json"]


def test_abandoning_one_step_twice_keeps_both(tmp_path: Path) -> None:
    for _ in range(2):
        commit(tmp_path, 20)
        resume_point.set_start(tmp_path, 0, 1)
    assert len(list(tmp_path.glob("abandoned-global_step_20-attempt_0*"))) == 2


def test_a_start_from_nothing_removes_the_trackers(tmp_path: Path) -> None:
    commit(tmp_path, 20)
    write_tracker(tmp_path, FULL, 20)
    resume_point.set_start(tmp_path, 0, 1)
    assert read_tracker(tmp_path, FULL).step is None


def test_a_first_start_needs_no_folder(tmp_path: Path) -> None:
    assert resume_point.set_start(tmp_path / "checkpoints", 0, 0) == []


def test_a_resume_from_the_beginning_names_no_weights_as_a_full_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 0, kind=STATE_DICT)
    resume_point.set_start(tmp_path, 0, 1)
    assert (read_tracker(tmp_path, FULL).step, read_tracker(tmp_path, STATE_DICT).step) == (None, 0)
