"""Programs of verl under Ray with our variables: two roles in verl's PPO layout, and verl's SFT trainer."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.chat_models import make_chat_model
from tests.verl_programs.programs import MODULES, PLUGIN, WITHOUT_US, Program, prepare
from tests.verl_programs.test_sft import assert_goes_on, assert_whole, make
from trinity_sync.checkpoint.folder.contents import read_manifest, step_dir
from trinity_sync.checkpoint.folder.lock import has_no_monitor
from trinity_sync.integrations.verl.vendor import CALLBACK, RETENTION

ON_CPU = "tests.verl_programs.on_cpu"
WITH_US = {**PLUGIN, MODULES: f"{ON_CPU},{PLUGIN[MODULES]}"}
BY_VERL = {MODULES: f"{ON_CPU},{WITHOUT_US[MODULES]}"}
END_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ActorAndCritic(Program):
    """`ppo_on_ray`.

    Attributes:
        ranks: of each role.
    """

    ranks: int = 1

    def trained(self) -> dict[int, dict[str, object]]:
        """What each step of the program that was started last has trained on, and the losses of both roles."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line for line in lines}

    def _command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).parent / "ppo_on_ray.py"), str(self.folder), str(self.ranks)]


class SftUnderRay(Program):
    """`verl.trainer.sft_trainer_ray`, as it is."""

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "verl.trainer.sft_trainer_ray", *self._sft(), "trainer.n_gpus_per_node=2"]


def actor_and_critic(folder: Path, **variables: str) -> ActorAndCritic:
    make_chat_model(folder / "model")
    return ActorAndCritic(folder=folder, environment={**WITH_US, "CALLBACK": CALLBACK, **variables})


def events(program: Program) -> list[tuple[str, int]]:
    lines = (program.checkpoints / "events.jsonl").read_text().splitlines()
    return [(line["event"], line["step"]) for line in map(json.loads, lines)]


@pytest.mark.all  # what a monitor does at the end: tests/checkpoint/test_daemon.py
def test_both_roles_of_a_step_are_one_commit_also_the_last_which_the_end_of_the_program_follows_at_once(
    tmp_path: Path,
) -> None:
    program = actor_and_critic(tmp_path, **{RETENTION: "keep_last.n=2"})
    assert program.run() == 0, program.said()
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [4, 6])
    files = {entry.path for entry in read_manifest(step_dir(program.checkpoints, 6)).files}
    assert {"data.pt", *(f"{role}/optim_world_size_1_rank_0.pt" for role in ("actor", "critic"))} <= files
    assert (program.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert events(program)[:2] == [("commit", 2), ("commit", 4)]


@pytest.mark.all
@pytest.mark.parametrize(
    ("place", "whole", "ranks"), [("critic", 2, 2), ("data", 2, 1), ("tracker", 4, 1), ("tracker", 4, 2)]
)
def test_a_program_that_dies_within_a_save_goes_on_from_what_is_whole_for_both_roles(
    tmp_path: Path, place: str, whole: int, ranks: int
) -> None:
    """The critic's workers die before their save, the driver before its data.pt, or after the tracker."""
    program = replace(actor_and_critic(tmp_path, DIE=f"{place} 4"), ranks=ranks)
    assert program.run() != 0
    before = program.trained()
    assert max(before) == 4
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [step for step in (2, 4) if step <= whole])
    again = replace(program, environment={**program.environment, "DIE": ""})
    assert again.run() == 0, again.said()
    after = again.trained()
    assert sorted(after) == list(range(whole + 1, 7))
    assert {step: after[step] for step in before.keys() & after} == {
        step: before[step] for step in before.keys() & after
    }
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [2, 4, 6])


@pytest.mark.all
@pytest.mark.parametrize("callback", [CALLBACK, ""])
def test_a_signal_to_the_driver_ends_the_program_when_the_save_of_both_roles_is_committed(
    tmp_path: Path, callback: str
) -> None:
    program = actor_and_critic(tmp_path, SLOW=str(tmp_path), CALLBACK=callback)
    modules = f"tests.verl_programs.slow_saves,{WITH_US[MODULES]}"
    with replace(program, environment={**program.environment, MODULES: modules}).started() as running:
        running.wait_until((tmp_path / "writing-4-0").exists, "the save of step 4")
        tracker = program.checkpoints / "latest_checkpointed_iteration.txt"
        running.wait_until(lambda: tracker.read_text() == "4", "the tracker of step 4")
        running.process.send_signal(signal.SIGTERM)
        time.sleep(3.0)  # without us all is over by then
        (tmp_path / "go-4").touch()
        assert running.wait() == -signal.SIGABRT, program.said()  # as Ray's drivers do
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [2, 4])


@pytest.mark.all
def test_verls_sft_trainer_under_ray_saves_through_us_and_goes_on(tmp_path: Path) -> None:
    prepare(tmp_path / "prepared")
    verls = make(tmp_path / "prepared", tmp_path / "verl", BY_VERL)
    uninterrupted = SftUnderRay(folder=verls.folder, environment=BY_VERL)
    assert uninterrupted.run() == 0, uninterrupted.said()
    ours = make(tmp_path / "prepared", tmp_path / "ours", WITH_US)
    first = SftUnderRay(folder=ours.folder, environment=WITH_US, overrides=("trainer.total_training_steps=4",))
    assert first.run() == 0, first.said()
    assert has_no_monitor(ours.checkpoints, END_S)
    assert_whole(ours.checkpoints, [2, 4])
    second = replace(first, overrides=())
    assert second.run() == 0, second.said()
    assert_goes_on(second, uninterrupted, [4])
    assert has_no_monitor(ours.checkpoints, END_S)
    assert_whole(ours.checkpoints, [2, 4, 6])
