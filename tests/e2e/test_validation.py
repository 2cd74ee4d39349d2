"""`task.validation` as a user sets it: who is asked when, what is kept by it, and that training stays the same."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Run, launch, resume, start

VALIDATED = [
    "trainer.steps=4",
    "checkpoint.interval=2",
    "task.validation.prompts=6",
    "task.validation.interval=2",
    "task.validation.samples_per_prompt=2",
    "task.validation.temperature=1.0",
]
BEST = ["retention=[keep_best]", "retention.policies.keep_best.metric=val/reward/mean"]
MEASURED = ("loss", "grad_norm", "reward/mean", "reward/std", "response_length/mean", "batch/tokens")


@pytest.mark.all
def test_the_best_by_a_validation_are_kept_and_training_is_bitwise_that_without(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *VALIDATED, *BEST, "retention.policies.keep_best.n=2", "explorer.replicas=2")
    run.assert_the_same_weights_everywhere([0, 1, 2, 3, 4], [2, 4], 2)
    lines = run.lines("metrics.jsonl")
    validated = {line["step"]: line for line in lines if "val/reward/mean" in line}
    assert list(validated) == [0, 2, 4]
    assert all((line["val/prompts"], line["val/samples"]) == (6.0, 12.0) for line in validated.values())
    assert all(0 <= line["val/exact"] <= line["val/pass@2"] <= 1 for line in validated.values())
    assert all(line["timing/validate"] > 0 for line in validated.values())
    rewards = {step: line["val/reward/mean"] for step, line in validated.items()}
    for step, manifest in run.manifests.items():
        assert manifest["metrics"]["val/reward/mean"] == rewards[step]
    summary = run.summary["validation"]
    assert (summary["metric"], summary["first"], summary["last"]) == ("val/reward/mean", rewards[0], rewards[4])
    assert summary["best"] == max(rewards.values()) == rewards[summary["best_step"]]
    recorded = [line for line in run.lines("samples.jsonl") if line["validation"]]
    assert {(line["step"], line["version"]) for line in recorded} == {(0, 0), (2, 2), (4, 4)}
    assert all(line["text"] and line["response"] and 0 <= line["reward"] <= 1 for line in recorded)
    page = (run.folder / "report.html").read_text()
    assert "Validation by step" in page
    assert "wait for a validation" in page
    assert "Samples of the validation" in page

    without = launch(tmp_path / "without", "trainer.steps=4", "checkpoint.interval=2", "explorer.replicas=2")
    assert without.digests == run.digests
    trained = [{name: line[name] for name in MEASURED} for line in lines if line["step"]]
    assert trained == [{name: line[name] for name in MEASURED} for line in without.lines("metrics.jsonl")]


@pytest.mark.all
def test_a_run_that_goes_on_validates_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    settings = (*VALIDATED, "trainer.steps=8", "explorer.replicas=2", "sync=memory")
    whole = launch(tmp_path / "whole", *settings)
    assert whole.code == 0, whole.output
    started = start(tmp_path / "run", *settings)
    started.wait_for_file("checkpoints/global_step_4/manifest.json")
    os.killpg(started.process.pid, signal.SIGKILL)
    started.finish()
    run = resume(started.folder)
    assert run.code == 0, run.output

    def validated(run: Run) -> list[dict[str, float]]:
        lines = [line for line in run.lines("metrics.jsonl") if "val/reward/mean" in line]
        return [
            {"step": line["step"]} | {name: line[name] for name in line if name.startswith("val/")} for line in lines
        ]

    assert validated(run) == validated(whole)
    assert [line["step"] for line in validated(run)] == [0, 2, 4, 6, 8]


@pytest.mark.all
def test_a_run_with_validation_is_reproduced(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *VALIDATED)
    assert run.code == 0, run.output
    run.assert_reproduced()


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_measuring_the_loss_changes_nothing_of_a_supervised_run(tmp_path: Path, backend: str) -> None:
    """With dropout, whose random numbers a measurement could use up."""
    for name, numbers in {"train": range(10, 40), "held_out": range(40, 47)}.items():
        rows = (json.dumps({"prompt": f"{n}=", "response": f"{n}"}) + "\n" for n in numbers)
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    settings = (
        f"backend={backend}",
        "live=line",
        "algorithm=sft",
        "task=pairs",
        f"task.path={tmp_path / 'train.jsonl'}",
        "algorithm.batch_size=4",
        "trainer.steps=4",
        "checkpoint.interval=2",
        "+model.architecture.attention_dropout=0.3",
    )
    without = launch(tmp_path / "without", *settings, small=False)
    asked = (f"task.validation.path={tmp_path / 'held_out.jsonl'}", "task.validation.interval=1")
    run = launch(tmp_path / "run", *settings, *asked, small=False)
    assert (without.code, run.code) == (0, 0), without.output + run.output
    measured = [line for line in run.lines("metrics.jsonl") if "val/loss" in line]
    assert [line["step"] for line in measured] == [0, 1, 2, 3, 4]
    assert run.digests == without.digests
    assert [line["loss"] for line in run.lines("metrics.jsonl")[1:]] == [
        line["loss"] for line in without.lines("metrics.jsonl")
    ]


FREE = ("trainer.schedule=free", "sync.max_staleness=1", "backend.ranks=1", "explorer.replicas=2")


def validated(run: Run) -> list[dict[str, float]]:
    return [line for line in run.lines("metrics.jsonl") if "val/reward/mean" in line]


def assert_validated_beside_training(run: Run, steps: list[int]) -> None:
    """Each version that was due once, by its own samples; and the checkpoints say what was measured of theirs."""
    assert run.code == 0, run.output
    lines = validated(run)
    assert sorted(line["step"] for line in lines) == steps
    rewards = {line["step"]: line["val/reward/mean"] for line in lines}
    for step, manifest in run.manifests.items():
        assert manifest["metrics"].get("val/reward/mean") == rewards.get(step)
    recorded = [line for line in run.lines("samples.jsonl") if line["validation"]]
    assert {(line["step"], line["version"]) for line in recorded} == {(step, step) for step in steps}
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    assert run.summary["validation"]["last"] == rewards[max(steps)]


@pytest.mark.all
def test_a_free_run_validates_beside_training_and_keeps_the_best(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", *FREE, *VALIDATED, *BEST, "sync=memory", "trainer.steps=6")
    assert_validated_beside_training(run, [0, 2, 4, 6])
    assert not run.events("fault")
    rewards = {line["step"]: line["val/reward/mean"] for line in validated(run)}
    best = max((2, 4, 6), key=lambda step: (rewards[step], step))
    assert sorted(run.manifests) == sorted({best, 6})


@pytest.mark.all
@pytest.mark.parametrize("sync", ["memory", "checkpoint"])
def test_an_explorer_that_dies_while_it_validates_costs_no_validation(tmp_path: Path, sync: str) -> None:
    many = ("task.validation.prompts=400", "task.validation.interval=4", "sync.slots=3", f"sync={sync}")
    settings = (*FREE, *VALIDATED, *many, "trainer.steps=8", "checkpoint.interval=4", "explorer.max_restarts=1")
    started = start(tmp_path / "run", *settings)
    asked = started.wait_for_event(lambda line: line["event"] == "generate" and line["step"] == line["version"] == 4)
    # With sync=checkpoint the version's own folder is there already, as a state dict.
    manifest = started.folder / "checkpoints/global_step_4/manifest.json"
    kind = json.loads(manifest.read_text())["kind"] if manifest.exists() else None
    assert kind != "full", "the commit waits for the validation"
    os.kill(started.pid_of(asked["explorer"]), signal.SIGKILL)
    run = started.finish()
    assert_validated_beside_training(run, [0, 4, 8])
    told = [event["error"] for event in run.events("fault") if event["where"] == asked["explorer"]]
    assert any(error.startswith("version 4 is to be validated once more") for error in told), told


@pytest.mark.all
def test_a_free_run_that_goes_on_misses_no_validation_and_makes_none_twice(tmp_path: Path) -> None:
    started = start(tmp_path / "run", *FREE, *VALIDATED, "trainer.steps=12", "sync=memory")
    started.wait_for_file("checkpoints/global_step_4/manifest.json")
    os.killpg(started.process.pid, signal.SIGKILL)
    started.finish()
    run = resume(started.folder)
    assert_validated_beside_training(run, [0, 2, 4, 6, 8, 10, 12])


@pytest.mark.all
def test_a_run_without_steps_validates_a_model_or_a_checkpoint_and_saves_nothing(tmp_path: Path) -> None:
    trained = launch(tmp_path / "trained", *VALIDATED)
    only = [*VALIDATED, "trainer.steps=0", "task.validation.at_start=false"]
    of_model = launch(tmp_path / "model", *only)
    last = trained.folder / "checkpoints" / "global_step_4"
    of_checkpoint = launch(tmp_path / "checkpoint", *only, f"checkpoint.resume_from={last}")
    for run, step in ((of_model, 0), (of_checkpoint, 4)):
        assert run.code == 0, run.output
        assert run.digests == {step: trained.digests[step]}
        (line,) = run.lines("metrics.jsonl")
        (same,) = (one for one in trained.lines("metrics.jsonl") if one["step"] == step)
        assert (line["step"], line["val/reward/mean"]) == (step, same["val/reward/mean"])
        assert not run.manifests
