"""Dynamic sampling and the divergence in rewards, through `launch.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, launch, resume

ROWS = 7
"""Coprime to the prompts of a step."""

FUNCTION = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 0.0 if int(ground_truth) % 2 else float(sum(map(ord, solution_str)) % 7)
"""
"""Odd rows are worth the same whatever is said."""

FIGURES = ("step", "loss", "reward/mean", "filter_groups/drawn", "filter_groups/flat")
PENALTY = ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff")


def run_of(folder: Path, *overrides: str, function: str = FUNCTION) -> Run:
    rows = [
        {
            "data_source": "numbers",
            "prompt": f"{number}=",
            "reward_model": {"ground_truth": str(number)},
        }
        for number in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(function)
    return launch(
        folder / "run",
        "task=verl",
        f"task.path={folder / 'rows.jsonl'}",
        f"task.reward.function_path={folder / 'score.py'}",
        "task.shuffle=false",
        "task.prompt_length=16",
        "task.response_length=3",
        "algorithm.prompts_per_step=2",
        "algorithm.filter_groups.enable=true",
        "samples.record_interval=1",
        "samples.record_groups=9",
        "backend=fsdp2",
        "sync=memory",
        "explorer.replicas=1",
        "trainer.lr=1e-3",
        "trainer.steps=4",
        *overrides,
    )


def asked(run: Run) -> list[list[str]]:
    """The prompts that each step trained on, in their order."""
    found: dict[int, dict[str, None]] = {}
    for line in run.lines("samples.jsonl"):
        found.setdefault(line["step"], {})[line["text"]] = None
    return [list(found[step]) for step in sorted(found)]


def figures(run: Run, *names: str) -> list[Any]:
    return [[line[name] for name in names] for line in run.lines("metrics.jsonl")]


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Run:
    in_reward = "algorithm.kl.in_reward"
    adaptive = (f"{in_reward}.coeff=0.5", f"{in_reward}.type=adaptive", f"{in_reward}.target_kl=1e-3")
    run = run_of(tmp_path_factory.mktemp("filtered"), *adaptive, f"{in_reward}.horizon=10")
    assert run.code == 0, run.output
    return run


@pytest.mark.all
def test_every_step_trains_on_prompts_with_a_difference_in_the_order_of_the_data(filtered: Run) -> None:
    steps = asked(filtered)
    assert [len(step) for step in steps] == [2, 2, 2, 2]
    assert not [text for step in steps for text in step if int(text[:-1]) % 2]
    for line in filtered.lines("metrics.jsonl"):
        assert line["batch/samples"] == 8
        assert line["filter_groups/flat"] == line["reward/flat_groups"] * line["filter_groups/drawn"] > 0
        assert line["filter_groups/filled"] == 0


@pytest.mark.all
def test_the_divergence_in_rewards_begins_at_0_and_its_coefficient_adapts(filtered: Run) -> None:
    lines = figures(filtered, *PENALTY)
    assert lines[0] == [0.0, 0.5]
    assert all(divergence != 0 for divergence, _ in lines[1:])
    assert lines[1][1] == pytest.approx(0.5 * (1 - 0.2 * 8 / 10)), "below the target by all of it, bounded"


@pytest.mark.all
def test_a_resume_goes_on_with_the_next_prompt_and_the_same_coefficient(filtered: Run, tmp_path: Path) -> None:
    folder = tmp_path / filtered.folder.name
    shutil.copytree(filtered.folder, folder)
    Run(folder, 0, "").go_back_to(2)
    trusted = f"task.reward.function_path={filtered.folder.parent / 'score.py'}"
    again = resume(folder, "--skip-unreadable", trusted)
    assert again.code == 0, again.output
    assert again.digests == filtered.digests
    assert figures(again, *FIGURES, *PENALTY) == figures(filtered, *FIGURES, *PENALTY)
    assert asked(again) == asked(filtered)


@pytest.mark.all
def test_explorers_at_their_own_pace_leave_groups_out_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, "trainer.schedule=free", "sync.max_staleness=1", "sync.slots=3")
    assert run.code == 0, run.output
    steps = asked(run)
    assert [len(step) for step in steps] == [2, 2, 2, 2]
    assert not [text for step in steps for text in step if int(text[:-1]) % 2]
    assert sum(line["filter_groups/flat"] for line in run.lines("metrics.jsonl")) > 0


@pytest.mark.all
@pytest.mark.parametrize("schedule", [(), ("trainer.schedule=free", "sync.slots=3")])
def test_a_step_without_enough_groups_is_filled_or_ends_the_run(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    runs = {}
    for name in ("fill", "stop"):
        folder = tmp_path / name
        folder.mkdir()
        bound = ("max_num_gen_batches=2", f"on_shortage={name}")
        keys = [f"algorithm.filter_groups.{key}" for key in bound]
        runs[name] = run_of(folder, *keys, *schedule, function=FUNCTION.replace("% 7", "* 0"))
    assert runs["stop"].code == 1
    assert "algorithm.filter_groups.max_num_gen_batches (2)" in runs["stop"].output
    filled = runs["fill"]
    assert filled.code == 0, filled.output
    assert [event["count"] for event in filled.events("filled_batch")] == [2, 2, 2, 2]
    assert figures(filled, "batch/samples", "filter_groups/drawn") == [[8, 4]] * 4


@pytest.mark.all
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_divergence_in_rewards_begins_at_0_on_every_backend(tmp_path: Path, backend: str) -> None:
    ranks = ("backend.ranks=2", "backend.pp=2") if backend == "megatron" else ("backend.ranks=2",)
    run = launch(tmp_path / "run", f"backend={backend}", *ranks, "algorithm.kl.in_reward.coeff=0.5", "trainer.lr=1e-3")
    assert run.code == 0, run.output
    lines = figures(run, *PENALTY)
    assert lines[0] == [0.0, 0.5]
    assert lines[2][0] != 0
