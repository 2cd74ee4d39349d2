"""A run's end lies where repetitions let expect it; the interval is Student's."""

from __future__ import annotations

import pytest

from trinity_sync.reproduction.outcome import MOST, Interval, Outcome, end_of, judged


def test_the_interval_is_students() -> None:
    # mean 0.5, standard deviation 0.1: 4.303 * 0.1 * sqrt(4 / 3)
    interval = Interval.of([0.4, 0.5, 0.6])
    assert (interval.low, interval.high) == pytest.approx((0.5 - 0.496868, 0.5 + 0.496868), abs=1e-5)
    assert 0.99 in interval
    assert 1.0 not in interval
    assert 0.0 not in interval


def test_more_repetitions_narrow_it() -> None:
    widths = [Interval.of([0.0, 1.0] * 5 + [0.5] * (number - 10)) for number in (10, MOST)]
    assert widths[1].high - widths[1].low < widths[0].high - widths[0].low
    assert Interval.of([0.5] * MOST) == Interval(low=0.5, high=0.5)


def test_a_run_is_judged_by_its_reward_and_else_by_its_loss() -> None:
    assert judged(Outcome(metrics={1: {"loss": 1.0, "reward/mean": 0.5}})) == "reward/mean"
    assert judged(Outcome(metrics={1: {"loss": 1.0}})) == "loss"
    assert judged(Outcome(digests={0: "a"})) is None


def test_the_end_is_the_mean_of_the_last_ten_steps() -> None:
    metrics = {step: {"loss": float(step)} for step in range(1, 21)}
    assert end_of(Outcome(metrics=metrics), "loss") == 15.5
    assert end_of(Outcome(metrics={1: {"loss": None}, 2: {"loss": 3.0}}), "loss") == 3.0
    assert end_of(Outcome(metrics={1: {"loss": None}}), "loss") is None
