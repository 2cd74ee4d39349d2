"""Whether explorers and trainer compute the same: what is measured, when, and what becomes of the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tests.samples.helpers import sample
from trinity_sync import config
from trinity_sync.actors.rank_client import LogProbShare, RankClient
from trinity_sync.errors import ConfigError
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.tracking.events import Event, event_fields, event_name
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.trainer.steps import AgreementCheck, agreement_bound


class Ranks:
    """Four ranks, of which the last is of an earlier pipeline stage, and the first two have the same share.

    Their log-probs of a sample are those of the sampler, less the gap of its explorer.
    """

    def __init__(self, **gaps: float) -> None:
        self._gaps = gaps
        self.asked: list[SampleBatch] = []

    def all(self, ask: Callable[[RankClient], Any], timeout_s: float) -> list[LogProbShare | None]:
        ask(cast(RankClient, self))
        batch = self.asked[-1]
        half = np.arange(len(batch))[: len(batch) // 2]
        rest = np.append(np.arange(len(batch))[len(batch) // 2 :], 0)  # the first row fills up
        return [self._share(batch, half), self._share(batch, half), self._share(batch, rest), None]

    def recompute(self, batch: Any) -> None:
        self.asked.append(batch)

    def _share(self, batch: SampleBatch, rows: np.ndarray) -> LogProbShare:
        found = [batch.log_probs_of(row) - self._gaps[str(batch.explorers[row])] for row in rows]
        return LogProbShare(rows, np.concatenate([np.zeros(0, np.float32), *found]))


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: value)


Versions = tuple[int, ...]


def batch(*, length: int = 4, **versions: Versions) -> SampleBatch:
    """Samples by explorer: the version of each."""
    made = [
        SampleBatch.of(
            sample(step=3, prompt=place, version=(0, version), response_ids=(7,) * length)
            for place, version in enumerate(of_explorer)
        )
        for of_explorer in versions.values()
    ]
    named = [replace(part, explorers=np.full(len(part), name)) for part, name in zip(made, versions, strict=True)]
    return SampleBatch.concatenate(named)


class Checked:
    """A check, and what it has reported."""

    def __init__(self, ranks: Ranks, *, refuse: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        group = cast(TrainerGroup, ranks)
        self.check = AgreementCheck(group, self._event, 0.06, 5.0, refuse=refuse).check

    def _event(self, event: Event) -> None:
        self.events.append({"event": event_name(event), **event_fields(event)})


def test_the_figures_of_each_explorer_are_an_event() -> None:
    checked = Checked(Ranks(a=0.02, b=0.04))
    checked.check(3, batch(a=(2, 2), b=(2,)))
    assert checked.events == [
        pytest.approx(dict(event="agreement", step=3, explorer="a", tokens=8, mean=0.02, largest=0.02, bound=0.06)),
        pytest.approx(dict(event="agreement", step=3, explorer="b", tokens=4, mean=0.04, largest=0.04, bound=0.06)),
    ]


def test_one_wrong_explorer_among_many_refuses_the_run_with_both_figures() -> None:
    others = {f"right-{number}": 0.001 for number in range(15)}
    checked = Checked(Ranks(wrong=0.2, **others))
    with pytest.raises(ConfigError) as refused:
        checked.check(3, batch(wrong=(2, 2), **dict.fromkeys(others, (2, 2))))
    told = str(refused.value)
    assert (
        "wrong and the trainer do not compute the same of version 2: their log-probs of 8 tokens differ by 0.2" in told
    )
    assert "where 0.06 on average is allowed (mean log-prob -1.25 at the explorer, -1.45 at the trainer)" in told
    assert "step 3 was not trained" in told
    assert "explorer.check_agreement=warn" in told
    assert "\n" not in told


def test_the_figures_of_a_refused_run_are_on_record() -> None:
    checked = Checked(Ranks(a=0.5, b=0.5))
    with pytest.raises(ConfigError):
        checked.check(3, batch(a=(2,), b=(2,)))
    assert [event["explorer"] for event in checked.events] == ["a", "b"]


def test_a_difference_that_is_no_number_refuses_the_run() -> None:
    with pytest.raises(ConfigError, match="differ by nan"):
        Checked(Ranks(a=float("nan"))).check(3, batch(a=(2, 2)))


def test_a_sample_that_no_rank_has_computed_refuses_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(a=0.0)
    monkeypatch.setattr(ranks, "all", lambda ask, timeout_s: [LogProbShare(np.array([0]), np.zeros(4, np.float32))])
    with pytest.raises(ConfigError, match="differ by nan"):
        Checked(ranks).check(3, batch(a=(2, 2)))


def test_samples_of_an_earlier_attempt_do_not_count() -> None:
    ranks = Ranks(a=0.5)
    check = AgreementCheck(cast(TrainerGroup, ranks), pytest.fail, 0.06, 5.0, refuse=True, attempt=1).check
    check(3, batch(a=(2, 2)))
    assert ranks.asked == []


def test_a_warning_is_a_fault_of_the_explorer_and_lets_the_run_go_on() -> None:
    checked = Checked(Ranks(a=0.5, b=0.0), refuse=False)
    checked.check(3, batch(a=(2, 2), b=(2, 2)))
    (fault,) = [event for event in checked.events if event["event"] == "fault"]
    assert fault["where"] == "a"
    assert fault["error"].startswith("a and the trainer do not compute the same of version 2")


def test_each_explorer_is_measured_once() -> None:
    ranks = Ranks(a=0.01, b=0.01)
    checked = Checked(ranks)
    for step, made in ((3, batch(a=(2, 2))), (4, batch(a=(3,), b=(3,))), (5, batch(a=(4,), b=(4,)))):
        checked.check(step, made)
    assert [asked.explorers.tolist() for asked in ranks.asked] == [["a", "a"], ["b"]]


def test_samples_of_older_weights_are_not_compared() -> None:
    ranks = Ranks(a=0.01)
    checked = Checked(ranks)
    checked.check(3, batch(a=(1, 1)))
    assert not ranks.asked
    checked.check(4, batch(a=(3, 1, 3)))
    assert ranks.asked[0].version_steps.tolist() == [3, 3]


def test_a_few_samples_from_all_over_the_batch_are_enough() -> None:
    ranks = Ranks(a=0.01)
    Checked(ranks).check(3, batch(a=(2,) * 100))
    assert len(ranks.asked[0]) == 32
    assert ranks.asked[0].prompts[[0, -1]].tolist() == [0, 99]


def test_each_of_many_explorers_has_some_samples_measured() -> None:
    names = {f"explorer-{number}": 0.01 for number in range(20)}
    ranks = Ranks(**names)
    Checked(ranks).check(3, batch(**dict.fromkeys(names, (2,) * 9)))
    assert dict(zip(*np.unique(ranks.asked[0].explorers, return_counts=True), strict=True)) == dict.fromkeys(names, 4)


def test_a_response_is_measured_to_its_end() -> None:
    """A window, or a scaled rope, shows far from the beginning only."""
    ranks = Ranks(a=0.01)
    Checked(ranks).check(3, batch(a=(2, 2), length=300))
    assert ranks.asked[0].response_lengths.tolist() == [300, 300]


def test_a_batch_without_samples_waits_for_the_next() -> None:
    ranks = Ranks(a=0.01)
    Checked(ranks).check(3, SampleBatch.of([]))
    assert not ranks.asked


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 0.1),
        (["sync.wire_dtype=fp32", "explorer.dtype=fp32", "backend.param_dtype=fp32"], 0.01),
        (["sync.wire_dtype=fp32", "explorer.dtype=fp32"], 0.1),
        (["sync.wire_dtype=fp16", "explorer.dtype=fp16", "backend.param_dtype=fp16"], 0.03),
        (["explorer.temperature=0.5"], 0.1),
    ],
)
def test_the_bound_goes_by_the_coarsest_dtype_alone(overrides: list[str], bound: float) -> None:
    assert agreement_bound(config.typed(config.compose(overrides))) == pytest.approx(bound)
