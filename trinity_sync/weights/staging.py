"""The snapshot: one rank's live tensors copied into its segment in wire dtype. Called by the trainer's worker.

Only this blocks the trainer, so it is minimal: one pass over the sources, casting on the way, no digest. On a GPU the
cast runs on the device, where it is cheapest and halves the traffic on the bus.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
import torch

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights.layout import PartLayout, Segment, aligned
from trinity_sync.weights.saved_views import row_major
from trinity_sync.weights.shards import itemsize, listed
from trinity_sync.weights.tensors import byte_tensor, castable, from_torch, to_torch

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 20
"""Bytes in wire dtype per cast on a device: bounds the extra device memory to about two of these."""
_TOGETHER_BYTES = 256 << 20
"""Bytes of CPU sources per call of the copy; the last source may exceed them."""
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegisterPortable (all contexts), cudaHostRegisterReadOnly


_strides = lru_cache(1024)(row_major)


class StageError(RunError):
    """A source is missing or does not match the layout."""


@cache
def side_stream(device: torch.device, what: str) -> torch.cuda.Stream:
    """Return this process's stream for a kind of copies from a device. One, as torch's allocator keeps blocks for each
    stream.
    """
    return torch.cuda.Stream(device)


def enqueued() -> torch.cuda.Event | None:
    """Return the point that the current stream of this thread has come to; None: this process has used no GPU."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None


def stage(layout: PartLayout, sources: Sources, segment: Segment, after: torch.cuda.Event | None = None) -> None:
    """Copy each shard's source into the segment, cast to the shard's dtype. All is copied when this returns.

    CUDA sources are cast on their device in bounded chunks and copied on a side stream, which waits for earlier work of
    the current stream; copies overlap with casts if the segment is page-locked (`pin_segment`).

    Args:
        after: of `enqueued` on the thread that trains, where this is another one: the copy waits for that work, and for
            none that comes later.
        sources: by tensor name, on any device, of any shape and strides; a source's elements in its own order are the
            shard's local elements. Tensors outside of the layout are ignored.
        segment: writable, at least ``layout.nbytes``.

    Raises:
        StageError: names the sources that are missing, wrong in size or of a dtype that is not cast. Some of the others
            may have been written.
        LayoutError: the segment is too small.
    """
    data = layout.view(segment)
    for start, stop in layout.gaps:
        data[start:stop] = bytes(stop - start)
    typed = _typed(layout, byte_tensor(data))
    places: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    pending = 0
    streams: set[torch.cuda.Stream] = set()
    try:
        with torch.no_grad():
            for source, dtype, start in _runs(layout, sources):
                first = start // itemsize(dtype)
                if source.is_cuda:
                    _stage_cuda(source, typed[dtype][first : first + source.numel()], streams, after)
                    continue
                source = computed(source)
                places.append(typed[dtype].as_strided(source.shape, _strides(source.shape), first))
                tensors.append(source)
                pending += source.nbytes
                if pending >= _TOGETHER_BYTES:  # bounds the memory of computed sources
                    torch._foreach_copy_(places, tensors)
                    places, tensors, pending = [], [], 0
            if tensors:  # in one call: for many small tensors the cost per call dominates
                torch._foreach_copy_(places, tensors)
    finally:  # also after an error: the caller may reuse the slot
        for stream in streams:
            stream.synchronize()


