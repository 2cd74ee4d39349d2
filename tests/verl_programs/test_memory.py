"""verl's own SFT trainer that keeps states in memory: it is killed, and goes on from one bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.verl_programs.programs import PLUGIN, Program, prepare
from tests.verl_programs.test_sft import assert_goes_on, assert_whole, make, saved
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.lock import has_no_monitor
from trinity_sync.checkpoint.memory_states import states_path
from trinity_sync.integrations.verl.vendor import MEMORY_INTERVAL, SHM_DIR

END_S = 30.0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """With us, and with all states on disk."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    prepare(folder)
    program = Program(folder=folder, environment=PLUGIN)
    assert program.run() == 0, program.said()
    return program


def states_of(program: Program) -> Path:
    return states_path(program.checkpoints, program.folder / "shm")


def killed_in_step_4(prepared: Path, folder: Path, interval: int, save_freq: int) -> Program:
    """A program that is killed once all of the save of step 4 is written."""
    (folder / "shm").mkdir()  # not the place of others, whose runs remove what no process uses
    environment = {**PLUGIN, MEMORY_INTERVAL: str(interval), SHM_DIR: str(folder / "shm")}
    program = make(prepared, folder, environment, f"trainer.save_freq={save_freq}")
    with replace(program, script="sft_that_stops.py").started() as running:
        for rank in range(2):
            running.wait_until((folder / f"written-{rank}").exists, f"the end of what rank {rank} writes of step 4")
        running.kill(0, 1)
        assert running.wait() != 0
    for root in (program.checkpoints, states_of(program)):
        assert has_no_monitor(root, END_S)
    return program


@pytest.fixture
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.mark.all
def test_a_killed_program_goes_on_from_its_state_in_memory(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = killed_in_step_4(prepared, tmp_path, interval=2, save_freq=100)
    assert_whole(program.checkpoints, [])
    assert_whole(states_of(program), [4])
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [4])
    assert "the state of step 4 was in memory" in program.said()
    assert_whole(program.checkpoints, [4, 6])
    for name in (f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim") for rank in range(2)):
        last, expected = (saved(step_dir(one.checkpoints, 6) / name) for one in (program, uninterrupted))
        assert len(last) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(last, expected, strict=True)), name
    assert (program.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert not states_of(program).exists(), "the program ended in order"


@pytest.mark.all
def test_a_state_that_fails_its_digest_leaves_the_program_to_its_checkpoint(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = killed_in_step_4(prepared, tmp_path, interval=2, save_freq=3)
    torn = step_dir(states_of(program), 4) / "model_world_size_2_rank_1.pt"
    held = bytearray(torn.read_bytes())
    held[len(held) // 2] ^= 1
    torn.write_bytes(held)
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [3])
    assert torn.name in program.said()


@pytest.mark.all
def test_a_state_that_is_older_than_the_checkpoint_is_not_used(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = killed_in_step_4(prepared, tmp_path, interval=3, save_freq=4)
    assert_whole(states_of(program), [3])
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [4])
    assert "was in memory" not in program.said()
