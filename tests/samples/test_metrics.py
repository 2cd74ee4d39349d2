"""What is measured of a batch, and how a few of its samples are written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.samples.helpers import sample
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.metrics import batch_metrics, excerpt, validation_metrics
from trinity_sync.samples.record import Prompt

BATCH = SampleBatch.of(
    [
        sample(1, 0, 0, reward=0.5, response_ids=(7, 2)),
        sample(1, 1, 0, reward=0.25, prompt_ids=(1, 2, 3, 4), response_ids=(7, 8, 9)),
        sample(1, 0, 1, reward=0.5, response_ids=(5, 6, 7, 2)),
        sample(1, 1, 1, reward=0.75, prompt_ids=(1, 2, 3, 4), exact=1.0),
        sample(2, 1, 0, reward=-0.25, response_ids=(7,)),
        sample(2, 1, 1, reward=-0.25),
    ]
)


def test_rewards_and_lengths_are_measured() -> None:
    found = batch_metrics(BATCH)
    assert found == pytest.approx(
        {
            "batch/samples": 6,
            "batch/tokens": 14,
            "reward/mean": 0.25,
            "reward/std": float(np.std([0.5, 0.25, 0.5, 0.75, -0.25, -0.25])),
            "reward/min": -0.25,
            "reward/max": 0.75,
            "reward/exact": 1 / 6,
            "reward/failed": 0,
            "reward/flat_groups": 2 / 3,
            "response_length/mean": 14 / 6,
            "response_length/max": 4,
            "response_length/truncated": 1 / 3,
            "prompt_length/mean": 8 / 3,
            "prompt_length/max": 4,
        }
    )


def test_the_parts_of_a_reward_are_measured_over_the_samples_that_have_them() -> None:
    parts = {"format": np.array([1.0, 0.0, np.nan, 0.5, np.nan, np.nan]), "score": np.full(6, np.nan)}
    batch = SampleBatch.concatenate([replace(BATCH, parts=parts), BATCH]).sorted()
    assert [value for name, value in batch_metrics(batch).items() if "format" in name or "score" in name] == [0.5]
    assert batch_metrics(batch)["reward/format"] == 0.5
    of_one_version = replace(BATCH, parts=parts).take(np.arange(4))
    assert validation_metrics(of_one_version)["val/reward/format"] == 0.5


def test_responses_that_could_not_be_judged_are_counted_and_those_without_a_reward_are_in_no_mean() -> None:
    found = batch_metrics(
        SampleBatch.of(
            [
                sample(1, 0, 0, reward=1.0, exact=1.0),
                sample(1, 0, 1, reward=None, exact=None, error="it raised"),
                sample(1, 1, 0, reward=0.0, exact=None, error="it raised"),
                sample(1, 1, 1, reward=0.5, exact=0.0),
            ]
        )
    )
    expected = {"mean": 0.5, "min": 0.0, "max": 1.0, "exact": 0.5, "failed": 2, "flat_groups": 0.5}
    assert {name: found[f"reward/{name}"] for name in expected} == pytest.approx(expected)


def test_of_a_batch_without_any_reward_no_mean_is_told() -> None:
    found = batch_metrics(SampleBatch.of([sample(reward=None, exact=None, error="it raised")]))
    assert {name for name in found if name.startswith("reward/")} == {"reward/failed", "reward/flat_groups"}
    assert found["reward/failed"] == 1


def test_where_the_task_does_not_always_say_what_is_right_nothing_is_said_of_it() -> None:
    assert "reward/exact" not in batch_metrics(SampleBatch.of([sample(exact=None), sample(number=1)]))


def test_of_pairs_and_of_nothing_only_the_size_is_known() -> None:
    assert batch_metrics(PairBatch.of([[1]], [[2, 3]])) == {"batch/samples": 1, "batch/tokens": 2}
    assert batch_metrics(SampleBatch.of([])) == {"batch/samples": 0, "batch/tokens": 0}


def test_all_samples_of_the_first_groups_are_written_out() -> None:
    mixed = ((0, 1, 3), (1, 2, 0))
    changes = {"spans": mixed, "version": (2, 0)}
    batch = SampleBatch.of([replace(one, **changes) if one.order == (1, 0, 0) else one for one in BATCH])
    asked: list[tuple[int, int]] = []

    def prompt(step: int, number: int) -> Prompt:
        asked.append((step, number))
        return Prompt(index=number, text=f"{step}/{number}=")

    lines = excerpt(batch, np.arange(6.0), 2, prompt)
    assert [(line["for_step"], line["prompt"], line["sample"]) for line in lines] == [
        (1, 0, 0),
        (1, 1, 0),
        (1, 0, 1),
        (1, 1, 1),
    ]
    assert sorted(asked) == [(1, 0), (1, 1)]
    assert lines[0] == {
        "validation": False,
        "for_step": 1,
        "prompt": 0,
        "sample": 0,
        "text": "1/0=",
        "response": "72",
        "reward": 0.5,
        "exact": 0.0,
        "advantage": 0.0,
        "finished": True,
        "tokens": 2,
        "version": 0,
        "version_attempt": 2,
        "spans": [[0, 1, 3], [1, 2, 0]],
    }
    assert (lines[1]["spans"], lines[1]["finished"], lines[1]["version_attempt"]) == ([[0, 3, 0]], False, 0)
    assert len(excerpt(batch, None, 9, prompt)) == 6
