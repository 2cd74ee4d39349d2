"""Group-relative advantages, and the filter of groups without a difference. Called by the driver once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import RunError
from trinity_sync.samples.batch import SampleBatch

Judge = Callable[[SampleBatch], NDArray[np.float64]]
"""Computes the advantages of a batch, one per sample: `group_advantages` with the settings of a run."""

_EPSILON = 1e-4
"""Added to the standard deviation, which may be close to 0."""


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """The penalty on long responses (Yu et al., "DAPO", 2025), as in verl's reward manager of that name: 0 up to
    `longest - buffer` tokens, then linear, and `penalty` at `longest`. `longest`: tokens of the longest response.
    `buffer`: tokens over which the penalty grows, at least 1. `penalty`: of a response of `longest` tokens.
    """

    longest: int
    buffer: int
    penalty: float

    def penalties(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the penalty of each response, by its length in tokens."""
        beyond = np.maximum(lengths - (self.longest - self.buffer), 0)
        return np.asarray(beyond / self.buffer * self.penalty, np.float64)


def group_advantages(
    batch: SampleBatch, normalise: bool = True, overlong: LengthPenalty | None = None
) -> NDArray[np.float64]:
    """Compute GRPO's advantages (Shao et al., "DeepSeekMath", 2024): ``(r - mean) / (std + 1e-4)`` within each group.

    The samples of a group have step and prompt in common, in any order. The standard deviation is unbiased, as in
    `torch.std` and verl. A group of equal rewards, or of one sample, gets exactly 0. A sample without a reward gets
    exactly 0 and does not count for its group.

    `normalise`: divide by the standard deviation; False gives ``r - mean`` (Liu et al., "Dr. GRPO", 2025). Returns
    float64 of shape (samples,), in the order of the batch.
    """
    if overlong is not None:
        batch = replace(batch, rewards=batch.rewards - overlong.penalties(batch.response_lengths))
    relative, judged, group = relative_rewards(batch)
    size = np.bincount(group, judged)
    deviation = np.where(judged, relative - (np.bincount(group, relative) / np.maximum(size, 1))[group], 0.0)
    if not normalise:
        return deviation
    variance = np.bincount(group, deviation**2) / np.maximum(size - 1, 1)
    scaled: NDArray[np.float64] = deviation / (np.sqrt(variance) + _EPSILON)[group]
    return scaled


def relative_rewards(batch: SampleBatch) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Subtract the reward of one sample of each group, so that equal rewards give exact zeros, without rounding.
    Returns for each sample the difference (0 without a reward), whether it has a reward, and the number of its group.
    """
    _, group = batch.groups()
    judged = ~np.isnan(batch.rewards)
    reference = np.zeros(int(group.max(initial=-1)) + 1)
    reference[group[judged][::-1]] = batch.rewards[judged][::-1]  # reversed: the first wins
    return np.where(judged, batch.rewards - reference[group], 0.0), judged, group


# DAPO's dynamic sampling (Yu et al., "DAPO", 2025): groups of equal rewards teach nothing, so they are left out, and
# further prompts are answered until the step has enough other groups.


KEYS = "algorithm.filter_groups"


@dataclass(frozen=True)
class DrawnGroups:
    """Everything drawn for a step that trains on a part of it. `samples`: of all groups, those of the batch included.
    `surplus`: other groups that are not in the batch.
    """

    samples: SampleBatch
    groups: int
    flat: int
    filled: int
    surplus: int


@dataclass(frozen=True)
class GroupChoice:
    """The choice among the groups drawn for a step. `used`: prompts used up; the next step answers those after them
    again.
    """

    batch: SampleBatch
    drawn: DrawnGroups
    used: int


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Leaves out groups without a difference.

    Attributes:
        metric: the value that must differ within a group, by verl's names: ``reward`` (the task's, less the penalty on
            long responses), ``score`` (the task's alone), ``acc`` (whether a response is right).
        batches: most rounds of `wanted` prompts for one step.
        fill: a step with too few groups takes flat ones; otherwise it ends the run.
        overlong: the penalty on long responses; None: there is none.
    """

    wanted: int
    metric: str
    batches: int
    fill: bool
    overlong: LengthPenalty | None = None

    @property
    def most(self) -> int:
        """Most prompts that are answered for a step."""
        return self.wanted * self.batches

    def differing(self, batch: SampleBatch) -> NDArray[np.bool_]:
        """Tell which groups of a batch have a difference, in the order of `SampleBatch.groups`. Samples that could not
        be judged do not count.
        """
        relative, _, group = relative_rewards(replace(batch, rewards=self._values(batch)))
        return np.asarray(np.bincount(group, relative != 0) > 0)

    def _values(self, batch: SampleBatch) -> NDArray[np.float64]:
        if self.metric == "acc":
            judged = np.array([not error for error in batch.errors], np.bool_)
            if np.isnan(batch.exact[judged]).any():
                raise RunError(
                    f"{KEYS}.metric is acc, but the task does not say whether a response is right; set it to reward, "
                    "or have the task say so (exact)"
                )
            return np.where(judged, batch.exact, np.nan)
        if self.metric == "reward" and self.overlong is not None:
            return batch.rewards - self.overlong.penalties(batch.response_lengths)
        return batch.rewards

    def choose(self, step: int, drawn: SampleBatch) -> GroupChoice | None:
        """Choose the first groups with a difference, in the order of their prompts. Returns None: there are too few,
        and more may be drawn.
        """
        _, group = drawn.groups()
        differs = self.differing(drawn)
        taken = np.flatnonzero(differs)[: self.wanted]
        missing = self.wanted - len(taken)
        if missing and len(differs) < self.most:
            return None
        self.check_filled(step, missing, len(differs))
        chosen = np.concatenate([taken, np.flatnonzero(~differs)[:missing]])
        found = int(differs.sum())
        return GroupChoice(
            drawn.take(np.flatnonzero(np.isin(group, chosen))),
            DrawnGroups(drawn, len(differs), len(differs) - found, missing, found - len(taken)),
            len(differs) if missing else int(taken[-1]) + 1,
        )

    def check_filled(self, step: int, missing: int, made: int) -> None:
        """Check that a step with too few groups may take flat ones."""
        if missing and not self.fill:
            raise RunError(
                f"of the {made} prompts that were answered for step {step}, {self.wanted - missing} have samples whose "
                f"{self.metric} differs, and a step needs {self.wanted}: the prompts are too hard or too easy. Raise "
                f"{KEYS}.max_num_gen_batches ({self.batches}), or set {KEYS}.on_shortage=fill to train on groups "
                "without a difference where there are no others"
            )
