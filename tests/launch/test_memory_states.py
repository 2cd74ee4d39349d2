"""The states of a run in memory, between two attempts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.launch.memory_states import MemoryStates
from trinity_sync.weights.slots import SegmentError, kept_folder, remove_stale


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def states(tmp_path: Path) -> MemoryStates:
    root = tmp_path / "memory"
    root.mkdir()
    found = MemoryStates(root, Owner.new("of-this-run", tmp_path / "run"))
    write_mark(root, found.owner)
    return found


def newest(checkpoints: Path) -> catalog.CheckpointInfo | None:
    return catalog.newest_good(checkpoints)


def test_the_newest_state_becomes_a_checkpoint(states: MemoryStates, checkpoints: Path) -> None:
    commit(checkpoints, 4)
    for step in (5, 6):
        commit(states.root, step)
    assert states.bring(checkpoints, newest(checkpoints)) == 6
    found = newest(checkpoints)
    assert found is not None
    assert (found.step, (found.path / "actor/model.pt").read_text()) == (6, "weights 6")


def test_a_state_that_is_older_than_the_checkpoint_stays_where_it_is(states: MemoryStates, checkpoints: Path) -> None:
    commit(states.root, 6)
    commit(checkpoints, 8)
    assert states.bring(checkpoints, newest(checkpoints)) is None
    found = newest(checkpoints)
    assert found is not None
    assert found.step == 8


@pytest.mark.parametrize("harm", ["flipped", "gone", "of another run"])
def test_a_state_that_is_not_sound_leaves_the_run_to_its_checkpoint(
    states: MemoryStates, checkpoints: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    commit(checkpoints, 4)
    commit(states.root, 6)
    file = states.root / "global_step_6/actor/model.pt"
    if harm == "flipped":
        file.write_text("weights 7")
    elif harm == "gone":
        file.unlink()
    else:
        write_mark(states.root, Owner.new("of-another-run", states.root.parent / "other"))
    assert states.bring(checkpoints, newest(checkpoints)) is None
    found = newest(checkpoints)
    assert found is not None
    assert found.step == 4
    assert capsys.readouterr().err


def test_an_attempt_begins_with_an_empty_folder(states: MemoryStates) -> None:
    commit(states.root, 6)
    with states.begun():
        assert catalog.scan(states.root) == []


def test_a_folder_goes_with_its_program_and_one_of_a_dead_program_is_taken_over(tmp_path: Path) -> None:
    with kept_folder(tmp_path, "states-1") as folder:
        (folder / "file").touch()
        with pytest.raises(SegmentError, match="in use by a live process"), kept_folder(tmp_path, "states-1"):
            pass
        assert remove_stale(tmp_path) == []
    assert not folder.exists()
    child = os.fork()
    if child == 0:
        with kept_folder(tmp_path, "states-1") as folder:
            (folder / "file").touch()
            os._exit(0)
    os.waitpid(child, 0)
    with kept_folder(tmp_path, "states-1") as folder:
        assert (folder / "file").exists()
