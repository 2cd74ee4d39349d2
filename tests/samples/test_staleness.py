from __future__ import annotations

import numpy as np
import pytest

from trinity_sync.errors import RunError
from trinity_sync.samples.staleness import check_staleness, staleness


@pytest.mark.parametrize(("version", "update", "lag"), [(0, 1, 0), (0, 2, 1), (4, 5, 0), (4, 8, 3)])
def test_staleness_counts_the_steps_between(version: int, update: int, lag: int) -> None:
    assert staleness(version, update) == lag


@pytest.mark.parametrize("version", [5, 6])
def test_a_version_of_the_update_or_later_is_impossible(version: int) -> None:
    with pytest.raises(ValueError, match=f"version {version} cannot exist before the update of step 5"):
        staleness(version, 5)


def test_a_batch_within_the_bound_gives_its_lags() -> None:
    assert check_staleness(np.array([3, 4, 2, 4]), 5, 2).tolist() == [1, 0, 2, 0]


def test_a_batch_with_one_sample_beyond_the_bound_is_refused() -> None:
    with pytest.raises(
        RunError, match=r"step 5 are 2 steps stale: they come from version 2, and sync.max_staleness is 1"
    ):
        check_staleness(np.array([4, 2, 3]), 5, 1)
