"""Files that `torch.save` would write, without passing tensors through `torch.save`.

A training state is thousands of tensors in nested containers, and what verl loads is the file that torch's pickler
makes of them. `write_skeleton` lets torch write everything of that file but the bytes of the tensors, in a few
milliseconds per hundred tensors and without touching them, and tells where the bytes go. Whoever holds a copy of the
bytes, such as the node agent, puts them there (`weights.image.fill`), and the file is the one that torch would have
written.

Sources: `torch.serialization.skip_data` leaves the storages' records as holes; `torch.serialization.register_package`
lets us see each storage as the pickler meets it, in the order in which it numbers them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from trinity_sync.errors import RunError


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
