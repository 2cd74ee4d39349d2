"""A whole tensor from pieces in files: what every reader makes of its format, and the checks that all formats share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from trinity_sync.errors import RunError
from trinity_sync.weights.shards import describe, listed, whole
from trinity_sync.weights.tensors import from_torch, to_torch


class WeightsError(RunError):
    """Files of a checkpoint are missing, damaged or contradict each other; the message names the file and the fault."""


def loading_fault(error: Exception) -> str:
    """Return what torch's weights-only loader says about a file, without the advice around it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    telling = next((line for line in lines if "WeightsUnpickler error:" in line), lines[0])
    return telling.rpartition("WeightsUnpickler error:")[2].partition(" Please use ")[0].strip()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: safetensors name, such as ``"BF16"``.
        shape: its whole shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return describe(whole("", self.dtype, self.shape))


class Source(Protocol):
    """A tensor that can be read."""

    @property
    def info(self) -> TensorInfo:
        """Known without reading."""
        ...

    def read(self) -> torch.Tensor:
        """Read the whole tensor to the CPU. It may lie in a mapped file: do not write to it."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, in one file.

    Attributes:
        file: where it is, for messages.
        start: first index in each dimension.
        sizes: extent in each dimension.
        load: gives the box: elements in order, of the tensor's dtype, of any shape.
    """

    file: Path
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def stop(self) -> tuple[int, ...]:
        """Last index in each dimension, plus one."""
        return tuple(start + size for start, size in zip(self.start, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor that is put together from pieces when it is read.

    Attributes:
        name: the tensor's name, for messages.
        info: the tensor's dtype and shape.
        grid: the shape in which the pieces' boxes are given; it has as many elements as the tensor.
        pieces: boxes that cover the grid exactly; see `assembled`.
    """

    name: str
    info: TensorInfo
    grid: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> torch.Tensor:
        """Read the whole tensor, a new one unless it is a single piece.

        Raises:
            WeightsError: a piece does not have the dtype or the number of elements that was announced.
        """
        if len(self.pieces) == 1:
            return self._box(self.pieces[0]).reshape(self.info.shape)
        out = torch.empty(self.grid, dtype=to_torch(self.info.dtype))
        for piece in self.pieces:
            box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
            out[box].copy_(self._box(piece))
        return out.reshape(self.info.shape)

    def _box(self, piece: Piece) -> torch.Tensor:
        found = piece.load()
        if from_torch(found.dtype) != self.info.dtype or found.numel() != prod(piece.sizes):
            raise WeightsError(
                f"{piece.file} holds {from_torch(found.dtype)} {list(found.shape)} of {self.name}; "
                f"{self.info.dtype} {list(piece.sizes)} was announced"
            )
        return found.reshape(piece.sizes)


def assembled(name: str, info: TensorInfo, pieces: Sequence[Piece], *, grid: Sequence[int] | None = None) -> Assembled:
    """Make a tensor of pieces, which have to cover it exactly once. Of equal boxes (replicas) the first is taken.

    Args:
        name: the tensor's name, for messages.
        info: the tensor's dtype and shape.
        pieces: boxes with their files.
        grid: the shape in which the boxes are given; None: the tensor's own.

    Raises:
        WeightsError: a piece leaves the tensor, two overlap, or elements are in none.
    """
    shape = tuple(info.shape if grid is None else grid)
    chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
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
    if clash := _overlap(kept, shape):
        raise WeightsError(f"{clash[0].file} and {clash[1].file} hold the same elements of {name}")
    missing = prod(shape) - sum(prod(piece.sizes) for piece in kept)
    if missing:
        files = listed(sorted({str(piece.file) for piece in pieces})) or "no file"
        raise WeightsError(f"{missing} of the {prod(shape)} elements of {name} are missing; it is in {files}")
    return Assembled(name, info, shape, tuple(kept))


def _overlap(pieces: Sequence[Piece], shape: tuple[int, ...]) -> tuple[Piece, Piece] | None:
    """Find two pieces that overlap. Boxes that are cut along one dimension, the common case, are compared with the
    next.
    """
    cut = {
        dim
        for piece in pieces
        for dim, (size, extent) in enumerate(zip(piece.sizes, shape, strict=True))
        if size != extent
    }
    if len(cut) <= 1:
        pairs = list(pairwise(pieces))
    else:
        pairs = [(one, other) for at, one in enumerate(pieces) for other in pieces[at + 1 :]]
    for one, other in pairs:
        spans = zip(one.start, one.stop, other.start, other.stop, strict=True)
        if all(start < other_stop and other_start < stop for start, stop, other_start, other_stop in spans):
            return one, other
    return None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that lies in another one, such as a single expert in a layer's experts that are stored as one.

    Attributes:
        base: the stored tensor, contiguous.
        shape, stride, offset: where the view lies in it, in elements.
    """

    base: Source
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def info(self) -> TensorInfo:
        """The view's dtype and shape."""
        return TensorInfo(self.base.info.dtype, self.shape)

    def read(self) -> torch.Tensor:
        return self.base.read().contiguous().as_strided(self.shape, self.stride, self.offset).contiguous()
