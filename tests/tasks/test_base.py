from __future__ import annotations

import math

import numpy as np
import pytest

from trinity_sync.errors import RunError
from trinity_sync.host.origin import origin
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks import base
from trinity_sync.tasks.base import Response, RewardResult
from trinity_sync.tasks.rewards import score

PROMPT = Prompt(index=5, text="61=", answer="61")


class Judge:
    """A task that answers with what it was given, or raises it."""

    def __init__(self, verdict: object) -> None:
        self.verdict = verdict

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return []

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict  # type: ignore[return-value]


def judged(verdict: object) -> RewardResult:
    return score(Judge(verdict), PROMPT, "61", True, step=7)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (RewardResult(0.5), (0.5, None)),
        (RewardResult(1, True), (1.0, 1.0)),
        (RewardResult(np.float64(0.25), np.float64(0)), (0.25, 0.0)),
    ],
)
def test_numbers_come_out_as_plain_floats(verdict: RewardResult, expected: tuple[float, float | None]) -> None:
    result = judged(verdict)
    assert result == expected
    assert type(result.reward) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.5", None, [1.0]])
def test_a_reward_that_is_no_finite_number_stops_the_run(value: object) -> None:
    with pytest.raises(RunError, match="must return a finite number"):
        judged(RewardResult(value))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, "yes"])
def test_an_exactness_that_is_no_finite_number_stops_the_run(value: object) -> None:
    with pytest.raises(RunError, match=f"returned {value!r}; it must return a finite number"):
        judged(RewardResult(1.0, value))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 0.5, (0.5, None)])
def test_anything_but_a_reward_result_stops_the_run(value: object) -> None:
    with pytest.raises(RunError, match="must return a RewardResult"):
        judged(value)


@pytest.mark.parametrize("verdict", [KeyError("answer"), RewardResult(math.nan), 3])
def test_the_message_names_function_prompt_and_step(verdict: object) -> None:
    with pytest.raises(
        RunError, match=r"function tests\.tasks\.test_base\.Judge\.reward, called for prompt 5 of step 7,"
    ):
        judged(verdict)


def test_an_exception_is_quoted_and_its_traceback_kept() -> None:
    with pytest.raises(RunError, match=rf"failed: KeyError: 'answer' \({__file__}:\d+\)$") as caught:
        judged(KeyError("answer"))
    found = origin(caught.value)
    assert found is not None
    assert found.traceback.endswith("KeyError: 'answer'")


def test_a_task_may_name_the_function_that_it_calls() -> None:
    task = Judge(None)
    task.reward_name = "my.reward"  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"the reward function my\.reward,"):
        score(task, PROMPT, "", False, step=1)


def test_a_call_during_which_signals_came_is_repeated_until_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = iter([0, 1, 1, 2, 2, 2])
    monkeypatch.setattr(base, "signals_left", lambda: next(signals))
    results = iter([RewardResult(0.0), RewardResult(0.25), RewardResult(1.0)])
    assert base.judged_here(lambda *response: next(results), Response(PROMPT, "61", True)) == (1.0, None)
