from __future__ import annotations

import pytest

from trinity_sync.samples.batch import staleness


@pytest.mark.parametrize(("version", "update", "lag"), [(0, 1, 0), (0, 2, 1), (4, 5, 0), (4, 8, 3)])
def test_staleness_counts_the_steps_between(version: int, update: int, lag: int) -> None:
    assert staleness(version, update) == lag


@pytest.mark.parametrize("version", [5, 6])
def test_a_version_of_the_update_or_later_is_impossible(version: int) -> None:
    with pytest.raises(ValueError, match=f"version {version} cannot exist before the update of step 5"):
        staleness(version, 5)
