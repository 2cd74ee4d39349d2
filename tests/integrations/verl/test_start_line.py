"""What a program of verl's says of us when it starts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from trinity_sync.integrations.verl import program_start
from trinity_sync.integrations.verl.vendor import RETENTION


class Mode(Enum):
    SPMD = 0
    RAY = 1


class CheckpointHandler:
    """As verl's: it knows the folder and the limit."""

    def __init__(self, engine: object, rank: int = 0, mode: Mode = Mode.SPMD, limit: int | None = None) -> None:
        self.engine, self.rank, self.mode = engine, rank, mode
        self.default_local_dir, self.max_ckpt_to_keep = "/checkpoints", limit


class PPOTrainer:
    """As verl's."""

    def __init__(self, use_critic: bool, **settings: Any) -> None:
        self.use_critic = use_critic
        self.config = OmegaConf.create({"trainer": {"default_local_dir": "/checkpoints", **settings}})
        OmegaConf.set_struct(self.config, True)

    def _load_checkpoint(self) -> str:
        return "loaded"


OURS, VERLS = SimpleNamespace(_saves=object()), SimpleNamespace()


@pytest.fixture(autouse=True)
def verls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of verl's with both classes; they print nothing themselves."""
    monkeypatch.delenv(RETENTION, raising=False)
    monkeypatch.setattr(CheckpointHandler, "__init__", CheckpointHandler.__init__)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", PPOTrainer._load_checkpoint)
    module = ModuleType(__name__)
    vars(module).update(CheckpointHandler=CheckpointHandler, PPOTrainer=PPOTrainer, OrchestrationMode=Mode)
    program_start.register(module)


def line(kept: str) -> str:
    return f"trinity-sync: on: checkpoints are committed to /checkpoints; kept: {kept}\n"


@pytest.mark.parametrize(("limit", "kept"), [(None, "all"), (0, "all"), (3, "the newest 3")])
def test_an_sft_program_names_folder_and_limit(
    limit: int | None, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointHandler(OURS, limit=limit)
    assert capsys.readouterr().err == line(kept)


def test_the_policies_of_the_variable_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RETENTION, "keep_last.n=2  keep_every.steps=500")
    CheckpointHandler(OURS, limit=1)
    assert capsys.readouterr().err == line("the newest 1, keep_last.n=2, keep_every.steps=500")


def test_the_driver_of_an_sft_program_under_ray_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    CheckpointHandler(VERLS, mode=Mode.RAY)  # a group of workers, which says nothing of its engines
    assert capsys.readouterr().err == line("all")


@pytest.mark.parametrize("made", [{"engine": OURS, "rank": 1}, {"engine": VERLS}])
def test_other_ranks_and_engines_that_are_left_to_verl_say_nothing(
    made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointHandler(**made)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("use_critic", "settings", "kept"),
    [
        (True, {"max_actor_ckpt_to_keep": 4, "max_critic_ckpt_to_keep": 2}, "the newest 2"),
        (False, {"max_actor_ckpt_to_keep": 4, "max_critic_ckpt_to_keep": 2}, "the newest 4"),
        (True, {"max_actor_ckpt_to_keep": None}, "all"),
        (False, {"max_actor_ckpt_to_keep": 4, "remove_previous_ckpt_in_save": True}, "the newest 1"),
    ],
)
def test_a_ppo_program_names_the_limit_that_holds_and_then_loads(
    use_critic: bool, settings: dict[str, Any], kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PPOTrainer(use_critic, **settings)._load_checkpoint() == "loaded"
    assert capsys.readouterr().err == line(kept)


def test_a_relative_folder_is_said_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program_start.announce("checkpoints/mine", [])
    assert f"{tmp_path}/checkpoints/mine;" in capsys.readouterr().err


def test_a_trainer_without_these_settings_loads_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = PPOTrainer(use_critic=False)
    del trainer.use_critic
    assert trainer._load_checkpoint() == "loaded"
    assert capsys.readouterr().err == ""
