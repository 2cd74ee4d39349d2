"""The snapshot: one rank's live tensors copied into its segment in wire dtype. Called by the trainer's worker.

This is the only thing for which the trainer stands still, so it does nothing else: one pass over the sources, casting
on the way, no digest. On a GPU the cast runs on the device, where it is cheapest and halves what crosses the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch

from trinity_sync.errors import RunError
from trinity_sync.weights.computed import Computed, Sources, made
from trinity_sync.weights.dtypes import itemsize
from trinity_sync.weights.layout import PartLayout, Segment
from trinity_sync.weights.saved_views import row_major
from trinity_sync.weights.shards import listed
from trinity_sync.weights.stretch import Stretch
from trinity_sync.weights.tensors import byte_tensor, castable, from_torch, to_torch

_CHUNK_BYTES = 32 << 20
"""In wire dtype, per cast on a device: bounds the extra device memory to about two of these."""
_TOGETHER_BYTES = 256 << 20
"""Sources on a CPU that are copied in one call, at most, but for the last one."""
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegisterPortable (all contexts), cudaHostRegisterReadOnly


_strides = lru_cache(1024)(row_major)


class StageError(RunError):
    """A source is missing or does not have the elements that the layout promises."""


def stage(layout: PartLayout, sources: Sources, segment: Segment) -> None:
    """Copy each shard's source into the segment, cast to the shard's dtype. All is there when this returns.

    CUDA sources are cast on their device in bounded chunks and copied on a side stream; copies overlap with casts if
    the segment is page-locked (`pin_segment`). They see what was enqueued on the current stream before the call.
    What is computed is computed on the side stream.

    Args:
        layout: the layout of this rank's part.
        sources: by tensor name, on any device, of any shape and strides; a source's elements in its own order are the
            shard's local elements. What is computed is computed once. Tensors that are not in the layout are left
            out.
        segment: writable, at least ``layout.nbytes``.

    Raises:
        StageError: names the sources that are missing, wrong in size or of a dtype that is not cast. Some of the others
            may have been written.
        LayoutError: the segment is too small.
    """
    data = layout.view(segment)
    for start, stop in layout.gaps():
        data[start:stop] = bytes(stop - start)
    typed = _typed(layout, byte_tensor(data))
    places: list[torch.Tensor] = []
    here: list[torch.Tensor] = []
    pending = 0
    streams: dict[torch.device, torch.cuda.Stream] = {}
    try:
        with torch.no_grad():
            for source, dtype, start in _runs(layout, sources):
                first = start // itemsize(dtype)
                if source.is_cuda:
                    _stage_cuda(source, typed[dtype][first : first + source.numel()], streams)
                    continue
                source = made(source)
                places.append(typed[dtype].as_strided(source.shape, _strides(source.shape), first))
                here.append(source)
                pending += source.nbytes
                if pending >= _TOGETHER_BYTES:  # of sources that are computed, not all are held at a time
                    torch._foreach_copy_(places, here)
                    places, here, pending = [], [], 0
            if here:  # in one call: models of many small tensors would spend their time between the calls
                torch._foreach_copy_(places, here)
    finally:  # also after an error: the caller may give the slot away
        for stream in streams.values():
            stream.synchronize()


def views(layout: PartLayout, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each shard's elements in the layout's order: flat, in the shard's dtype, sharing memory with `data`.

    Args:
        layout: what lies where.
        data: at least ``layout.nbytes`` of uint8, on any device, beginning on a boundary of 64 bytes.
    """
    typed = _typed(layout, data)
    for _, dtype, numel, start, _ in layout.table:
        first = start // itemsize(dtype)
        yield typed[dtype][first : first + numel]


