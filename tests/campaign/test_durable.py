"""What has to be there after a power cut, on the simulated disk."""

from __future__ import annotations

import random

import pytest

from tests.campaign.conftest import PLACE
from tests.campaign.filesystem import FileSystem
from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder.leases import pin, pinned
from trinity_sync.host.durable import make_folder


@pytest.mark.parametrize("there", ["", "run", "run/checkpoints"])
@pytest.mark.parametrize("seed", range(10))
def test_a_folder_that_was_made_is_there_whoever_made_what_is_above(disk: FileSystem, seed: int, there: str) -> None:
    (PLACE / there).mkdir(parents=True, exist_ok=True)  # by somebody who did not care
    make_folder(PLACE / "run/checkpoints")
    disk.lose_power(random.Random(seed))
    assert (PLACE / "run/checkpoints").is_dir()


@pytest.mark.parametrize("seed", range(10))
def test_the_first_pin_of_a_folder_stays(disk: FileSystem, seed: int) -> None:
    commit(PLACE, 3)
    pin(PLACE, 3)
    disk.lose_power(random.Random(seed))
    assert pinned(PLACE) == {(3, 0)}
