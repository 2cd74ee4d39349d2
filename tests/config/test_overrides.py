"""Overrides whose values are text that looks like numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_sync.config import compose
from trinity_sync.config.invocation import Invocation
from trinity_sync.config.messages import CommandLine
from trinity_sync.config.overrides import as_numbers, as_typed


@pytest.mark.parametrize("text", ["2024_11_25", "1e3", "1_0", "1.50", "true", "NaN", "007", "0x10", "7", "-1e3"])
def test_text_stays_as_it_is_typed(text: str) -> None:
    cfg = compose([f"name={text}", "tracker=[wandb]", f"tracker.wandb.project={text}", f"checkpoint.dir={text}"])
    assert (cfg.name, cfg.tracker.wandb.project, cfg.checkpoint.dir) == (text, text, text)


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("name=1_0,2_0", "name='1_0','2_0'"),
        ("name=choice(1e3,x)", "name=choice('1e3',x)"),
        ("tracker.wandb.tags=[1_0,2e3,x]", "tracker.wandb.tags=['1_0','2e3',x]"),
        ("tracker.wandb={project:2024_11,timeout_s:1e1}", "tracker.wandb={project:'2024_11',timeout_s:1e1}"),
        ("+tracker.mlflow.experiment=1e3", "+tracker.mlflow.experiment='1e3'"),
        ("task.path=1_0", "task.path='1_0'"),
        ("retention.policies.keep_best.metric=1e3", "retention.policies.keep_best.metric='1e3'"),
        ("algorithm.kl.reference=1_0", "algorithm.kl.reference='1_0'"),
        ("hydra.run.dir=2024_11", "hydra.run.dir='2024_11'"),
    ],
)
def test_a_value_for_text_is_quoted_wherever_it_stands(typed: str, quoted: str) -> None:
    assert as_typed(typed) == quoted
    assert as_typed(quoted) == quoted
    assert CommandLine.read([typed]).arguments == [quoted]


@pytest.mark.parametrize(
    "typed",
    [
        "trainer.lr=1e-3",
        "trainer.steps=1_000",
        "trainer.lr=choice(1e-3,1e-4)",
        "name=null",
        "name='1_0'",
        "~tracker",
        "backend.overrides.x=1_0",
        "trainer.deterministic=true",
        "name=",
        "-m",
        "sync=memory,nccl",
        "name=${seed}",
        "name=2024_11_25 run",
        "name=1e3 b",
        "name=true story",
        "tracker.wandb.tags=[1e3 a,b]",
    ],
)
def test_all_else_stays_as_it_is(typed: str) -> None:
    assert as_typed(typed) == typed


def test_null_is_no_text() -> None:
    assert compose(["checkpoint.mirror=null"]).checkpoint.mirror is None


def test_a_run_of_an_earlier_release_keeps_the_name_that_it_had(tmp_path: Path) -> None:
    """It took ``name=2024_11_25`` for a number."""
    hydra = compose(["name=1"], hydra=True).hydra
    OmegaConf.set_readonly(hydra, False)
    hydra.runtime.cwd, hydra.runtime.config_sources, hydra.job.config_name = str(tmp_path), [], "config"
    found = Invocation.of_hydra(hydra, ["name=2024_11_25", "trainer.lr=1e-3"], tmp_path)
    assert found.overrides == ("name='20241125'", "trainer.lr=1e-3")
    assert as_numbers(found.overrides) == list(found.overrides)
    assert as_numbers(["name=2024_11_25 run"]) == ["name=2024_11_25 run"]
