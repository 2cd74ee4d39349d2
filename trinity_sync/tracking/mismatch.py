"""How far the samplers' log-probs were from the trainer's own, over a run: figures of summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from trinity_sync.tracking import units
from trinity_sync.tracking.jsonl import Record

KL, K3_KL = "rollout_corr/kl", "rollout_corr/k3_kl"
ABS_DIFF, ABS_DIFF_MAX = "rollout_corr/log_prob_abs_diff", "rollout_corr/log_prob_abs_diff_max"


class MismatchFigures(TypedDict):
    """None where no step has measured it.

    Attributes:
        kl, k3_kl: estimators of the divergence of the trainer from the sampler, in nats per token; means of the steps.
        log_prob_abs_diff: absolute difference of a token's log-probs; mean of the steps.
        log_prob_abs_diff_max: the largest of all steps.
    """

    kl: float | None
    k3_kl: float | None
    log_prob_abs_diff: float | None
    log_prob_abs_diff_max: float | None


def mismatch_figures(metrics: Sequence[Record]) -> MismatchFigures:
    """Work out ``mismatch`` in summary.json from the lines of metrics.jsonl."""
    kl, k3_kl, mean, most = (_measured(metrics, name) for name in (KL, K3_KL, ABS_DIFF, ABS_DIFF_MAX))
    return {
        "kl": _mean(kl),
        "k3_kl": _mean(k3_kl),
        "log_prob_abs_diff": _mean(mean),
        "log_prob_abs_diff_max": max(most, default=None),
    }


def _measured(metrics: Sequence[Record], name: str) -> list[float]:
    return [value for line in metrics if (value := units.finite(line.get(name))) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
