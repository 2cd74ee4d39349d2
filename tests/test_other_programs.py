"""Our option files in a Hydra program of somebody else: as its configuration, or below a key of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trinity_sync import config

Compose = Callable[..., DictConfig]


@pytest.fixture(params=[f"file://{config.conf_dir()}", "pkg://conf"], ids=["file", "pkg"])
def composed(request: pytest.FixtureRequest, tmp_path: Path) -> Compose:
    """Composes a program's configuration with this default and key; `conf` is a package in a checkout."""

    def of(default: str, key: str, *overrides: str) -> DictConfig:
        (tmp_path / "program.yaml").write_text(f"defaults:\n  - {default}\n  - _self_\n{key}\n")
        with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
            return compose("program", overrides=[f"hydra.searchpath=[{request.param}]", *overrides])

    return of


def test_below_a_key_it_is_what_our_own_program_composes(composed: Compose) -> None:
    cfg = composed("trinity_sync@trinity", "mine: 1")
    assert (set(cfg), cfg.mine) == ({"trinity", "mine"}, 1)
    assert config.plain(cfg.trinity) == config.plain(config.compose())


def test_below_a_key_options_and_settings_are_chosen_as_ever(composed: Compose) -> None:
    cfg = composed("trinity_sync@trinity", "mine: 1", "sync@trinity.sync=nccl", "trinity.sync.max_staleness=4")
    expected = config.compose(["sync=nccl", "sync.max_staleness=4"])
    assert config.plain(cfg.trinity) == config.plain(expected)


def test_below_a_key_name_and_rate_fit_the_model(composed: Compose) -> None:
    node = composed("trinity_sync@trinity", "mine: 1", "trinity.model.path=/models/Qwen3-0.6B").trinity
    assert (node.name, config.typed(node).trainer.lr) == ("copy-digits-Qwen3-0.6B", 1e-6)


def test_below_a_key_a_reward_has_a_short_form(composed: Compose) -> None:
    key = "trinity: {task: {reward: a.b}}"
    given = composed("trinity_sync@trinity", "mine: 1", "task@trinity.task=jsonl", "trinity.task.reward=a.b")
    assert composed("trinity_sync@trinity", key, "task@trinity.task=jsonl").trinity == given.trinity
    assert given.trinity.task.reward["_target_"] == "a.b"


@pytest.mark.parametrize("reward", ["sparse", "[1, 2]", "[a*b*c]"])
def test_a_task_of_another_program_keeps_its_reward(composed: Compose, reward: str) -> None:
    key = f"task: {{reward: {reward}}}"
    assert composed("trinity_sync@trinity", key).task == OmegaConf.create(key).task


def test_below_a_key_it_is_checked(composed: Compose) -> None:
    node = composed("trinity_sync@trinity", "mine: 1", "trinity.trainer.steps=2").trinity
    config.check(node)
    config.check_inputs(node)
    assert config.typed(node).trainer.steps == 2


def test_below_a_key_an_unknown_setting_is_refused(composed: Compose) -> None:
    with pytest.raises(HydraException, match=r"trinity\.sync\.max_stale"):
        composed("trinity_sync@trinity", "mine: 1", "trinity.sync.max_stale=4")


def test_at_the_top_it_is_our_configuration_with_the_programs_values(composed: Compose) -> None:
    cfg = composed("trinity_sync", "seed: 5", "experiment=quick", "sync=nccl")
    assert cfg == config.compose(["experiment=quick", "sync=nccl", "seed=5"])


def test_at_the_top_a_key_of_the_programs_own_is_refused_by_its_name(composed: Compose) -> None:
    with pytest.raises(HydraException, match="Key 'mine' not in 'Config'"):
        composed("trinity_sync", "mine: 1")


@pytest.mark.parametrize("default", ["config@trinity", "trinity_sync@trinity"])
def test_what_is_for_the_top_alone_is_refused_below_a_key(composed: Compose, default: str) -> None:
    """Hydra's own settings in config.yaml, and experiments, which choose options of the top."""
    with pytest.raises(HydraException, match=r"Could not override '(hydra/help|model)"):
        composed(default, "mine: 1", *([] if default.startswith("config") else ["experiment@trinity.experiment=quick"]))
