"""Whether explorers and trainer compute the same: what is measured, when, and what becomes of the figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.samples.helpers import sample
from trinity_sync import config
from trinity_sync.actors.rank import GapSum, RankClient
from trinity_sync.errors import ConfigError
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.trainer.agreement_check import AgreementCheck, agreement_bound
from trinity_sync.trainer.group import TrainerGroup


class Ranks:
    """Two shares, of which two ranks each compute one; the last two ranks are of an earlier pipeline stage."""

    def __init__(self, *gaps: float) -> None:
        self._gaps = gaps
        self.asked: list[SampleBatch] = []

    def all(self, ask: Callable[[RankClient], Any], timeout_s: float) -> list[GapSum | None]:
        ask(cast(RankClient, self))
        return [*(self._share(number // 2) for number in range(4)), None, None]

    def measure_gap(self, batch: Any) -> None:
        self.asked.append(batch)

    def _share(self, number: int) -> GapSum:
        gap = self._gaps[number]
        return GapSum(share=number, tokens=10, gap=10 * gap, largest=2 * gap, trained=-20.0, sampled=-10.0)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: value)


def batch(*versions: int, length: int = 4) -> SampleBatch:
    return SampleBatch.of(
        sample(step=3, prompt=row, version=(0, version), response_ids=(7,) * length)
        for row, version in enumerate(versions)
    )


def agreement(ranks: Ranks, *, refuse: bool = True) -> AgreementCheck:
    return AgreementCheck(cast(TrainerGroup, ranks), 0.06, 5.0, refuse=refuse)


def test_the_mean_is_over_all_tokens_and_each_share_counts_once() -> None:
    found = agreement(Ranks(0.02, 0.04)).measure(3, batch(2, 2))
    assert found == pytest.approx({"step": 3, "tokens": 20, "mean": 0.03, "largest": 0.08, "bound": 0.06})


def test_a_larger_difference_refuses_the_run_with_both_figures() -> None:
    with pytest.raises(ConfigError) as refused:
        agreement(Ranks(0.05, 0.09)).measure(3, batch(2))
    told = str(refused.value)
    assert "version 2: their log-probs of 20 tokens differ by 0.07 on average and by 0.18 at most" in told
    assert "where 0.06 on average is allowed (mean log-prob -1 at the explorers, -2 at the trainer)" in told
    assert "explorer.check_agreement=warn" in told
    assert "\n" not in told


def test_a_difference_that_is_no_number_refuses_the_run() -> None:
    with pytest.raises(ConfigError, match="differ by nan"):
        agreement(Ranks(float("nan"), 0.01)).measure(3, batch(2))


def test_a_warning_lets_the_run_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = agreement(Ranks(0.5, 0.5), refuse=False).measure(3, batch(2))
    assert found is not None
    assert found["mean"] == 0.5
    assert capsys.readouterr().err.startswith("note: explorers and trainer do not compute the same of version 2")


def test_it_is_measured_once() -> None:
    ranks = Ranks(0.01, 0.01)
    checked = agreement(ranks)
    assert checked.measure(3, batch(2)) is not None
    assert checked.measure(4, batch(3)) is None
    assert len(ranks.asked) == 1


def test_samples_of_older_weights_are_not_compared() -> None:
    ranks = Ranks(0.01, 0.01)
    checked = agreement(ranks)
    assert checked.measure(3, batch(1, 1)) is None
    assert checked.measure(4, batch(3, 1, 3)) is not None
    assert ranks.asked[0].version_steps.tolist() == [3, 3]


def test_a_few_samples_from_all_over_the_batch_are_enough() -> None:
    ranks = Ranks(0.01, 0.01)
    agreement(ranks).measure(3, batch(*[2] * 100))
    assert len(ranks.asked[0]) == 32
    assert ranks.asked[0].prompts[[0, -1]].tolist() == [0, 99]


def test_the_beginning_of_a_long_response_is_enough() -> None:
    ranks = Ranks(0.01, 0.01)
    agreement(ranks).measure(3, batch(2, 2, length=300))
    asked = ranks.asked[0]
    assert asked.response_lengths.tolist() == [128, 128]
    assert asked.log_probs_of(1).tolist() == batch(2, 2, length=300).log_probs_of(1)[:128].tolist()


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 0.06),
        (["sync.wire_dtype=fp32", "explorer.dtype=fp32", "backend.param_dtype=fp32"], 0.01),
        (["sync.wire_dtype=fp32", "explorer.dtype=fp32"], 0.06),
        (["sync.wire_dtype=fp16", "explorer.dtype=fp16", "backend.param_dtype=fp16"], 0.03),
        (["explorer.temperature=0.5"], 0.12),
        (["explorer.temperature=2"], 0.06),
    ],
)
def test_the_bound_goes_by_the_coarsest_dtype_and_the_temperature(overrides: list[str], bound: float) -> None:
    assert agreement_bound(config.typed(config.compose(overrides))) == pytest.approx(bound)
