"""`experiment=gsm8k` with data in verl's form and a tiny model, on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_models import make_chat_model
from tests.e2e.runs import launch
from tests.verl_rows import ASKED, write_problems

# What a machine without GPUs needs otherwise: fewer processes, and fewer and shorter answers.
HERE = [
    "explorer.replicas=1",
    "backend.ranks=2",
    "algorithm.samples_per_prompt=2",
    "trainer.mini_batches=2",
    "trainer.max_tokens=1024",
    "trainer.gradient_checkpointing=false",
    "task.response_length=12",
    "task.validation.interval=2",
    "task.validation.prompts=3",
    "cluster.start_timeout_s=300",
]


@pytest.mark.all
@pytest.mark.parametrize("explorer", [["explorer=hf"], []])
def test_the_recipe_runs_on_a_tiny_model_with_data_in_verls_form(tmp_path: Path, explorer: list[str]) -> None:
    data = [
        f"task.path={write_problems(tmp_path / 'train.parquet', 9, 'train')}",
        f"task.validation.path={write_problems(tmp_path / 'test.parquet', 4, 'test')}",
        f"model.path={make_chat_model(tmp_path / 'model')}",
    ]
    run = launch(tmp_path / "run", "experiment=gsm8k", *data, *HERE, *explorer)
    assert run.code == 0, run.output
    steps = run.lines("metrics.jsonl")
    assert [line["step"] for line in steps if "val/reward/mean" in line] == [0, 2, 3]
    assert all(line["batch/samples"] == 8 for line in steps if line["step"])
    samples = run.lines("samples.jsonl")
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0}
    assert samples
    assert all(sample["validation"] and ASKED in sample["text"] for sample in samples)
    assert run.summary["sync"]["mismatched"] == 0
    assert "val/reward/mean" in (run.folder / "report.html").read_text() or run.summary["validation"]
