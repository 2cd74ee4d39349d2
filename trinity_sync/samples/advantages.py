"""Group-relative advantages: each sample judged against the others of its prompt. Called by the driver once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.batch import SampleBatch

Judge = Callable[[SampleBatch], NDArray[np.float64]]
"""Makes the advantages of a batch, one per sample: `group_advantages` with the settings of a run."""

#: Added to the standard deviation, which may be almost nothing.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What is taken from the rewards of long responses (Yu et al., "DAPO", 2025), as verl's reward manager of that name
    does it: nothing up to `longest - buffer` tokens, from there evenly more, and `penalty` at `longest`.

    Attributes:
        longest: tokens of the longest response.
        buffer: tokens over which the penalty grows, at least 1.
        penalty: of a response of `longest` tokens.
    """

    longest: int
    buffer: int
    penalty: float

    def penalties(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what is taken from the rewards of responses of so many tokens."""
        beyond = np.maximum(lengths - (self.longest - self.buffer), 0)
        return np.asarray(beyond / self.buffer * self.penalty, np.float64)


def group_advantages(
    batch: SampleBatch, normalise: bool = True, overlong: Overlong | None = None
) -> NDArray[np.float64]:
    """Compute GRPO's advantages (Shao et al., "DeepSeekMath", 2024): ``(r - mean) / (std + 1e-4)`` within each group.

    A group is what has step and prompt in common, in whatever order the batch has it. The standard deviation is the
    unbiased one, as `torch.std` and verl have it. A group whose rewards are all equal gets exactly 0, and so does a
    group of one. A sample without a reward gets exactly 0, and the others of its group what they would get without it.

    Args:
        batch: samples with rewards that are finite, or NaN where there is none.
        normalise: divide by the standard deviation; False gives ``r - mean`` (Liu et al., "Dr. GRPO", 2025).
        overlong: rewards bear this penalty; None: none. The rewards of the batch stay as they are.

    Returns:
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
    """Measure rewards from that of one member of the group: so equal rewards are exact zeros, whatever sums round to.

    Returns:
        For each sample the reward from there on (0 where it has none), whether it has one, and the number of its group.
    """
    _, group = batch.groups()
    judged = ~np.isnan(batch.rewards)
    reference = np.zeros(int(group.max(initial=-1)) + 1)
    reference[group[judged][::-1]] = batch.rewards[judged][::-1]  # of several the last one stays, which is the first
    return np.where(judged, batch.rewards - reference[group], 0.0), judged, group
