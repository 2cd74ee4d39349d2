"""Tensors that lie one after another in memory, as one: models of many small tensors would spend their time between the
copies.
"""

from __future__ import annotations

import torch


class Stretch:
    """Tensors that follow each other in one storage, without a gap.

    Args:
        first: the one that they begin with; on any device. It is held, so all that lies in its storage is of it.
    """

    __slots__ = ("_end", "_first", "_numel", "_room")

    def __init__(self, first: torch.Tensor) -> None:
        self._first = first
        self._numel = first.numel()
        self._end = first.data_ptr() + first.nbytes if first.is_contiguous() else None
        self._room: int | None = None

    def take(self, tensor: torch.Tensor) -> bool:
        """Go on with a tensor of at least one element; returns whether it follows."""
        first = self._first
        if tensor.data_ptr() != self._end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return False
        if self._room is None:
            storage = first.untyped_storage()
            self._room = storage.data_ptr() + storage.nbytes()
        if self._end + tensor.nbytes > self._room:  # by chance, in a storage of its own
            return False
        self._end += tensor.nbytes
        self._numel += tensor.numel()
        return True

    def elements(self) -> torch.Tensor:
        """The first tensor, if no other followed; else a flat one of the elements of all, in its storage."""
        one = self._first
        return one if one.numel() == self._numel else one.as_strided((self._numel,), (1,))
