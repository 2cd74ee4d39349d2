"""verl's own SFT trainer, unchanged, with our two variables: it saves through us, is killed, goes on bit for bit."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.verl_programs.programs import MODULES, PLUGIN, WITHOUT_US, Program, prepare
from trinity_sync.checkpoint import daemon as process
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.catalog import verify
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir
from trinity_sync.checkpoint.folder.lock import has_no_monitor
from trinity_sync.weights.snapshot import tensors


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


def saved(file: Path) -> list[torch.Tensor]:
    """The tensors in one of verl's files."""
    return list(tensors(torch.load(file, weights_only=False)))


def make(prepared: Path, folder: Path, environment: dict[str, str], *overrides: str) -> Program:
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    return Program(folder=folder, environment=environment, overrides=overrides)


def assert_whole(root: Path, steps: list[int]) -> None:
    assert [info.step for info in catalog.scan(root) if info.kind is not None] == steps
    for step in steps:
        assert verify(step_dir(root, step)).ok


def assert_goes_on(program: Program, uninterrupted: Program, went_on_from: list[int]) -> None:
    """It was started again: its steps are those of a run that nobody has killed."""
    expected = uninterrupted.losses()
    losses = program.losses()
    assert min(losses) - 1 in went_on_from
    assert losses == {step: expected[step] for step in losses}
    assert max(losses) == max(expected)


@pytest.mark.all
def test_what_a_killed_program_saved_whole_is_gone_on_from(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    with replace(program, script="sft_that_stops.py").started() as running:
        for rank in range(2):
            running.wait_until((tmp_path / f"written-{rank}").exists, f"the end of what rank {rank} writes of step 4")
        assert not (step_dir(program.checkpoints, 4) / "manifest.json").exists(), "nobody has said that it is whole"
        running.kill(0, 1)
        assert running.wait() != 0
    assert program.run() == 0, program.said()
    said = f"trinity-sync: on: checkpoints are committed to {program.checkpoints}; kept: all\n"
    assert program.said().count(said) == 1, "one rank says it"
    assert_goes_on(program, uninterrupted, [4])
    assert_whole(program.checkpoints, [2, 4, 6])
    files = {entry.path for entry in read_manifest(step_dir(program.checkpoints, 6)).files}
    assert {"data_0.pt", "data_1.pt", "fsdp_config.json", "model_world_size_2_rank_1.pt"} <= files
    assert (program.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.all  # that the optimizer waits: tests/integrations/verl/test_engines.py
def test_what_is_saved_is_the_state_at_the_save_however_long_its_copy_takes(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, {**PLUGIN, "COPY": "slow"})
    slow = replace(program, script="sft_copies.py")
    assert slow.run() == 0, slow.said()
    assert slow.losses() == uninterrupted.losses()
    for name in (f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim") for rank in range(2)):
        ours, verls = (saved(step_dir(each.checkpoints, 2) / name) for each in (program, uninterrupted))
        assert len(ours) == len(verls) > 0
        assert all(torch.equal(one, other) for one, other in zip(ours, verls, strict=True)), name


@pytest.mark.all
def test_a_copy_that_fails_beside_training_fails_its_save_and_ends_the_program(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    failing = replace(program, script="sft_copies.py", environment={**PLUGIN, "COPY": "fails"})
    assert failing.run() != 0
    said = failing.said()
    assert "could not save step 6, because an earlier save failed" in said
    assert "the state of step 4 could not be copied: planted: no copy" in said
    assert_whole(program.checkpoints, [2])
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2])


@pytest.mark.all
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "all"])
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.4])
def test_a_kill_at_any_instant_of_a_save_costs_no_step_that_was_whole(
    prepared: Path, uninterrupted: Program, tmp_path: Path, victims: tuple[int, ...], delay_s: float
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    with program.started() as running:
        running.wait_until(lambda: step_dir(program.checkpoints, 2).is_dir(), "save of step 2")
        time.sleep(delay_s)  # the instant is what is tried
        running.kill(*victims)
        assert running.wait() != 0
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [0, 2, 4])
    assert_whole(program.checkpoints, [2, 4, 6])


