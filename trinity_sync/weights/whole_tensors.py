"""Where each tensor of a version lies whole: in the part that holds all of it as it is to be, or, where none does, in a
further segment in which it is put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.shards import Shard, whole
from trinity_sync.weights.tensors import byte_tensor, from_torch, to_torch

TOGETHER = "together"
"""What the part of the further segment is called."""

_BUCKET_BYTES = 4 << 20


class WholeTensors:
    """Where to find the tensors of versions: worked out once, as layouts stay and versions come.

    Args:
        layouts: of all parts; together they hold every tensor once (`check_cover`).
        dtypes: Hugging Face name -> the dtype in which the tensor is to be, which its published one can be cast to.

    Attributes:
        together: the layout of the further segment: of tensors that are spread over parts, or are to be cast. It does
            not depend on the order of the layouts.
    """

    def __init__(self, layouts: Sequence[PartLayout], dtypes: Mapping[str, torch.dtype]) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # the number of the segment, and the first byte in it
        for number, layout in enumerate(layouts):
            for shard, offset in layout.entries:
                shapes[shard.name] = shard.shape
                if _is_whole(shard, dtypes[shard.name]):
                    self._places[shard.name] = number, offset
        spread = sorted(shapes.keys() - self._places.keys())
        shards = [whole(name, from_torch(dtypes[name]), shapes[name]) for name in spread]
        self.together = PartLayout.build(TOGETHER, shards, _BUCKET_BYTES)
        for shard, offset in self.together.entries:
            self._places[shard.name] = len(layouts), offset
        self._layouts = [*layouts, self.together]
        self._kinds = {name: (dtypes[name], shape) for name, shape in shapes.items()}

    def views(self, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        """The tensors, contiguous, without a copy, by name.

        Args:
            segments: in the order of the layouts, the further one last; each at least ``layout.nbytes``.

        Returns:
            Views. They keep the segments from being unmapped, and are to be written to where their segment may be.

        Raises:
            LayoutError: a segment is too small.
        """
        lying = [byte_tensor(layout.view(one)) for layout, one in zip(self._layouts, segments, strict=True)]
        found = {}
        for name, (number, offset) in self._places.items():
            dtype, shape = self._kinds[name]
            nbytes = prod(shape) * dtype.itemsize
            found[name] = lying[number][offset : offset + nbytes].view(dtype).view(shape)
        return found


def _is_whole(shard: Shard, dtype: torch.dtype) -> bool:
    """Whether a shard is all of its tensor, row by row and in this dtype."""
    return to_torch(shard.dtype) == dtype and len(shard.rects) == 1 and shard.numel_local == prod(shard.shape)
