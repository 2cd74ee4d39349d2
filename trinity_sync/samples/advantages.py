"""Group-relative advantages: each sample judged against the others of its prompt. Called by the driver once a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.batch import SampleBatch

#: Added to the standard deviation, which may be almost nothing.
_EPSILON = 1e-4


def group_advantages(batch: SampleBatch, normalise: bool = True) -> NDArray[np.float64]:
    """Compute GRPO's advantages (Shao et al., "DeepSeekMath", 2024): ``(r - mean) / (std + 1e-4)`` within each group.

    A group is what has step and prompt in common, in whatever order the batch has it. The standard deviation is the
    unbiased one, as `torch.std` and verl have it. A group whose rewards are all equal gets exactly 0, and so does a
    group of one.

    Args:
        batch: samples with finite rewards.
        normalise: divide by the standard deviation; False gives ``r - mean`` (Liu et al., "Dr. GRPO", 2025).

    Returns:
        float64 of shape (samples,), in the order of the batch.
    """
    firsts, group = batch.groups()
    size = np.bincount(group)
    # measured from one member's reward, equal rewards are exact zeros, whatever their sum would round to
    relative = batch.rewards - batch.rewards[firsts][group]
    deviation = relative - (np.bincount(group, relative) / size)[group]
    if not normalise:
        return deviation
    variance = np.bincount(group, deviation**2) / np.maximum(size - 1, 1)
    scaled: NDArray[np.float64] = deviation / (np.sqrt(variance) + _EPSILON)[group]
    return scaled