def _typed(layout: PartLayout, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """All bytes of a part as elements of each dtype that is in it."""
    return {
        dtype: data[: layout.nbytes // itemsize(dtype) * itemsize(dtype)].view(to_torch(dtype))
        for dtype in {dtype for _, dtype, *_ in layout.table}
    }


def _runs(layout: PartLayout, sources: Sources) -> Iterator[tuple[torch.Tensor | Computed, str, int]]:
    """Yield (elements, dtype in the segment, first byte there) of what is copied at a time: a source, or several that
    follow each other in memory as they do in the segment. Each is asked for once.

    Raises:
        StageError: at the end, of all sources that do not fit.
    """
    problems: list[str] = []
    fine: dict[tuple[torch.dtype, str], bool] = {}
    run: tuple[Stretch, str, int] | None = None
    end = 0
    for name, dtype, numel, start, stop in layout.table:
        source = sources.get(name)
        if source is None:
            problems.append(f"{name} (no source)")
            continue
        if source.numel() != numel:
            problems.append(f"{name} ({source.numel()} elements, the layout has {numel})")
            continue
        kind = source.dtype, dtype
        if kind not in fine:
            fine[kind] = castable(from_torch(source.dtype), dtype)
        if not fine[kind]:
            problems.append(f"{name} ({source.dtype}, which is not cast to {dtype})")
            continue
        if not numel:
            continue
        if isinstance(source, Computed):
            yield source, dtype, start
            continue
        if run is None or start != end or dtype != run[1] or not run[0].take(source):
            if run is not None:
                yield run[0].elements(), *run[1:]
            run = Stretch(source), dtype, start
        end = stop
    if problems:
        raise StageError(f"part {layout.part} cannot be staged: {listed(problems)}")
    if run is not None:
        yield run[0].elements(), *run[1:]


def _stage_cuda(
    source: torch.Tensor | Computed, place: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]
) -> None:
    """Enqueue one source's cast and copy on its device's side stream, which the caller waits for."""
    if source.device not in streams:
        streams[source.device] = torch.cuda.Stream(source.device)
        streams[source.device].wait_stream(torch.cuda.current_stream(source.device))
    # Temporaries, and what is computed, come from the side stream's own pool: it reuses them in stream order.
    with torch.cuda.stream(streams[source.device]):
        done = 0
        for chunk in _chunks(made(source), _CHUNK_BYTES // place.element_size()):
            flat = chunk.to(place.dtype).reshape(-1)
            place[done : done + flat.numel()].copy_(flat, non_blocking=True)
            done += flat.numel()


def _chunks(source: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Pieces of at most `numel` elements that follow each other in the tensor's own order, as views."""
    if source.is_contiguous():
        yield from source.view(-1).split(numel)
        return
    per_row = source.numel() // source.shape[0]
    if per_row <= numel:
        yield from source.split(numel // per_row)
    else:
        for row in source:
            yield from _chunks(row, numel)


# Where what is page-locked begins.
_pinned: set[int] = set()


def pin_segment(segment: Segment) -> bool:
    """Page-lock a mapped segment for fast asynchronous copies to and from GPUs.

    Returns:
        Whether it is page-locked now. Without (no GPU; drivers refuse some file systems) copies are right but slower.
    """
    if not torch.cuda.is_available():
        return False
    view = np.frombuffer(segment, np.uint8)
    flags = _PORTABLE if view.flags.writeable else _PORTABLE | _READ_ONLY
    if int(torch.cuda.cudart().cudaHostRegister(view.ctypes.data, view.nbytes, flags)) == 0:
        _pinned.add(view.ctypes.data)
        return True
    with suppress(RuntimeError):  # the runtime keeps the refusal for the next launch to report: let it be this one
        torch.ones(1, device="cuda")
    return False


def unpin_segment(segment: Segment) -> None:
    """Undo `pin_segment`, before the segment is unmapped. Does nothing where that did not page-lock it: the runtime
    would keep the error for the next launch to report.
    """
    address = np.frombuffer(segment, np.uint8).ctypes.data
    if address in _pinned:
        _pinned.remove(address)
        torch.cuda.cudart().cudaHostUnregister(address)
