"""The divergence from a reference that is taken from rewards (`algorithm.kl.in_reward`). Runs in the driver: the ranks
measure it, and compute the coefficient of the next step by verl's controller, as the driver imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_sync.config.training_schema import InRewardConfig
from trinity_sync.errors import RunError
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.trainer.group import TrainerGroup

if TYPE_CHECKING:
    from ray import ObjectRef

_COEFFICIENT = "reward_kl_coeff"


class RewardPenalty:
    """Takes the divergence of each response from its reward.

    Args:
        trainer: the group of ranks, initialised.
        config: how much of it, and how that changes.
        timeout_s: limit of a measurement, seconds.
        saved: what `state` gave when the checkpoint was saved with which the run begins; None: nothing.

    Attributes:
        coefficient: of the next step.
    """

    def __init__(
        self, trainer: TrainerGroup, config: InRewardConfig, timeout_s: float, saved: Mapping[str, Any] | None = None
    ) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._adapts = config.type == "adaptive"
        self.coefficient = (saved or {}).get(_COEFFICIENT, config.coeff) if self._adapts else config.coeff

    def apply(
        self, step: int, batch: SampleBatch, shared: ObjectRef[SampleBatch]
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the samples of a step with the rewards that advantages are made of, and metrics by verl's names:
        ``actor/reward_kl_penalty`` (the divergence per token, nats; the mean over responses) and
        ``actor/reward_kl_penalty_coeff`` (what it was multiplied by). One that adapts changes for the next step.

        Args:
            step: the trainer's global step.
            batch: its samples.
            shared: the same, as the ranks are given it.
        """
        sums, means = np.full(len(batch), np.nan), np.full(len(batch), np.nan, np.float32)
        for found in self._trainer.all(lambda rank: rank.divergences(step, shared), self._timeout_s):
            if found is not None:  # with pipeline stages only ranks of the last one have some
                sums[found.rows], means[found.rows] = found.sums, found.means
        if not (np.isfinite(sums).all() and np.isfinite(means).all()):
            raise RunError(
                f"the divergence of step {step} from the reference is not finite; checkpoints of before are unharmed"
            )
        used, mean = self.coefficient, float(means.mean())
        if self._adapts:
            call = self._trainer.ranks[0].adapted(used, mean, len(batch))
            self.coefficient = call.result(self._timeout_s)
        judged = replace(batch, rewards=batch.rewards - used * sums)
        return judged, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": used}

    def state(self) -> dict[str, object]:
        """Return what a run that goes on needs to know, as JSON values."""
        return {_COEFFICIENT: self.coefficient} if self._adapts else {}
