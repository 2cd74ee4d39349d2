"""Check that explorers and trainer compute the same log-probs (`explorer.check_agreement`). Runs in the driver.

Before the first update of each attempt the ranks compute the log-probs of some samples as training does, dropout
included; they are compared with those of the explorers. A different class, attention, rope base or soft cap on one side
shows here, although all weights are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import ray

from trinity_sync.backends.option import backend_option
from trinity_sync.errors import ConfigError
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.tracking.events import AgreementEvent, Event, FaultEvent
from trinity_sync.trainer.group import TrainerGroup

if TYPE_CHECKING:
    from trinity_sync.config.schema import Config

_BOUNDS = {"fp32": 0.01, "fp16": 0.03, "bf16": 0.1}
"""Largest mean difference of a token's log-probs, nats, by the coarsest dtype of either side or of the wire.
docs/explorers.md has the figures of healthy and of wrong pairs.
"""
_SAMPLES, _OF_EACH = 32, 4
"""Samples that are measured at a time, and the fewest of each explorer."""


class AgreementCheck:
    """Measures each explorer once, by samples of the version that the trainer holds.

    Args:
        bound: of the mean difference, nats.
        refuse: a larger difference ends the run; otherwise it is a fault.
        timeout_s: limit of the measurement, seconds.
    """

    def __init__(
        self, trainer: TrainerGroup, event: Callable[[Event], None], bound: float, timeout_s: float, *, refuse: bool
    ) -> None:
        self._trainer, self._event, self._timeout_s = trainer, event, timeout_s
        self._bound, self._refuse = bound, refuse
        self._measured: set[str] = set()

    def check(self, step: int, batch: SampleBatch) -> None:
        """Measure samples of explorers that were not measured yet, before a step trains on them. Samples of older
        versions are skipped. Records an event ``agreement`` for each explorer.
        """
        fresh = np.flatnonzero((batch.version_steps == step - 1) & ~np.isin(batch.explorers, [*self._measured]))
        of_each = [fresh[batch.explorers[fresh] == name] for name in np.unique(batch.explorers[fresh])]
        if not of_each:
            return
        count = max(_OF_EACH, _SAMPLES // len(of_each))
        some = batch.take(np.concatenate([_spread(rows, count) for rows in of_each]))
        trained = np.full(some.token_count, np.nan)
        shared = ray.put(some)
        for one in self._trainer.all(lambda rank: rank.recompute(shared), self._timeout_s):
            if one is not None:
                trained[some.responses.positions(one.rows)] = one.log_probs
        explorers = np.repeat(some.explorers, some.response_lengths)
        problems = [self._judged(step, str(name), trained, some, explorers == name) for name in np.unique(explorers)]
        if self._refuse and (wrong := next(filter(None, problems), None)):
            raise ConfigError(
                f"{wrong}; step {step} was not trained. Docs: explorers.md, Agreement; explorer.check_agreement=warn "
                "trains all the same"
            )

    def _judged(
        self, step: int, explorer: str, trained: np.ndarray, batch: SampleBatch, tokens: np.ndarray
    ) -> str | None:
        """Record an explorer's figures; return the error, None if they agree."""
        self._measured.add(explorer)
        here, there, count = trained[tokens], batch.log_probs[tokens].astype(np.float64), int(tokens.sum())
        mean, largest = float(np.abs(here - there).mean()), float(np.abs(here - there).max())
        self._event(
            AgreementEvent(step=step, explorer=explorer, tokens=count, mean=mean, largest=largest, bound=self._bound)
        )
        if mean <= self._bound:  # False for NaN, too
            return None
        text = (
            f"{explorer} and the trainer do not compute the same of version {step - 1}: their log-probs of {count} "
            f"tokens differ by {mean:.3g} on average and by {largest:.3g} at most, where {self._bound:.3g} on average "
            f"is allowed (mean log-prob {there.mean():.4g} at the explorer, {here.mean():.4g} at the trainer)"
        )
        if not self._refuse:
            self._event(FaultEvent(where=explorer, error=text))
        return text


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Return so many rows, spread evenly over all."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64))]


def agreement_bound(cfg: Config) -> float:
    """Return the largest mean difference of log-probs that dtypes explain, nats. A low temperature does not raise it:
    the logits differ more, but the sampled tokens are more certain.
    """
    dtypes = (cfg.sync.wire_dtype, cfg.explorer.dtype, backend_option(cfg.backend).compute_dtype)
    return max(_BOUNDS[dtype] for dtype in dtypes)
