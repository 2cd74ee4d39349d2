"""Memory that is lent, and lent again once nobody refers to it any more: what is new has to be brought in by the kernel
page by page, which costs more than copying to it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch


class Loans:
    """Memory of the CPU. What was lent may outlive this object."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def lend(self, nbytes: int) -> torch.Tensor:
        """So many bytes, uint8, of any content; they come back when the last tensor that refers to them is gone."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        free = self._free[nbytes]
        memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        view = memory.numpy().data
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)
