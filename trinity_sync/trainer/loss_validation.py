"""Validation of a supervised run: the loss of rows that are not learnt, measured by the trainer. In the driver."""

from __future__ import annotations

from collections.abc import Callable

import ray

from trinity_sync.errors import RunError
from trinity_sync.samples.batch import PairBatch
from trinity_sync.samples.excerpt import Line
from trinity_sync.samples.validation import ValidationTimes
from trinity_sync.trainer.group import TrainerGroup


class LossValidation:
    """Has the ranks measure the loss of a file.

    Args:
        batches: makes them: all that is measured, in pieces, each at least one pair.
        trainer: the group of ranks.
        times: when it takes place.
        timeout_s: limit of a piece, seconds.

    Attributes:
        at_start: whether what the run begins with is validated.
        failure: empty: nothing is judged.
    """

    failure = ""

    def __init__(
        self,
        batches: Callable[[], list[PairBatch]],
        trainer: TrainerGroup,
        times: ValidationTimes,
        timeout_s: float,
    ) -> None:
        self._make_batches = batches
        self._batches: list[PairBatch] | None = None
        self._trainer = trainer
        self._times = times
        self._timeout_s = timeout_s
        self.at_start = times.at_start

    def due(self, step: int) -> bool:
        """Tell whether the weights after a step are validated."""
        return self._times.due(step)

    def run(self, step: int) -> dict[str, float]:
        """Measure the loss of the weights that the ranks have: ``val/loss``, the mean over all tokens that would be
        learnt, in nats; ``val/tokens`` and ``val/rows``, how many these are and of how many rows.

        Raises:
            RunError: a row cannot be learnt, or a rank has measured something else than it was asked for.
        """
        if self._batches is None:
            self._batches = self._make_batches()
        measured = [self._measured(step, batch) for batch in self._batches]
        tokens = sum(batch.token_count for batch in self._batches)
        rows = sum(map(len, self._batches))
        return {"val/loss": sum(measured) / tokens, "val/tokens": float(tokens), "val/rows": float(rows)}

    def excerpt(self, groups: int) -> list[Line]:
        """Write out nothing: nothing is sampled."""
        return []

    def _measured(self, step: int, batch: PairBatch) -> float:
        shared = ray.put(batch)
        found = self._trainer.all(lambda rank: rank.measure_loss(shared), self._timeout_s)
        shares = {one.share: one for one in found if one is not None}
        tokens = sum(one.tokens for one in shares.values())
        if tokens != batch.token_count:
            raise RunError(f"the validation of step {step} has {batch.token_count} tokens, the ranks measured {tokens}")
        return sum(shares[number].loss for number in sorted(shares))
