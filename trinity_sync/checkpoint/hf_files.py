"""Writing a model's weights as Hugging Face safetensors files, tensor by tensor.

The safetensors library writes a file from tensors that are all in memory. Here the header is made from what is known
of the tensors beforehand, and each tensor is read, cast and written by itself, so memory stays near one tensor however
large the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from trinity_sync.checkpoint.reading.hugging_face import INDEX
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.host.durable import write_all
from trinity_sync.weights import dtypes
from trinity_sync.weights.tensors import to_torch

_CHUNK_BYTES = 4 << 20
_ALIGNMENT = 8


def nbytes(info: TensorInfo) -> int:
    """Return the size of a tensor, in bytes."""
    return info.numel * dtypes.itemsize(info.dtype)


def plan_files(infos: Mapping[str, TensorInfo], max_bytes: int) -> dict[str, list[str]]:
    """Divide tensors among files of at most so many bytes, in the given order; a larger tensor gets its own file.

    Returns:
        The names of the files, and of the tensors in each in the order of their bytes: those of wider elements come
        first, so that every tensor is aligned.
    """
    split = split_state_dict_into_shards_factory(
        dict(infos), get_storage_size=nbytes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_bytes
    )
    return {file: by_width({name: infos[name] for name in names}) for file, names in split.filename_to_tensors.items()}


def by_width(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of a file's tensors in the order of their bytes: those of wider elements come first."""
    return sorted(infos, key=lambda name: -dtypes.itemsize(infos[name].dtype))


def write_file(
    folder: Path,
    file: str,
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], torch.Tensor],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, durably.

    Args:
        infos: dtype and shape of each of its tensors as they are to be written, in the order of their bytes.
        read: gives a tensor by name; a floating one is cast to the dtype in `infos`.
        notes: texts that the file's header holds, by key.
    """
    with (folder / file).open("wb", buffering=0) as opened:
        write_all(opened.fileno(), header(infos, notes))
        for name, info in infos.items():
            dtype = to_torch(info.dtype)
            # small chunks, so that what is cast stays in the cache
            for chunk in read(name).reshape(-1).split(_CHUNK_BYTES // dtype.itemsize):
                write_all(opened.fileno(), chunk.to(dtype).contiguous().view(torch.uint8).numpy().data)
        os.fsync(opened.fileno())


def write_index(folder: Path, files: Mapping[str, Sequence[str]], infos: Mapping[str, TensorInfo]) -> None:
    """Write the index that says which tensor is in which file."""
    body = {
        "metadata": {
            "total_parameters": sum(info.numel for info in infos.values()),
            "total_size": sum(nbytes(info) for info in infos.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def header(infos: Mapping[str, TensorInfo], notes: Mapping[str, str] | None = None) -> bytes:
    """Return what a safetensors file begins with. The bytes of the tensors follow, in the given order.

    Args:
        infos, notes: as of `write_file`.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(notes or {})}}
    end = 0
    for name, info in infos.items():
        start, end = end, end + nbytes(info)
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
