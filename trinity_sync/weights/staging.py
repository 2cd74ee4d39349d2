"""The snapshot: one rank's live tensors copied into its segment in wire dtype. Called by the trainer's worker.

This is the only thing for which the trainer stands still, so it does nothing else: one pass over the sources, casting
on the way, no digest. On a GPU the cast runs on the device, where it is cheapest and halves what crosses the bus.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.weights.layout import PartLayout, Segment, aligned
from trinity_sync.weights.saved_views import row_major
from trinity_sync.weights.shards import itemsize, listed
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


# Sources of a version that are computed when they are copied, so that not all of them are in memory at a time.


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


# Tensors that are copied beside the training thread, into host memory that is there already.


_COPY_BYTES = 64 << 20


class Copying:
    """Tensors to copy, and how far that is.

    CUDA tensors are copied on a side stream of their device, which sees what was enqueued on the current stream before
    this was made; the targets should be page-locked.

    Args:
        pairs: a source and its target on the host, contiguous and of the same shape and dtype. The sources must not
            change until `wait_until_copied` returns. Gone through by the thread that copies.
        devices: where the sources are.
        what: is copied, for errors, such as ``"the state of step 20"``.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        devices: Collection[torch.device],
        what: str,
    ) -> None:
        self._what = what
        self._pairs = pairs
        self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = threading.Event()
        self._error: Exception | None = None

    def copy(self, *, in_background: bool) -> None:
        """Begin, once. An error of the copy, or of its beginning, is left to `wait_whole`.

        Args:
            in_background: on a thread of its own; else all is copied when this returns.
        """
        if not in_background:
            self._copy()
            return
        try:
            threading.Thread(target=self._copy, name="snapshot", daemon=True).start()
        except RuntimeError as error:  # there can be no more threads
            self._error, self._pairs = error, ()
            self._copied.set()

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the sources may change; seconds waited. An error of the copy is left to `wait_whole`.

        Raises:
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        started = time.perf_counter()
        if not self._copied.wait(timeout_s):
            raise WaitTimeout("the snapshot", f"copy {self._what}", timeout_s)
        return time.perf_counter() - started

    def wait_whole(self, timeout_s: float) -> None:
        """Wait until the targets hold the copy.

        Raises:
            RunError: the copy failed.
            WaitTimeout: it takes longer than `timeout_s`.
        """
        self.wait_until_copied(timeout_s)
        if self._error is not None:
            raise RunError(f"{self._what} could not be copied: {self._error}") from self._error

    def _copy(self) -> None:
        held = []  # nobody else may keep a source, which is read until its stream has come so far
        try:
            with torch.no_grad():
                for source, target in self._pairs:
                    held.append(source)
                    with torch.cuda.stream(self._streams.get(source.device)):
                        self._copy_one(source.detach().reshape(-1), target.view(-1))
            for stream in self._streams.values():
                stream.synchronize()
        except Exception as error:
            self._error = error
        finally:
            self._pairs = ()
            held.clear()  # also where an error keeps this frame
            self._copied.set()

    def _copy_one(self, source: torch.Tensor, target: torch.Tensor) -> None:
        step = max(_COPY_BYTES // source.element_size(), 1)
        for start in range(0, source.numel(), step):
            target[start : start + step].copy_(source[start : start + step], non_blocking=source.is_cuda)


class HostMemory:
    """Memory for copies of the same tensors, save after save: page faults are paid for once. Page-locked where there
    are GPUs, as it is: torch's own pinned memory comes in powers of two, and is kept when it is let go.
    """

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A place for each tensor, of its shape and dtype and with a storage of its own bytes only. What was handed out
        before is used again.
        """
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + aligned(tensor.nbytes))
        if self._held is None or len(self._held) < starts[-1]:
            if self._held is not None:
                unpin_segment(self._held)
            self._held = None  # before the larger one is there
            self._held = mmap.mmap(-1, max(starts[-1], mmap.PAGESIZE))
            pin_segment(self._held)
        held = np.frombuffer(self._held, np.uint8)
        return [
            torch.from_numpy(held[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts[:-1], strict=True)
        ]


# Tensors that lie one after another in memory, as one: models of many small tensors would spend their time between
# the copies.


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