@pytest.mark.all  # the signal: tests/integrations/verl/test_at_exit.py; the save: tests/integrations/verl/test_saves.py
@pytest.mark.parametrize("to", ["torchrun", "all", "monitor too", "rank 1"])
def test_a_signal_within_a_save_ends_the_program_when_it_is_committed(
    prepared: Path, uninterrupted: Program, tmp_path: Path, to: str
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    slow = {MODULES: f"tests.verl_programs.slow_saves,{PLUGIN[MODULES]}", "SLOW": str(tmp_path)}
    with replace(program, environment={**PLUGIN, **slow}).started() as running:
        for rank in range(2):
            running.wait_until((tmp_path / f"writing-4-{rank}").exists, f"the save of step 4 by rank {rank}")
        ranks = running.ranks()
        found = process.find(program.checkpoints)
        assert found is not None
        monitor = psutil.Process(found.pid)
        sent = {"torchrun": [running.process], "all": [running.process, *ranks], "rank 1": [ranks[1]]}
        for one in sent.get(to) or [monitor, *ranks, running.process]:
            one.send_signal(signal.SIGTERM)
        running.wait_until(lambda: "the program ends when its checkpoint is committed" in program.said(), "signal")
        assert not step_dir(program.checkpoints, 4).joinpath("manifest.json").exists()
        (tmp_path / "go-4").touch()
        codes = [one.wait(60.0) for one in ranks]
        assert running.wait() != 0
    if to != "rank 1":
        assert set(codes) <= {None, -signal.SIGTERM}  # None: torchrun, their parent, has seen it
    assert_whole(program.checkpoints, [2, 4])
    assert (program.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert "was not committed within" not in program.said()
    assert has_no_monitor(program.checkpoints, 30.0)
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [4])


@pytest.mark.all
def test_a_damaged_newest_checkpoint_is_passed_over_in_a_line(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    with program.started() as running:
        running.wait_until(lambda: (step_dir(program.checkpoints, 4) / "manifest.json").exists(), "commit of step 4")
        running.kill(0, 1)
        running.wait()
    torn = step_dir(program.checkpoints, 4) / "model_world_size_2_rank_1.pt"
    held = bytearray(torn.read_bytes())
    held[len(held) // 2] ^= 1
    torn.write_bytes(held)
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2])
    said = [line for line in program.said().splitlines() if line.startswith("trinity-sync: ")]
    assert any("step 4 is skipped" in line and torn.name in line for line in said), said


@pytest.mark.all
def test_verl_goes_on_from_ours_and_we_from_verls(prepared: Path, uninterrupted: Program, tmp_path: Path) -> None:
    program = make(prepared, tmp_path, PLUGIN, "trainer.total_training_steps=4")
    assert program.run() == 0, program.said()
    of_verl = replace(program, environment=WITHOUT_US, overrides=())
    assert of_verl.run() == 0, of_verl.said()
    assert_goes_on(of_verl, uninterrupted, [4])
    shutil.rmtree(step_dir(program.checkpoints, 6))
    (program.checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    verls = tmp_path / "of verl"
    shutil.copytree(uninterrupted.checkpoints, verls / "checkpoints")
    shutil.rmtree(verls / "checkpoints/global_step_6")
    (verls / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    ours = make(prepared, verls, PLUGIN)
    assert ours.run() == 0, ours.said()
    assert_goes_on(ours, uninterrupted, [4])
    assert "verl wrote it, so it is not verified" in ours.said()


@pytest.mark.all
def test_the_limit_of_checkpoints_is_kept_and_never_below_one_that_is_whole(prepared: Path, tmp_path: Path) -> None:
    program = make(prepared, tmp_path, PLUGIN, "trainer.max_ckpt_to_keep=1", "trainer.save_freq=1")
    assert program.run() == 0, program.said()
    assert_whole(program.checkpoints, [6])


@pytest.mark.all
def test_another_number_of_ranks_is_refused_by_what_was_saved_and_changes_nothing(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    """As verl, whose files hold a piece of each tensor for each rank."""
    program = make(prepared, tmp_path, PLUGIN, "trainer.total_training_steps=4")
    assert program.run() == 0, program.said()
    alone = replace(program, ranks=1, overrides=())
    assert alone.run() != 0
    assert "global_step_4 has no model_world_size_1_rank_0.pt" in alone.said()
    assert "it has model_world_size_2; load it with so many ranks" in alone.said()
    assert_whole(program.checkpoints, [2, 4])
    again = replace(program, overrides=())
    assert again.run() == 0, again.said()
    assert_goes_on(again, uninterrupted, [4])


@pytest.mark.all
def test_contents_without_the_optimizer_are_saved_so(prepared: Path, tmp_path: Path) -> None:
    program = make(prepared, tmp_path, PLUGIN, "checkpoint.save_contents=[model,extra]")
    assert program.run() == 0, program.said()
    assert_whole(program.checkpoints, [2, 4, 6])
    assert not list(program.checkpoints.rglob("optim_*"))


@pytest.mark.all
def test_a_copy_to_a_remote_place_is_of_what_was_committed(prepared: Path, tmp_path: Path) -> None:
    program = make(prepared, tmp_path, PLUGIN, f"trainer.default_hdfs_dir={tmp_path}/remote")
    assert program.run() == 0, program.said()
    for step in (2, 4, 6):
        ours = step_dir(program.checkpoints, step)
        copied = tmp_path / "remote" / ours.name
        assert (copied if copied.is_dir() else tmp_path / "remote" / "manifest.json").exists()


@pytest.mark.all
def test_rank_0_that_fails_while_the_others_wait_for_it_ends_the_program_and_loses_nothing(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    """verl makes the remote folder between the tracker and a barrier."""
    program = make(prepared, tmp_path, PLUGIN, "trainer.default_hdfs_dir=/proc/nobody/makes/this")
    assert program.run() != 0
    assert_whole(program.checkpoints, [2])
    again = replace(program, overrides=())
    assert again.run() == 0, again.said()
    assert_goes_on(again, uninterrupted, [2])


@pytest.mark.all
def test_a_full_disk_ends_the_program_and_leaves_what_was_whole(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    with program.started() as running:
        running.wait_until(lambda: (step_dir(program.checkpoints, 2) / "manifest.json").exists(), "commit of step 2")
        for rank in running.ranks():
            rank.rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))  # no larger file can be written: as on a full disk
        assert running.wait() != 0
    assert "step 4" in program.said() or "step 6" in program.said()
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2])


@pytest.mark.all
def test_a_trainer_that_fails_before_its_own_files_are_there_commits_nothing(
    prepared: Path, uninterrupted: Program, tmp_path: Path
) -> None:
    program = make(prepared, tmp_path, PLUGIN)
    failing = replace(program, script="sft_that_fails.py")
    assert failing.run() != 0
    assert "planted: no state" in failing.said()
    assert_whole(program.checkpoints, [2])
    assert program.run() == 0, program.said()
    assert_goes_on(program, uninterrupted, [2])
