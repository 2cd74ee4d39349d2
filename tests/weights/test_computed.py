"""Sources that are computed when they are staged."""

from __future__ import annotations

import pytest
import torch

from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.staging import ComputedTensor, StageError, stage


class Sum:
    """Counts how often it is computed."""

    def __init__(self) -> None:
        self.times = 0

    def source(self, elements: int = 4) -> ComputedTensor:
        return ComputedTensor(torch.float32, torch.device("cpu"), elements, self._compute)

    def _compute(self) -> torch.Tensor:
        self.times += 1
        return torch.full((2, 2), 1.5)


def layout() -> PartLayout:
    return PartLayout.build("rank-00000", [whole("held", "BF16", (2, 2)), whole("sum", "BF16", (2, 2))], 1024)


def test_it_is_computed_once_and_cast_like_any_other() -> None:
    segment, counted = bytearray(layout().nbytes), Sum()
    stage(layout(), {"held": torch.full((2, 2), 1.5), "sum": counted.source()}, segment)
    assert counted.times == 1
    assert (
        bytes(segment[-8:])
        == bytes(segment[:8])
        == torch.full((4,), 1.5).bfloat16().view(torch.uint8).numpy().tobytes()
    )


def test_nothing_is_computed_for_what_is_refused() -> None:
    counted = Sum()
    with pytest.raises(StageError, match=r"held \(no source\), sum \(3 elements, the layout has 4\)"):
        stage(layout(), {"sum": counted.source(3)}, bytearray(layout().nbytes))
    assert counted.times == 0
