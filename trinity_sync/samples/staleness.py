"""How old a sample is when it is trained on, and whether that is allowed. Called by the driver before each update."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import RunError


def staleness(version_step: int, update_step: int) -> int:
    """Steps completed before an update, minus the step whose version made the sample; 0 is on-policy.

    Args:
        version_step: step of the sample's version.
        update_step: the step that trains on the sample.

    Raises:
        ValueError: the version cannot exist before the update.
    """
    if version_step >= update_step:
        raise ValueError(f"version {version_step} cannot exist before the update of step {update_step}")
    return update_step - 1 - version_step


def check_staleness(version_steps: NDArray[np.int64], update_step: int, max_staleness: int) -> NDArray[np.int64]:
    """Staleness of each sample of a batch.

    Args:
        version_steps: int64 of shape (samples,); the step of each sample's version.
        update_step: the step that trains on the samples.
        max_staleness: the largest staleness that is allowed.

    Returns:
        int64 of shape (samples,).

    Raises:
        RunError: a sample is staler than that.
        ValueError: a version cannot exist before the update.
    """
    versions, sample_of = np.unique(version_steps, return_inverse=True)
    lags = np.array([staleness(int(step), update_step) for step in versions], np.int64)
    if lags.size and lags[0] > max_staleness:
        raise RunError(
            f"samples for step {update_step} are {lags[0]} steps stale: they come from version {versions[0]}, and "
            f"sync.max_staleness is {max_staleness}"
        )
    return lags[sample_of]
