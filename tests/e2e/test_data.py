"""Data of a user's own, through `launch.py`: conversations, rows that are too long, and resumes in other batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, launch, resume
from tests.explorer.helpers import ARCHITECTURE
from tests.tasks.chat import chat_tokenizer, said
from trinity_sync.models.architecture import make_model
from trinity_sync.tasks.jsonl import JsonlTask
from trinity_sync.tasks.rewards import exact_match


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(run: Run) -> dict[int, list[str]]:
    """The prompts that each step trained on, in their order."""
    found: dict[int, dict[str, None]] = {}
    for line in run.lines("samples.jsonl"):
        found.setdefault(line["step"], {})[line["text"]] = None
    return {step: list(prompts) for step, prompts in found.items()}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Supervised on conversations, by a model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("sft")
    model = make_model(ARCHITECTURE, 0, folder / "model")
    chat_tokenizer().save_pretrained(model)
    rows, held_out = (
        [{"messages": said(f"{n}=", f"{n}", f"{n + 1}=", f"{n + 1}")} for n in numbers]
        for numbers in (range(10, 40), range(40, 44))
    )
    run = launch(
        folder / "run",
        "algorithm=sft",
        "task=conversations",
        f"task.path={written(folder / 'chats.jsonl', [*rows, {'messages': said('1=' * 40, '1')}])}",
        f"task.validation.path={written(folder / 'held_out.jsonl', [*held_out, rows[3]])}",
        "task.validation.interval=3",
        "task.max_length=64",
        "task.too_long=filter",
        f"model.path={model}",
        "backend=fsdp2",
        "backend.ranks=2",
        "algorithm.batch_size=4",
        "trainer.steps=6",
        "checkpoint.interval=3",
        "retention=[keep_best]",
        "retention.policies.keep_best={metric: val/loss, mode: min, n: 2}",
        "live=line",
        small=False,
    )
    assert run.code == 0, run.output
    return run


@pytest.mark.all
def test_conversations_are_learnt_without_those_that_are_too_long(learnt: Run) -> None:
    lines = learnt.lines("metrics.jsonl")[1:]
    assert lines[-1]["loss"] < lines[0]["loss"]
    # two answers of two digits and what ends them, in each of four conversations
    assert {line["batch/tokens"] for line in lines} == {4 * 2 * 3}
    assert learnt.summary["rows"] == {"rows": 31, "too_long": 1, "longest": 92, "policy": "filter"}
    assert "1 of 31 rows of" in learnt.output


@pytest.mark.all
def test_the_loss_of_what_is_not_learnt_is_measured(learnt: Run) -> None:
    lines = [line for line in learnt.lines("metrics.jsonl") if "val/loss" in line]
    assert [(line["step"], line["val/rows"], line["val/tokens"]) for line in lines] == [
        (step, 5, 5 * 2 * 3) for step in (0, 3, 6)
    ]
    losses = [line["val/loss"] for line in lines]
    assert losses[0] > losses[1] > losses[2] > 0
    kept = {step: manifest["metrics"]["val/loss"] for step, manifest in learnt.manifests.items()}
    assert kept == {3: losses[1], 6: losses[2]}
    assert learnt.summary["validation"] == {
        "metric": "val/loss",
        "first": losses[0],
        "last": losses[2],
        "best": losses[2],
        "best_step": 6,
    }
    assert "Loss of each validation by step" in (learnt.folder / "report.html").read_text()
    assert "note: 1 of the 5 rows of " in learnt.output
    assert "held_out.jsonl:5: the validation does not use new rows only" in learnt.output


@pytest.mark.all
def test_a_supervised_run_goes_on_in_other_batches_where_it_was(learnt: Run) -> None:
    again = resume(learnt.folder, "algorithm.batch_size=6", "trainer.steps=8")
    assert again.code == 0, again.output
    assert {line["batch/tokens"] for line in again.lines("metrics.jsonl")[7:]} == {6 * 2 * 3}
    assert [line["step"] for line in again.lines("metrics.jsonl") if "val/loss" in line] == [0, 3, 6, 8]
    saved = json.loads((learnt.folder / "checkpoints" / "global_step_8" / "trainer_state.json").read_text())
    assert saved["data"] == {
        "groups_per_step": 6,
        "next": [9, 0],
        "waiting": [],
        "numbered_from": [7, 6 * 4],
    }


@pytest.mark.all
def test_prompts_go_on_where_they_were_in_other_batches_and_long_ones_are_cut(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}"} for n in range(40)] + [{"prompt": "123456=", "answer": "1"}]
    path = written(tmp_path / "rows.jsonl", rows)
    run = launch(
        tmp_path / "run",
        "task=jsonl",
        f"task.path={path}",
        "task.response_length=3",
        "task.prompt_length=5",
        "task.too_long=truncate",
        "trainer.steps=2",
        "backend.ranks=1",
        "samples.record_interval=1",
        "samples.record_groups=100",
    )
    assert run.code == 0, run.output
    again = resume(run.folder, "algorithm.prompts_per_step=10", "trainer.steps=4", "explorer.replicas=1")
    assert again.code == 0, again.output
    whole = [prompt.text for prompt in JsonlTask(path, "prompt", "answer", True, exact_match, 0).prompts(1, 100)]
    prompts = asked(again)
    assert [len(prompts[step]) for step in (1, 2, 3, 4)] == [4, 4, 10, 10]
    assert [text for step in (1, 2, 3, 4) for text in prompts[step]] == whole[:28]
    assert again.summary["rows"] == {"rows": 41, "too_long": 1, "longest": 8, "policy": "truncate"}


@pytest.mark.all
def test_rows_that_are_too_long_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"prompt": "61=", "answer": "1"}, {"prompt": "1" * 99, "answer": "1"}])
    run = launch(tmp_path / "run", "task=jsonl", f"task.path={path}", "task.response_length=3", "task.prompt_length=50")
    assert run.code == 2
    assert f"error: {path}:2 has 100 tokens; task.prompt_length allows 50. 1 of 2 rows are too long" in run.output
    assert not (tmp_path / "run" / "run.json").exists()
    assert "Ray" not in run.output
