"""An adapter's factors are gathered where all ranks have them, by those too that hold nothing of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity_sync.backends import adapters
from trinity_sync.backends.adapters import GatheredTensors, HeldSources
from trinity_sync.weights.saved_views import SavedTensor

OFFLOADED = torch.device("cpu")


def test_a_replica_takes_part_where_the_offloaded_tensors_of_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks the other one holds the tensor, in the CPU's memory, although there is a GPU."""
    sent: list[torch.Tensor] = []

    def all_gather_object(spans: list[Any], mine: Any) -> None:
        spans[:] = [[("a", 0, 6)], mine]

    def all_gather(gathered: list[torch.Tensor], flat: torch.Tensor) -> None:
        sent.append(flat)
        gathered[0].copy_(torch.arange(6.0))

    group = SimpleNamespace(
        get_rank=lambda: 1, get_world_size=lambda: 2, all_gather_object=all_gather_object, all_gather=all_gather
    )
    monkeypatch.setattr(adapters, "dist", group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    saved = {"a": SavedTensor.as_held("F32", (2, 3), "a")}
    gathered = GatheredTensors(HeldSources([], keep=False), saved, lambda: OFFLOADED)
    assert gathered.now()["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [tensor.device for tensor in sent] == [OFFLOADED]
