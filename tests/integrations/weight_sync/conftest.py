"""Members of a weight sync, for the tests without verl's manager; Ray for those with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import local_ray

cluster = local_ray.cluster


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make members of a weight sync (`Members`); those of mode checkpoint write to ``versions``."""
    from tests.integrations.weight_sync.sync_members import Members

    made: list[Members] = []

    def members(mode: str, **more: Any) -> Members:
        made.append(Members(mode, tmp_path / "versions", **more))
        return made[-1]

    yield members
    for one in made:
        one.finalize()
        one.pool.shutdown()
