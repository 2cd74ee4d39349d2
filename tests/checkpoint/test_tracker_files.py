"""The tracker files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.checkpoint.folder.contents import TRACKERS, read_tracker, tracker_path, write_tracker
from trinity_sync.protocol.parts import FULL, STATE_DICT


def test_the_names_are_those_that_verl_and_trinity_read() -> None:
    assert TRACKERS == {FULL: "latest_checkpointed_iteration.txt", STATE_DICT: "latest_state_dict_iteration.txt"}


def test_a_tracker_holds_the_decimal_step_and_nothing_else(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    assert tracker_path(tmp_path, FULL).read_text() == "20"
    assert read_tracker(tmp_path, FULL).step == 20


def test_writing_leaves_no_other_file(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    write_tracker(tmp_path, FULL, 30)
    assert [path.name for path in tmp_path.iterdir()] == [TRACKERS[FULL]]


def test_no_tracker_is_no_step_and_no_problem(tmp_path: Path) -> None:
    assert read_tracker(tmp_path, FULL) == read_tracker(tmp_path / "nowhere", STATE_DICT)
    assert read_tracker(tmp_path, FULL).problem is None


@pytest.mark.parametrize("data", [b"", b"  \n", b"twenty", b"-3", b"1.5", b"\xff\x00", b"12 13", "٣".encode()])
def test_a_garbled_tracker_is_a_problem_and_not_a_step(tmp_path: Path, data: bytes) -> None:
    tracker_path(tmp_path, FULL).write_bytes(data)
    tracker = read_tracker(tmp_path, FULL)
    assert tracker.step is None
    assert tracker.problem is not None
    assert TRACKERS[FULL] in tracker.problem


def test_a_line_end_as_an_editor_leaves_it_is_understood(tmp_path: Path) -> None:
    tracker_path(tmp_path, FULL).write_text("20\n")
    assert read_tracker(tmp_path, FULL).step == 20


def test_a_tracker_can_be_taken_away(tmp_path: Path) -> None:
    write_tracker(tmp_path, FULL, 20)
    write_tracker(tmp_path, FULL, None)
    write_tracker(tmp_path, FULL, None)
    assert not tracker_path(tmp_path, FULL).exists()
