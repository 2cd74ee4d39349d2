"""Tensors assembled from pieces in files, and the checks that all formats share. The readers of the formats use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from trinity_sync.errors import RunError
from trinity_sync.weights.shards import describe, listed, whole
from trinity_sync.weights.tensors import from_torch, to_torch


class WeightsError(RunError):
    """Files of a checkpoint are missing, damaged or contradictory; the message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype (safetensors name, such as ``"BF16"``) and whole shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return describe(whole("", self.dtype, self.shape))


class TensorReader(Protocol):
    """A tensor that can be read."""

    @property
    def info(self) -> TensorInfo:
        """Dtype and shape, without reading."""

    def read(self) -> torch.Tensor:
        """Read the whole tensor to the CPU. Do not write to it: it may be a mapped file."""


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a tensor, in one file."""

    file: Path  # its path, for messages
    start: tuple[int, ...]  # first index in each dimension
    sizes: tuple[int, ...]  # extent in each dimension
    load: Callable[[], torch.Tensor]  # reads the box: elements in order, of the tensor's dtype, of any shape

    @property
    def stop(self) -> tuple[int, ...]:
        """Last index in each dimension, plus one."""
        return tuple(start + size for start, size in zip(self.start, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A tensor that is assembled from pieces when it is read."""

    name: str  # the tensor's name, for messages
    info: TensorInfo  # its dtype and shape
    grid: tuple[int, ...]  # the shape in which the pieces' boxes are given, with as many elements as the tensor
    pieces: tuple[FileBox, ...]  # boxes that cover the grid exactly; see `assembled`

    def read(self) -> torch.Tensor:
        """Read the whole tensor; it is a copy unless it has one piece. Raises WeightsError if a piece has another dtype
        or number of elements than announced.
        """
        if len(self.pieces) == 1:
            return self._box(self.pieces[0]).reshape(self.info.shape)
        out = torch.empty(self.grid, dtype=to_torch(self.info.dtype))
        for piece in self.pieces:
            box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
            out[box].copy_(self._box(piece))
        return out.reshape(self.info.shape)

    def _box(self, piece: FileBox) -> torch.Tensor:
        found = piece.load()
        if from_torch(found.dtype) != self.info.dtype or found.numel() != prod(piece.sizes):
            raise WeightsError(
                f"{piece.file} holds {from_torch(found.dtype)} {list(found.shape)} of {self.name}; "
                f"{self.info.dtype} {list(piece.sizes)} was announced"
            )
        return found.reshape(piece.sizes)


def assembled(
    name: str, info: TensorInfo, pieces: Sequence[FileBox], *, grid: Sequence[int] | None = None
) -> AssembledTensor:
    """Make a tensor of pieces, which have to cover it exactly once; of equal boxes (replicas) the first is used. Raises
    WeightsError if a piece is outside the tensor, two overlap, or an element is in none. `info`: its dtype and shape.
    `grid`: the shape in which the boxes are given; None: the tensor's own.
    """
    shape = tuple(info.shape if grid is None else grid)
    chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], FileBox] = {}
    for piece in pieces:
        inside = len(piece.start) == len(shape) and all(
            0 <= start <= stop <= extent for start, stop, extent in zip(piece.start, piece.stop, shape, strict=True)
        )
        if not inside:
            raise WeightsError(
                f"{piece.file} holds {name} from {list(piece.start)} to {list(piece.stop)}, outside of {list(shape)}"
            )
        if prod(piece.sizes):
            chosen.setdefault((piece.start, piece.sizes), piece)
    kept = sorted(chosen.values(), key=lambda piece: piece.start)
    fault = _first_fault(kept, shape)
    if fault is None:
        return AssembledTensor(name, info, shape, tuple(kept))
    held_by = [piece.file for piece in kept if _holds(piece, fault)]
    if len(held_by) > 1:
        raise WeightsError(f"{held_by[0]} and {held_by[1]} hold the same elements of {name}")
    files = listed(sorted({str(piece.file) for piece in pieces})) or "no file"
    raise WeightsError(f"elements of {name} are missing, the first of {list(shape)} at {list(fault)}; it is in {files}")


def _first_fault(pieces: Sequence[FileBox], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the first element, in row-major order, that is not in exactly one piece; None: all are.

    It takes n log n for boxes of any cut: a model with experts has a tensor of 100 000 pieces. The number of pieces
    that hold an element is a sum of boxes, whose differences along all dimensions are non-zero at corners of boxes
    only, and determine it. Where they are those of the whole box everywhere, each element is held once; otherwise the
    first place where they differ is the first fault.
    """
    boxes = [((0,) * len(shape), shape), *((piece.start, piece.stop) for piece in pieces)]
    ends = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, len(shape))
    sides = np.array([*product((0, 1), repeat=len(shape))], dtype=np.intp).reshape(2 ** len(shape), len(shape))
    corners = ends[:, sides, np.arange(len(shape))].reshape(len(boxes) * len(sides), len(shape))
    weights = np.repeat([-1, *(1 for _ in pieces)], len(sides)) * np.tile((-1) ** sides.sum(1), len(boxes))
    order = np.lexsort([weights, *corners.T[::-1]])
    corners, weights = corners[order], weights[order]
    begins = np.flatnonzero(np.append(True, (corners[1:] != corners[:-1]).any(1)))
    faults = begins[np.add.reduceat(weights, begins) != 0]
    return tuple(corners[faults[0]].tolist()) if len(faults) else None


def _holds(piece: FileBox, element: Sequence[int]) -> bool:
    return all(start <= at < stop for start, at, stop in zip(piece.start, element, piece.stop, strict=True))


@dataclass(frozen=True, slots=True)
class View:
    """A view of a stored tensor, such as one expert in a layer's experts that are stored as one. `base`: the stored
    tensor, contiguous. `shape`, `stride`, `offset`: of the view, in elements.
    """

    base: TensorReader
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.base.info.dtype, self.shape)

    def read(self) -> torch.Tensor:
        return self.base.read().contiguous().as_strided(self.shape, self.stride, self.offset).contiguous()


# Stand-ins for classes in checkpoints' pickles: they keep the fields, and run nothing.


class Record:
    """An object of a class that is not loaded: its fields as attributes; a state that is not a set of fields as
    ``state``.
    """

    def __new__(cls, *args: object) -> Record:
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return any field of the pickle."""

    def __setstate__(self, state: object) -> None:
        # Dataclasses with slots are pickled as a pair of their (empty) dict and their slots.
        fields = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in fields):
            for part in fields:
                vars(self).update(part if isinstance(part, dict) else {})
        else:
            self.state = state
