"""Defaults that depend on other settings: the name of a run, and its learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_sync.config import RunConfig, compose
from trinity_sync.config.composition import settle

GIVEN = "model.path=/models/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], 5e-4),
        (["model.lora.rank=8"], 5e-4),
        (["workload=bytes", "model.shapes=qwen3-8b"], 5e-4),
        ([GIVEN], 1e-6),
        (["model=path", GIVEN], 1e-6),
        ([GIVEN, "algorithm.kind=mine"], 1e-6),
        (["model.path='${oc.env:NOT_SET}'"], 1e-6),
        ([GIVEN, "algorithm=sft", "task=pairs"], 1e-5),
        ([GIVEN, "model.lora.rank=8"], 1e-4),
        ([GIVEN, "model.lora.path=adapter", "algorithm=sft", "task=pairs"], 1e-4),
        ([GIVEN, "trainer.lr=3e-3"], 3e-3),
        (["experiment=gsm8k", GIVEN, "model.lora.rank=8"], 1e-6),
    ],
)
def test_the_rate_fits_the_model_and_the_algorithm_unless_it_is_given(overrides: list[str], rate: float) -> None:
    assert compose(overrides).trainer.lr == rate


@pytest.mark.parametrize(("overrides", "sequences"), [([], 256), ([GIVEN], 8), ([GIVEN, "model.lora.rank=8"], 8)])
def test_a_rank_takes_fewer_sequences_at_a_time_of_a_model_that_is_given(overrides: list[str], sequences: int) -> None:
    assert compose(overrides).trainer.micro_batch_size == sequences


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "copy-digits"),
        ([GIVEN], "copy-digits-Qwen3-0.6B"),
        (["task=jsonl", "task.path=data/gsm8k.jsonl", "model=path", "model.path=Qwen/Qwen3-0.6B"], "gsm8k-Qwen3-0.6B"),
        (["task=jsonl", "model=path"], "jsonl"),
        (["task=jsonl", "task.path='${name}.jsonl'", "name=mine"], "mine"),
        (["task=jsonl", "+task.cache='/data/${name}'", GIVEN], "jsonl-Qwen3-0.6B"),
        (["experiment=quick", GIVEN], "quick"),
    ],
)
def test_a_run_is_named_after_task_and_model_unless_it_has_a_name(overrides: list[str], name: str) -> None:
    assert compose(overrides).name == name


def test_the_values_are_written_into_a_composition_but_not_over_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = compose([GIVEN])
    assert settle(cfg) == ["name", "trainer.lr", "trainer.micro_batch_size"]
    written = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(written, dict)
    assert (written["name"], written["trainer"]["lr"]) == ("copy-digits-Qwen3-0.6B", 1e-6)
    assert settle(cfg) == []
    monkeypatch.setenv("RATE", "0.1")
    own = compose([GIVEN, "trainer.lr='${oc.env:RATE}'", "name=mine", "trainer.micro_batch_size=4"])
    assert settle(own) == []
    assert OmegaConf.is_interpolation(own.trainer, "lr")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], None),
        ([GIVEN], "rate 1e-06 (GRPO on a model of yours; trainer.lr=... changes it)"),
        ([GIVEN, "algorithm=sft"], "rate 1e-05 (SFT on a model of yours; trainer.lr=... changes it)"),
        ([GIVEN, "model.lora.rank=4"], "rate 0.0001 (LoRA on a model of yours; trainer.lr=... changes it)"),
        ([GIVEN, "trainer.lr=5e-4"], "rate 0.0005"),
    ],
)
def test_the_start_tells_the_rate_of_a_model_that_was_given(
    overrides: list[str], text: str | None, tmp_path: Path
) -> None:
    assert RunConfig(compose([*overrides, "task=copy_digits"])).rate_text() == text
