"""The simulated disk, for tests of single pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign.filesystem import FileSystem
from tests.campaign.patches import installed

PLACE = Path("/sim/place")


@pytest.fixture
def disk() -> Iterator[FileSystem]:
    system = FileSystem()
    with installed(system, pid=lambda: 1, token=lambda nbytes=4: "0" * nbytes):
        PLACE.mkdir()
        system.make_durable()
        yield system