def views(layout: PartLayout, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each shard's elements in the layout's order: flat, in the shard's dtype, sharing memory with `data`.

    `data`: at least ``layout.nbytes`` of uint8, on any device, beginning on a boundary of 64 bytes.
    """
    typed = _typed(layout, data)
    for _, dtype, numel, start, _ in layout.table:
        first = start // itemsize(dtype)
        yield typed[dtype][first : first + numel]


def _typed(layout: PartLayout, data: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        dtype: data[: layout.nbytes // itemsize(dtype) * itemsize(dtype)].view(to_torch(dtype))
        for dtype in {dtype for _, dtype, *_ in layout.table}
    }


def _runs(layout: PartLayout, sources: Sources) -> Iterator[tuple[torch.Tensor | ComputedTensor, str, int]]:
    """Yield (elements, dtype in the segment, first byte there) of each copy: a source, or several that are adjacent
    both in memory and in the segment. Each source is looked up once. Raises StageError: at the end, for all sources
    that do not match.
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
        if isinstance(source, ComputedTensor):
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
    source: torch.Tensor | ComputedTensor,
    place: torch.Tensor,
    streams: set[torch.cuda.Stream],
    after: torch.cuda.Event | None,
) -> None:
    """Enqueue one source's cast and copy on its device's side stream, which the caller waits for."""
    stream = side_stream(source.device, "weights")
    if stream not in streams:
        streams.add(stream)
        stream.wait_event(after or torch.cuda.current_stream(source.device).record_event())
    # Temporaries and computed sources come from the side stream's pool, which reuses them in stream order.
    with torch.cuda.stream(stream):
        done = 0
        for chunk in _chunks(computed(source), _CHUNK_BYTES // place.element_size()):
            flat = chunk.to(place.dtype).reshape(-1)
            place[done : done + flat.numel()].copy_(flat, non_blocking=True)
            done += flat.numel()


def _chunks(source: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Yield pieces of at most `numel` elements that follow each other in the tensor's own order, as views."""
    if source.is_contiguous():
        yield from source.view(-1).split(numel)
        return
    per_row = source.numel() // source.shape[0]
    if per_row <= numel:
        yield from source.split(numel // per_row)
    else:
        for row in source:
            yield from _chunks(row, numel)


# Addresses of the page-locked segments.
_pinned: set[int] = set()


def pin_segment(segment: Segment) -> bool:
    """Page-lock a mapped segment for fast asynchronous copies to and from GPUs, and return whether it worked.

    Without (no GPU; drivers refuse some file systems) copies are correct but slower.
    """
    if not torch.cuda.is_available():
        return False
    view = np.frombuffer(segment, np.uint8)
    flags = _PORTABLE if view.flags.writeable else _PORTABLE | _READ_ONLY
    if int(torch.cuda.cudart().cudaHostRegister(view.ctypes.data, view.nbytes, flags)) == 0:
        _pinned.add(view.ctypes.data)
        return True
    with suppress(RuntimeError):  # the runtime reports the refusal at the next launch: let it be this one
        torch.ones(1, device="cuda")
    return False


def pin_where_used(segment: Segment) -> None:
    """Page-lock a mapped segment if this process has used a GPU; another one is not woken for it."""
    if torch.cuda.is_initialized() and not pin_segment(segment):
        logger.warning("the CUDA driver does not page-lock the slot, so loads take several times as long")


def unpin_segment(segment: Segment) -> None:
    """Undo `pin_segment`, before the segment is unmapped; do nothing where it did not work."""
    address = np.frombuffer(segment, np.uint8).ctypes.data
    if address in _pinned:  # else the runtime would report an error at the next launch
        _pinned.remove(address)
        torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed when it is copied, so that not all of them are in memory at a time.

    `compute` returns a new tensor each time, in the device's current stream; the other attributes describe that tensor.
    """

    dtype: torch.dtype
    device: torch.device
    elements: int
    compute: Callable[[], torch.Tensor]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def numel(self) -> int:
        return self.elements


Sources: TypeAlias = Mapping[str, torch.Tensor | ComputedTensor]
"""A rank's sources by tensor name."""


def computed(source: torch.Tensor | ComputedTensor) -> torch.Tensor:
    """Return the tensor itself, computed if necessary."""
    return source.compute() if isinstance(source, ComputedTensor) else source


_COPY_BYTES = 64 << 20


class TensorCopy:
    """A copy of tensors into existing host memory, on the training thread or in the background.

    CUDA tensors are copied on a side stream of their device, which waits for the work enqueued on the current stream
    before the constructor; the targets should be page-locked. `pairs`: a source and its target on the host, contiguous
    and of the same shape and dtype. The sources must not change until `wait_until_copied` returns. The copying thread
    iterates over them. `devices`: of the sources. `what`: names the copy in errors, such as ``"the state of step 20"``.
    """

    def __init__(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], devices: Collection[torch.device], what: str
    ) -> None:
        self._what = what
        self._pairs = pairs
        self._streams = {device: side_stream(device, "state") for device in devices if device.type == "cuda"}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = threading.Event()
        self._error: Exception | None = None

    def copy(self, *, in_background: bool) -> None:
        """Begin, once, on another thread with `in_background`. Errors are left to `wait_whole`."""
        if not in_background:
            self._copy()
            return
        try:
            threading.Thread(target=self._copy, name="snapshot", daemon=True).start()
        except RuntimeError as error:  # the limit of threads is reached
            self._error, self._pairs = error, ()
            self._copied.set()

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the sources may change; return the seconds waited. `wait_whole` raises errors of the copy."""
        started = time.perf_counter()
        if not self._copied.wait(timeout_s):
            raise WaitTimeout("the snapshot", f"copy {self._what}", timeout_s)
        return time.perf_counter() - started

    def wait_whole(self, timeout_s: float) -> None:
        """Wait until the targets hold the copy."""
        self.wait_until_copied(timeout_s)
        if self._error is not None:
            raise RunError(f"{self._what} could not be copied: {self._error}") from self._error

    def _copy(self) -> None:
        alive = []  # a source is read until its stream is done, and this may be the last reference
        try:
            with torch.no_grad():
                for source, target in self._pairs:
                    alive.append(source)
                    with torch.cuda.stream(self._streams.get(source.device)):
                        self._copy_one(source.detach().reshape(-1), target.view(-1))
            for stream in self._streams.values():
                stream.synchronize()
        except Exception as error:
            self._error = error
        finally:
            self._pairs = ()
            alive.clear()  # also where an error keeps this frame
            self._copied.set()

    def _copy_one(self, source: torch.Tensor, target: torch.Tensor) -> None:
        step = max(_COPY_BYTES // source.element_size(), 1)
        for start in range(0, source.numel(), step):
            target[start : start + step].copy_(source[start : start + step], non_blocking=source.is_cuda)


class HostMemory:
    """Memory for copies of the same tensors in every save, so that page faults happen once. Page-locked with GPUs.

    torch's own pinned memory comes in powers of two, and is never returned to the system.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a place for each tensor, of its shape and dtype. The places of the last call are reused."""
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + aligned(tensor.nbytes))
        if self._memory is None or len(self._memory) < starts[-1]:
            if self._memory is not None:
                unpin_segment(self._memory)
            self._memory = None  # freed before the larger one is allocated
            self._memory = mmap.mmap(-1, max(starts[-1], mmap.PAGESIZE))
            pin_segment(self._memory)
        array = np.frombuffer(self._memory, np.uint8)
        return [
            torch.from_numpy(array[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts[:-1], strict=True)
        ]


# Tensors that lie one after another in memory, as one: models of many small tensors would spend their time between
# the copies.


class Stretch:
    """Tensors that follow each other in one storage, without a gap, from `first` on; on any device.

    One copy for all of them saves the cost per call, which dominates for models of many small tensors.
    """

    __slots__ = ("_end", "_first", "_numel", "_room")

    def __init__(self, first: torch.Tensor) -> None:
        self._first = first
        self._numel = first.numel()
        self._end = first.data_ptr() + first.nbytes if first.is_contiguous() else None
        self._room: int | None = None

    def take(self, tensor: torch.Tensor) -> bool:
        """Add a tensor of at least one element if it follows, and return whether it does."""
        first = self._first
        if tensor.data_ptr() != self._end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return False
        if self._room is None:
            storage = first.untyped_storage()
            self._room = storage.data_ptr() + storage.nbytes()
        if self._end + tensor.nbytes > self._room:  # adjacent by chance, in another storage
            return False
        self._end += tensor.nbytes
        self._numel += tensor.numel()
        return True

    def elements(self) -> torch.Tensor:
        one = self._first
        return one if one.numel() == self._numel else one.as_strided((self._numel,), (1,))
