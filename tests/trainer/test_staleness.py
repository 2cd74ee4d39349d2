"""What the loops do with samples of old versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.samples.helpers import sample
from trinity_sync.errors import RunError
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.trainer.steps import Steps


def lags(versions: list[int], step: int, most: int) -> dict[str, float]:
    samples = [sample(prompt=prompt, version=(0, version)) for prompt, version in enumerate(versions)]
    loop: Any = SimpleNamespace(settings=SimpleNamespace(max_staleness=most))
    return Steps.staleness(loop, SampleBatch.of(samples), step)


def test_a_batch_within_the_bound_gives_its_lags() -> None:
    assert lags([3, 4, 2, 4], 5, 2) == {"staleness/mean": 0.75, "staleness/max": 2.0}


def test_a_batch_with_one_sample_beyond_the_bound_is_refused() -> None:
    with pytest.raises(RunError, match=r"samples for step 5 are 2 steps stale; sync.max_staleness=1"):
        lags([4, 2, 3], 5, 1)
