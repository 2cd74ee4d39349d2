"""The proof that explorers sample from what the trainer trains (`explorer.check_agreement`). Runs in the driver: before
the first update of each attempt, the ranks compute the log-probs of some of its samples as training does, dropout
included, and these are held against those of the samplers. Another class, attention, rope base or soft cap on one of
the two sides shows here, although all weights are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import ray

from trinity_sync.backends.option import backend_option
from trinity_sync.errors import ConfigError
from trinity_sync.samples.batch import SampleBatch, TokenRows
from trinity_sync.trainer.group import TrainerGroup

if TYPE_CHECKING:
    from trinity_sync.actors.rank import GapSum
    from trinity_sync.config.schema import Config

_BOUNDS = {"fp32": 0.01, "fp16": 0.03, "bf16": 0.06}
"""Largest mean difference of a token's log-probs, nats, by the coarsest dtype in which one side computes or the weights
travel. docs/explorers.md has the figures of healthy and of wrong pairs.
"""
_SAMPLES, _TOKENS = 32, 128
"""So many samples are measured, and so many tokens of each response."""


class AgreementCheck:
    """Measures samples of the version that the trainer holds, once.

    Args:
        trainer: the group of ranks, initialised.
        bound: of the mean difference, nats.
        refuse: whether a larger one ends the run; else it is a note.
        timeout_s: limit of the measurement, seconds.
    """

    def __init__(self, trainer: TrainerGroup, bound: float, timeout_s: float, *, refuse: bool) -> None:
        self._trainer, self._timeout_s = trainer, timeout_s
        self._bound, self._refuse = bound, refuse
        self._measured = False

    def measure(self, step: int, batch: SampleBatch) -> dict[str, object] | None:
        """Measure samples that a step is about to train on; return the fields of the event ``agreement``. None: that
        was done before, or all samples are of older versions.

        Args:
            step: the trainer's global step.
            batch: its samples.

        Raises:
            ConfigError: the mean difference is above the bound, and such a run is refused; has both figures.
        """
        if self._measured:
            return None
        fresh = np.flatnonzero(batch.version_steps == step - 1)
        if not len(fresh):
            return None
        self._measured = True
        rows = fresh[np.unique(np.linspace(0, len(fresh) - 1, min(_SAMPLES, len(fresh))).astype(np.int64))]
        shared = ray.put(_beginnings(batch.take(rows)))
        found = self._trainer.all(lambda rank: rank.measure_gap(shared), self._timeout_s)
        return self._judged(step, list({one.share: one for one in found if one is not None}.values()))

    def _judged(self, step: int, shares: Sequence[GapSum]) -> dict[str, object]:
        tokens = sum(one.tokens for one in shares)
        mean = sum(one.gap for one in shares) / tokens
        trained, sampled = sum(one.trained for one in shares) / tokens, sum(one.sampled for one in shares) / tokens
        largest = max(one.largest for one in shares)
        if not mean <= self._bound:  # not a number is no agreement
            text = (
                f"explorers and trainer do not compute the same of version {step - 1}: their log-probs of {tokens} "
                f"tokens differ by {mean:.3g} on average and by {largest:.3g} at most, where {self._bound:.3g} on "
                f"average is allowed (mean log-prob {sampled:.4g} at the explorers, {trained:.4g} at the trainer)"
            )
            if self._refuse:
                raise ConfigError(
                    f"{text}; step {step} was not trained. Docs: explorers.md, Agreement; "
                    "explorer.check_agreement=warn trains all the same"
                )
            print(f"note: {text}", file=sys.stderr)
        return {"step": step, "tokens": tokens, "mean": mean, "largest": largest, "bound": self._bound}


def agreement_bound(cfg: Config) -> float:
    """Return the largest mean difference of log-probs that dtypes and temperature explain, nats."""
    dtypes = (cfg.sync.wire_dtype, cfg.explorer.dtype, backend_option(cfg.backend).compute_dtype)
    # differences of logits are divided by the temperature
    return max(_BOUNDS[dtype] for dtype in dtypes) / min(cfg.explorer.temperature or 1.0, 1.0)


def _beginnings(batch: SampleBatch) -> SampleBatch:
    """The same samples, with the first tokens of their responses alone."""
    rows, lengths = batch.responses, batch.response_lengths
    kept = np.arange(len(rows.ids)) - np.repeat(rows.offsets[:-1], lengths) < _TOKENS
    shorter = TokenRows.joined(rows.ids[kept], np.minimum(lengths, _TOKENS))
    return replace(batch, responses=shorter, log_probs=batch.log_probs[kept])
