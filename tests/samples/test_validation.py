from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tests.samples.helpers import sample
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import pass_at, validation_metrics
from trinity_sync.samples.record import Sample


@pytest.mark.parametrize("made", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(made: int) -> None:
    for right in range(made + 1):
        for k in range(1, made + 1):
            choices = list(combinations([True] * right + [False] * (made - right), k))
            assert pass_at(k, np.array([right]), made) == pytest.approx(np.mean([any(choice) for choice in choices]))


def test_pass_at_k_of_many_samples_is_a_number() -> None:
    assert 0.5 < pass_at(512, np.array([1, 1000]), 1024) <= 1.0


def batch_of(right: list[list[float | None]]) -> SampleBatch:
    return SampleBatch.of(
        sample(prompt=prompt, number=number, reward=2.0 * (exact or 0.0), exact=exact)
        for prompt, group in enumerate(right)
        for number, exact in enumerate(group)
    )


def test_a_validation_is_measured_by_reward_by_what_is_right_and_by_length() -> None:
    metrics = validation_metrics(batch_of([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert (metrics["val/prompts"], metrics["val/samples"]) == (2.0, 6.0)
    assert metrics["val/reward/mean"] == pytest.approx(1 / 3)
    assert (metrics["val/reward/min"], metrics["val/reward/max"]) == (0.0, 2.0)
    assert metrics["val/exact"] == pytest.approx(1 / 6)
    assert metrics["val/pass@2"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["val/pass@3"] == pytest.approx(1 / 2)
    assert (metrics["val/response_length/mean"], metrics["val/truncated"]) == (2.0, 0.0)


@pytest.mark.parametrize("reward", [None, 0.0])
def test_what_could_not_be_judged_is_counted_and_spoils_nothing_else(reward: float | None) -> None:
    whole = batch_of([[1.0, 0.0], [1.0, 1.0]])
    failed = SampleBatch.of([sample(prompt=2, number=0, reward=2.0, exact=1.0), unjudged(2, 1, reward)])
    metrics = validation_metrics(SampleBatch.concatenate([whole, failed]))
    assert (metrics["val/samples"], metrics["val/failed"]) == (6.0, 1.0)
    assert metrics["val/reward/mean"] == pytest.approx(8 / 5 if reward is None else 8 / 6)
    assert metrics["val/exact"] == pytest.approx(4 / 5)
    assert metrics["val/pass@2"] == 1.0, "of the prompts all of whose samples were judged"
    nothing = validation_metrics(SampleBatch.of([unjudged(0, 0, reward), unjudged(0, 1, reward)]))
    assert not any(name == "val/exact" or "@" in name for name in nothing)
    assert ("val/reward/mean" in nothing) == (reward is not None)


def unjudged(prompt: int, number: int, reward: float | None) -> Sample:
    return sample(prompt=prompt, number=number, reward=reward, exact=None, error="the reward function f failed")


def test_k_are_powers_of_two_and_all_samples_and_none_where_the_task_does_not_say_what_is_right() -> None:
    many = validation_metrics(batch_of([[1.0] + [0.0] * 9]))
    assert [name for name in many if "@" in name] == ["val/pass@2", "val/pass@4", "val/pass@8", "val/pass@10"]
    assert not any("@" in name for name in validation_metrics(batch_of([[1.0], [0.0]])))
    silent = validation_metrics(batch_of([[None, None]]))
    assert "val/exact" not in silent
    assert not any("@" in name for name in silent)
