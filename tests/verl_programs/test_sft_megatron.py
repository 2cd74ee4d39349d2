"""verl's own SFT trainer on Megatron, two ranks that share each layer: killed in a save, it goes on bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.verl_programs.programs import MEGATRON, PLUGIN, Program
from tests.verl_programs.test_sft import assert_goes_on, assert_whole, make, prepared
from trinity_sync.checkpoint.folder.contents import step_dir

__all__ = ["prepared"]

pytestmark = pytest.mark.all


def of_megatron(prepared: Path, folder: Path, *overrides: str) -> Program:
    return replace(make(prepared, folder, PLUGIN, *MEGATRON, *overrides), script="sft_megatron_on_cpu.py")


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """It saves nothing: verl's own saves fork a process of many threads, which hangs now and then on CPUs."""
    program = of_megatron(prepared, tmp_path_factory.mktemp("uninterrupted"), "trainer.save_freq=-1")
    assert program.run() == 0, program.said()
    assert sorted(program.losses()) == [1, 2, 3, 4, 5, 6]
    return program


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "all"])
def test_what_a_killed_program_saved_whole_is_gone_on_from(
    prepared: Path, uninterrupted: Program, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    program = of_megatron(prepared, tmp_path)
    with program.started() as running:
        running.wait_until(lambda: step_dir(program.checkpoints, 4).exists(), "save of step 4")
        running.kill(*victims)
        assert running.wait() != 0
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2, 4])
    assert_whole(program.checkpoints, [2, 4, 6])


def test_what_is_saved_is_the_state_at_the_save_however_long_its_copy_takes(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = of_megatron(prepared, tmp_path)
    slow = replace(program, script="sft_copies.py", environment={**program.environment, "COPY": "slow"})
    assert slow.run() == 0, slow.said()
    assert slow.losses() == uninterrupted.losses()
    for step in (4, 6):
        shutil.rmtree(step_dir(program.checkpoints, step))
    again = replace(program, environment={**program.environment, "TRINITY_SYNC_SKIP_MISSING": "1"})
    assert again.run() == 0, again.said()
    assert_goes_on(again, uninterrupted, [2])


def test_a_copy_that_fails_beside_training_fails_its_save_and_ends_the_program(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = of_megatron(prepared, tmp_path)
    failing = replace(program, script="sft_copies.py", environment={**program.environment, "COPY": "fails"})
    assert failing.run() != 0
    said = failing.said()
    assert "could not save step 6, because an earlier save failed" in said
    assert "planted: no copy" in said
    assert_whole(program.checkpoints, [2])
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2])
