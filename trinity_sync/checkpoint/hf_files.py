"""Writing a model's weights as Hugging Face safetensors files, tensor by tensor.

The safetensors library writes a file from tensors that are all in memory. Here the header is made from what is known
of the tensors beforehand, and each tensor is read, cast and written by itself, so memory stays near one tensor however
large the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trinity_sync.checkpoint.reading.hugging_face import INDEX
from trinity_sync.checkpoint.reading.pieces import TensorInfo
from trinity_sync.weights import dtypes
from trinity_sync.weights.tensors import to_torch

SINGLE = "model.safetensors"
_CHUNK_BYTES = 4 << 20
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file and the tensors in it, in the order of their bytes."""

    name: str
    tensors: tuple[str, ...]


def nbytes(info: TensorInfo) -> int:
    """Size of a tensor."""
    return info.numel * dtypes.itemsize(info.dtype)


def plan_files(infos: Mapping[str, TensorInfo], max_bytes: int) -> list[PlannedFile]:
    """Divide tensors among files of at most so many bytes, in the given order; a larger tensor gets its own file.

    Within a file tensors of wider elements come first, so that every tensor is aligned.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if groups[-1] and filled + nbytes(info) > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes(info)
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    return [
        PlannedFile(name, tuple(sorted(group, key=lambda tensor: -dtypes.itemsize(infos[tensor].dtype))))
        for name, group in zip(names, groups, strict=True)
    ]


def write_file(
    folder: Path, planned: PlannedFile, infos: Mapping[str, TensorInfo], read: Callable[[str], torch.Tensor]
) -> None:
    """Write one file, durably.

    Args:
        infos: of the tensors as they are to be written.
        read: gives a tensor by name; floating ones are cast to the dtype of `infos`.
    """
    with (folder / planned.name).open("wb", buffering=0) as file:
        _write(file.fileno(), _header({name: infos[name] for name in planned.tensors}))
        for name in planned.tensors:
            dtype = to_torch(infos[name].dtype)
            # small chunks, so that what is cast stays in the cache
            for chunk in read(name).reshape(-1).split(_CHUNK_BYTES // dtype.itemsize):
                _write(file.fileno(), chunk.to(dtype).contiguous().view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def write_index(folder: Path, files: Sequence[PlannedFile], infos: Mapping[str, TensorInfo]) -> None:
    """Write the index that says which tensor is in which file."""
    body = {
        "metadata": {
            "total_parameters": sum(info.numel for info in infos.values()),
            "total_size": sum(nbytes(info) for info in infos.values()),
        },
        "weight_map": {name: planned.name for planned in files for name in sorted(planned.tensors)},
    }
    (folder / INDEX).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _header(infos: Mapping[str, TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        start, end = end, end + nbytes(info)
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(descriptor: int, data: bytes | memoryview) -> None:
    """One call of the system may take only part of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
