"""What is made of the lines that validations have in metrics.jsonl, which may come later than those of their steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.tracking.run_state import RunState
from trinity_sync.tracking.summary import put_to_steps, validation_figures, was_validated


def trained(step: int, **fields: float) -> dict[str, Any]:
    return {"attempt": 0, "step": step, "time": 10.0 * step, "timing/step": 1.0, "loss": 0.5, **fields}


def validated(step: int, time: float, **fields: float) -> dict[str, Any]:
    return {"attempt": 0, "step": step, "time": time, **{f"val/{name}": value for name, value in fields.items()}}


LATE = [trained(1), trained(2), trained(3), validated(0, 31.0, loss=3.0), validated(2, 32.0, loss=1.0), trained(4)]


def test_a_validation_that_came_late_stands_in_the_line_of_its_step() -> None:
    lines = put_to_steps(LATE)
    assert [line["step"] for line in lines] == [1, 2, 3, 0, 4]
    assert lines[1] == {**trained(2), "val/loss": 1.0}


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [("val/reward/mean", {0: 0.1, 2: 0.9, 4: 0.9, 6: 0.5}, (0.9, 4)), ("val/loss", {0: 3.0, 2: 1.0, 4: 2.0}, (1.0, 2))],
)
def test_the_best_is_the_largest_reward_and_the_smallest_loss(
    name: str, values: dict[int, float], best: tuple[float, int]
) -> None:
    lines = [{"step": step, name: value} for step, value in reversed(values.items())]
    assert validation_figures(lines) == {
        "metric": name,
        "first": values[0],
        "last": values[max(values)],
        "best": best[0],
        "best_step": best[1],
    }
    assert validation_figures([trained(1)]) is None


def test_what_is_on_record_was_validated(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert not was_validated(metrics, 2)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LATE))
    assert [step for step in range(6) if was_validated(metrics, step)] == [0, 2]


def test_a_line_of_a_validation_is_no_step() -> None:
    state, without = RunState(9), RunState(9)
    for line in LATE:
        state.take(line, 0.0)
        if "loss" in line:
            without.take(line, 0.0)
    assert (state.step, state.pace_s, state.metrics) == (without.step, without.pace_s, without.metrics)
    assert state.step == 4
