"""verl's own SFT trainer, unchanged, with our two variables: it saves through us, is killed, and goes on bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.verl_programs.programs import PLUGIN, WITHOUT_US, Program, prepare
from trinity_sync.checkpoint import catalog
from trinity_sync.checkpoint.layout import read_manifest, step_dir
from trinity_sync.checkpoint.verification import verify


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """verl's own, without us."""
    program = make(prepared, tmp_path_factory.mktemp("verl"), WITHOUT_US)
    assert program.run() == 0, program.said()
    assert sorted(program.losses()) == [1, 2, 3, 4, 5, 6]
    return program


def make(prepared: Path, folder: Path, environment: dict[str, str], *overrides: str) -> Program:
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    return Program(folder=folder, environment=environment, overrides=overrides)


def assert_whole(root: Path, steps: list[int]) -> None:
    assert [info.step for info in catalog.scan(root)] == steps
    for step in steps:
        assert verify(step_dir(root, step)).ok


def assert_goes_on(program: Program, uninterrupted: Program, went_on_from: list[int]) -> None:
    """It was started again: its steps are those of a run that nobody has killed."""
    expected = uninterrupted.losses()
    losses = program.losses()
    assert min(losses) - 1 in went_on_from
    assert losses == {step: expected[step] for step in losses}
    assert max(losses) == max(expected)


def test_what_a_killed_program_saved_whole_is_gone_on_from(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    with program.started() as running:
        running.wait_until(lambda: (step_dir(program.checkpoints, 4) / "data_0.pt").exists(), "save of step 4")
        running.kill(0, 1)
        assert running.wait() != 0
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2, 4])
    assert_whole(program.checkpoints, [2, 4, 6])
    files = {entry.path for entry in read_manifest(step_dir(program.checkpoints, 6)).files}
    assert {"data_0.pt", "data_1.pt", "fsdp_config.json", "model_world_size_2_rank_1.pt"} <= files
    assert (program.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6"
