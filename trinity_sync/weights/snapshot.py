"""The lazy snapshot: a training state copied into shared memory while the next forward and backward pass run.

The trainer is to stand still neither for the disk nor, where its engine allows, for the copy: parameters and optimizer
states do not change before the optimizer's next step, so a thread copies them meanwhile and the optimizer's step waits
for what is left. The method is that of CheckFreq (Mohan et al., FAST 2021) and DataStates-LLM (Maurya et al., HPDC
2024), with shared memory in place of a private buffer, so that another process writes the files.

One rank's snapshot, in order:

1. `plan(state)` finds the storages of the state and gives each its place in a segment;
2. `Snapshot(plan, segment).copy()` begins to copy; `wait_until_copied` is called before the state changes;
3. `file_images(folder)` writes the skeletons of the files and says which bytes of the segment go where in them;
4. `let_go(name)`, where the snapshot outlives its writing: the file's live tensors are not needed any more.
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
from trinity_sync.weights.staging import Copying

_MAX_CONSTANT_BYTES = 1 << 20


@dataclass(frozen=True)
class StatePlan:
    """The place of each storage of a state in a segment.

    Attributes:
        files: file name -> nested containers of live tensors.
        storages: file name -> the storages below its value.
        places: storage -> offset in the segment, bytes, each a multiple of 64.
        nbytes: length of the segment.
    """

    files: Mapping[str, object]
    storages: Mapping[str, Sequence[torch.UntypedStorage]]
    places: tuple[tuple[torch.UntypedStorage, int], ...]
    nbytes: int


@dataclass(frozen=True)
class FileImage:
    """A file whose large pieces are still in the segment; see `weights.image.fill`."""

    path: str
    extents: tuple[Extent, ...]


def plan(files: Mapping[str, object]) -> StatePlan:
    """Lay a state out. Tensors that share a storage share its place.

    Args:
        files: file name -> value for `torch.save`.
    """
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

    With CUDA the segment should be page-locked (`weights.staging.pin_segment`); see `weights.copying`.

    Args:
        plan: the place of each storage of the state. Its tensors must not change until `wait_until_copied` returns.
        segment: writable, at least ``plan.nbytes``; nobody reads it meanwhile.
        what: names the snapshot in errors, such as ``"the state of step 20"``.
    """

    def __init__(self, plan: StatePlan, segment: Segment, what: str) -> None:
        self._files, self._storages = dict(plan.files), dict(plan.storages)
        self._what = what
        held = len(memoryview(segment))
        if plan.nbytes > held:
            raise RunError(f"{what} needs {plan.nbytes} bytes, its segment has {held}")
        self._target = torch.frombuffer(segment, dtype=torch.uint8)
        self._places = {storage._cdata: offset for storage, offset in plan.places}
        devices = {storage.device for storage, _ in plan.places}
        # The copying alone holds the plan, until it has ended; see `let_go`.
        self._copying = Copying(_pairs(plan, self._target), devices, what)

    @property
    def names(self) -> set[str]:
        """Name the files of the state, but for those that were let go."""
        return set(self._files)

    def copy(self, *, in_background: bool) -> None:
        """Begin to copy, once; all is copied when this returns, unless `in_background`."""
        self._copying.copy(in_background=in_background)

    def wait_until_copied(self, timeout_s: float) -> float:
        """Wait until the state may change; seconds waited. An error of the copy is left to `file_images`.

        Raises:
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        return self._copying.wait_until_copied(timeout_s)

    def live(self, name: str) -> object:
        """A value of the state as it was planned, with tensors that training changes; `copied` has what they held."""
        return self._files[name]

    def let_go(self, name: str) -> None:
        """A file is written, or will not be: keep none of its live tensors alive, once they are copied. Its
        image stays good. From any thread; nothing is done for a file that is not held.
        """
        self._files.pop(name, None)
        self._storages.pop(name, None)

    def copied(self, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """The copy of a plain tensor of the state, in the segment.

        Raises:
            RunError: the copy failed.
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        self._copying.wait_whole(timeout_s)
        storage = tensor.untyped_storage()
        start = self._places[storage._cdata]
        held = self._target[start : start + storage.nbytes()].view(tensor.dtype)
        return held.as_strided(tensor.size(), tensor.stride(), held.storage_offset() + tensor.storage_offset())

    def file_images(self, folder: Path, timeout_s: float, names: Collection[str] | None = None) -> list[FileImage]:
        """Write the skeletons of files below `folder`, which exists, and say what goes into them.

        Args:
            names: those of the files to write; None: all.

        Raises:
            RunError: the copy failed.
            WaitTimeout: the copy takes longer than `timeout_s`.
            OSError: a skeleton cannot be written.
        """
        self._copying.wait_whole(timeout_s)
        images = []
        for name in list(self._files) if names is None else names:
            path, value, planned = folder / name, self._files[name], self._storages[name]
            holes = write_skeleton(value, path)
            # This file's only: what pickling makes may lie where a tensor lay that was let go.
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
    """Write what pickling brings in beside the state's tensors: the ranks of a DTensor's mesh."""
    large = [hole for hole in holes if hole.storage.nbytes() > _MAX_CONSTANT_BYTES]
    if large:
        raise RunError(
            f"{path}: tensors of {large[0].storage.nbytes()} bytes are pickled that the snapshot does not hold"
        )
    with path.open("r+b") as file:
        for hole in holes:
            file.seek(hole.offset)
            file.write(bytes(hole.storage.cpu()))


# Files that `torch.save` would write, without passing tensors through `torch.save`.


class SkeletonError(RunError):
    """torch wrote a file whose records are not the storages that it was given."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Where the bytes of one storage belong in a file.

    Attributes:
        offset: in the file, bytes.
        storage: whose bytes; its length is the hole's.
    """

    offset: int
    storage: torch.UntypedStorage


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The plain tensors that a nested container of tensors holds on this rank: local shards of sharded ones."""
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
    """The distinct storages below a nested container, in the order of first use."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors(value):
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def write_skeleton(value: object, path: Path) -> list[Hole]:
    """Write the file that ``torch.save(value, path)`` would write, with holes for the tensors' bytes.

    Tensors on an accelerator are named as tensors of the CPU in it, so that the file opens anywhere. No tensor is read,
    so its contents may change meanwhile. Records carry no CRC32: the manifest has a digest of the whole file.

    Args:
        value: nested containers of tensors and of what ``torch.load(weights_only=True)`` admits.
        path: is replaced.

    Returns:
        The holes, ascending. They cover each of ``storages(value)`` that is not empty once.

    Raises:
        SkeletonError: torch's file is not made as expected.
        OSError: the file cannot be written.
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
        raise SkeletonError(f"{path}: torch wrote {records} tensor storages, {len(met)} were met on the way")
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
    """Called by torch's pickler for every storage that it writes; the answer is the device named in the file."""
    met = getattr(_local, "met", None)
    if met is None:
        return None
    untyped = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
    if untyped._cdata not in _local.known:
        _local.known.add(untyped._cdata)
        met.append(untyped)
    return "cpu"


# Before torch's own taggers; where nobody records, it leaves the decision to them.
torch.serialization.register_package(0, _note, lambda storage, location: None)


@contextmanager
def _without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
