"""Sources of a version that are computed when they are copied, so that not all of them are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that is not there yet. What is looked at before a copy is known of it, under a tensor's names.

    Attributes:
        dtype, device, elements: of what `compute` gives.
        compute: gives it, a new tensor each time, in the device's current stream.
    """

    dtype: torch.dtype
    device: torch.device
    elements: int
    compute: Callable[[], torch.Tensor]

    @property
    def is_cuda(self) -> bool:
        """Whether it will be on a GPU."""
        return self.device.type == "cuda"

    def numel(self) -> int:
        """Return its number of elements."""
        return self.elements


Sources: TypeAlias = Mapping[str, torch.Tensor | Computed]
"""What a rank stages, by tensor name."""


def made(source: torch.Tensor | Computed) -> torch.Tensor:
    """Return the tensor itself."""
    return source.compute() if isinstance(source, Computed) else source
