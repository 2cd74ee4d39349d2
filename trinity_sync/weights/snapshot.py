"""The lazy snapshot: a training state copied into shared memory while the next forward and backward pass run.

The copy need not block the trainer: parameters and optimizer states do not change before the optimizer's next step, so
a thread copies them meanwhile and that step waits for the rest. The method is that of CheckFreq (Mohan et al., FAST
2021) and DataStates-LLM (Maurya et al., HPDC 2024), with shared memory in place of a private buffer, so that another
process writes the files.

One rank's snapshot, in order:

1. `plan(state)` finds the storages of the state and gives each its place in a segment;
2. `Snapshot(plan, segment).copy()` begins to copy; `wait_until_copied` is called before the state changes;
3. `file_images(folder)` writes the skeletons of the files and returns which bytes of the segment fill them;
4. `let_go(name)`, where the snapshot outlives its writing: the file's live tensors are no longer needed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from trinity_sync.errors import RunError
from trinity_sync.weights.layout import Segment, aligned
from trinity_sync.weights.shard_file import Extent
from trinity_sync.weights.staging import TensorCopy

_MAX_CONSTANT_BYTES = 1 << 20


@dataclass(frozen=True)
class StatePlan:
    """The place of each storage of a state in a segment."""

    files: Mapping[str, object]  # file name -> nested containers of live tensors
    storages: Mapping[str, Sequence[torch.UntypedStorage]]  # below the value of each file
    places: tuple[tuple[torch.UntypedStorage, int], ...]  # offset in the segment, bytes, a multiple of 64
    nbytes: int  # length of the segment


@dataclass(frozen=True)
class FileImage:
    """A file whose large pieces are still in the segment; see `weights.shard_file.write_image`."""

    path: str
    extents: tuple[Extent, ...]


def plan(files: Mapping[str, object]) -> StatePlan:
    """Lay out a state: file name -> value for `torch.save`. Tensors that share a storage share its place."""
    below = {name: storages(value) for name, value in files.items()}
    places: list[tuple[torch.UntypedStorage, int]] = []
    seen: set[int] = set()
    end = 0
    for of_file in below.values():
        for storage in of_file:
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            places.append((storage, end))
            end += aligned(storage.nbytes())
    return StatePlan(files, below, tuple(places), end)


class Snapshot:
    """A state and the segment that it is copied into.

    With CUDA the segment should be page-locked (`staging.pin_segment`). The state must not change until
    `wait_until_copied` returns. `what`: names the snapshot in errors, such as ``"the state of step 20"``.
    """

    def __init__(self, plan: StatePlan, segment: Segment, what: str) -> None:
        self._files, self._storages = dict(plan.files), dict(plan.storages)
        self._what = what
        room = len(memoryview(segment))
        if plan.nbytes > room:
            raise RunError(f"{what} needs {plan.nbytes} bytes, its segment has {room}")
        self._target = torch.frombuffer(segment, dtype=torch.uint8)
        self._places = {storage._cdata: offset for storage, offset in plan.places}
        devices = {storage.device for storage, _ in plan.places}
        # Only the copying refers to the plan, until it has ended; see `let_go`.
        self._copying = TensorCopy(_pairs(plan, self._target), devices, what)

    @property
    def names(self) -> set[str]:
        """The files of the state, except those that were released."""
        return set(self._files)

    def copy(self, *, in_background: bool) -> None:
        """Begin to copy, once; all is copied when this returns, unless `in_background`."""
        self._copying.copy(in_background=in_background)

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the state may change; return the seconds waited. `file_images` raises errors of the copy."""
        return self._copying.wait_until_copied(timeout_s)

    def live(self, name: str) -> object:
        """Return a value of the state with its live tensors, which training changes; `copied` returns their copies."""
        return self._files[name]

    def let_go(self, name: str) -> None:
        """Drop the references to a file's live tensors, once copied. Its image stays valid. From any thread."""
        self._files.pop(name, None)
        self._storages.pop(name, None)

    def copied(self, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """Return the copy of a plain tensor of the state, in the segment."""
        self._copying.wait_whole(timeout_s)
        storage = tensor.untyped_storage()
        start = self._places[storage._cdata]
        copy = self._target[start : start + storage.nbytes()].view(tensor.dtype)
        return copy.as_strided(tensor.size(), tensor.stride(), copy.storage_offset() + tensor.storage_offset())

    def file_images(self, folder: Path, timeout_s: float, names: Collection[str] | None = None) -> list[FileImage]:
        """Write the skeletons of files (`names`; None: all) below the existing `folder`, and return what fills them."""
        self._copying.wait_whole(timeout_s)
        images = []
        for name in list(self._files) if names is None else names:
            path, value, planned = folder / name, self._files[name], self._storages[name]
            holes = write_skeleton(value, path)
            # Only of this file: tensors that pickling creates may have the address of a released tensor.
            places = {storage._cdata: self._places[storage._cdata] for storage in planned}
            copied = [hole for hole in holes if hole.storage._cdata in places]
            _write_constants(path, [hole for hole in holes if hole.storage._cdata not in places])
            extents = tuple((hole.offset, places[hole.storage._cdata], hole.storage.nbytes()) for hole in copied)
            images.append(FileImage(str(path), extents))
        return images


def _pairs(plan: StatePlan, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for storage, offset in plan.places:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        yield source, target[offset : offset + storage.nbytes()]


def _write_constants(path: Path, holes: list[Hole]) -> None:
    """Write the tensors that pickling adds to the state's: the ranks of a DTensor's mesh."""
    large = [hole for hole in holes if hole.storage.nbytes() > _MAX_CONSTANT_BYTES]
    if large:
        raise RunError(
            f"{path}: pickling added a tensor of {large[0].storage.nbytes()} bytes that the snapshot does not contain"
        )
    with path.open("r+b") as file:
        for hole in holes:
            file.seek(hole.offset)
            file.write(bytes(hole.storage.cpu()))


# Files as `torch.save` writes them, without passing tensors through it.


class SkeletonError(RunError):
    """torch wrote a file whose records are not the given storages."""


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of one storage's bytes in a file."""

    offset: int  # in the file, bytes
    storage: torch.UntypedStorage  # its length is the hole's


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a nested container on this rank: local shards of sharded ones."""
    if isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def storages(value: object) -> list[torch.UntypedStorage]:
    """Return the distinct storages below a nested container, in the order of first use."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors(value):
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def write_skeleton(value: object, path: Path) -> list[Hole]:
    """Write the file that ``torch.save(value, path)`` would write, with holes for the tensors' bytes.

    Tensors on an accelerator are named as tensors of the CPU in it, so that the file opens anywhere. No tensor is read,
    so its contents may change meanwhile. Records carry no CRC32: the manifest has a digest of the whole file.

    `value`: nested containers of tensors and of types that ``torch.load(weights_only=True)`` admits. Returns the holes,
    ascending. They cover each non-empty one of ``storages(value)`` once. Raises SkeletonError: torch's file is not as
    expected.
    """
    with _recording() as met, torch.serialization.skip_data(), _without_crc32():
        torch.save(value, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    holes = []
    for number, storage in enumerate(met):
        name = f"data/{number}"
        if not reader.has_record(name):
            raise SkeletonError(f"{path}: torch wrote no record for tensor storage {number} of {len(met)}")
        if storage.nbytes():
            holes.append(Hole(reader.get_record_offset(name), storage))
    records = sum(name.startswith("data/") for name in reader.get_all_records())
    if records != len(met):
        raise SkeletonError(f"{path}: torch wrote {records} tensor storages, but its pickler met {len(met)}")
    return sorted(holes, key=lambda hole: hole.offset)


_local = threading.local()


@contextmanager
def _recording() -> Iterator[list[torch.UntypedStorage]]:
    """Note the storages that torch's pickler meets in this thread, in the order of its record numbers."""
    _local.met, _local.known = [], set()
    try:
        yield _local.met
    finally:
        _local.met = None


def _note(storage: torch.serialization.STORAGE) -> str | None:
    """Note a storage, and return its device in the file. torch's pickler calls this for each storage."""
    met = getattr(_local, "met", None)
    if met is None:
        return None
    untyped = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
    if untyped._cdata not in _local.known:
        _local.known.add(untyped._cdata)
        met.append(untyped)
    return "cpu"


# Before torch's own taggers; outside of `_recording` it leaves the decision to them.
torch.serialization.register_package(0, _note, lambda storage, location: None)


@contextmanager
def _without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
