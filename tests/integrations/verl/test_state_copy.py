"""A state that is copied and written keeps none of the tensors that it was copied from."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_sync.integrations.verl.manager import StateCopy

LIMIT = 30.0


def taken(lazily: bool) -> tuple[StateCopy, Any]:
    """The copy of a state of which nobody else holds the tensor, and what tells whether that is alive."""
    live, copy = {"model.pt": {"weight": torch.ones(1000)}}, StateCopy()
    copy.take(live, "the state of step 3", lazily=lazily)
    return copy, weakref.ref(live["model.pt"]["weight"])


@pytest.mark.parametrize("lazily", [False, True])
def test_what_an_engine_moves_elsewhere_after_a_save_is_freed(tmp_path: Path, lazily: bool) -> None:
    copy, weight = taken(lazily)
    write = copy.writer("model.pt", tmp_path / "actor", tmp_path, durable=False, timeout_s=LIMIT)
    gc.collect(1)
    assert weight() is not None
    ((name, _, _),) = write()
    gc.collect(1)
    assert weight() is None
    assert torch.load(tmp_path / name)["weight"].equal(torch.ones(1000))


def test_a_writer_that_is_not_called_keeps_nothing_when_that_is_told(tmp_path: Path) -> None:
    copy, weight = taken(lazily=False)
    write = copy.writer("model.pt", tmp_path, tmp_path, durable=False, timeout_s=LIMIT)
    copy.let_go("model.pt")
    gc.collect(1)
    assert weight() is None
    del write
