"""Checkpoints of torch.distributed.checkpoint: ``.metadata`` and ``__R_N.distcp``, the model below a prefix.

``.metadata`` is a pickle. It is read by an unpickler that knows the few classes which belong there, by stand-ins that
only keep fields; anything else in it is an error. Each chunk of a tensor is a small torch file inside a ``.distcp``
file, loaded by torch's weights-only loader when it is needed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import torch

from trinity_sync.checkpoint.reading.pieces import Assembled, Piece, TensorInfo, WeightsError, assembled, loading_fault
from trinity_sync.checkpoint.reading.records import Record
from trinity_sync.weights.tensors import from_torch

METADATA = ".metadata"


class _Tensor(Record):
    """``TensorStorageMetadata``: properties, size, chunks."""


class _Index(Record):
    """``MetadataIndex``: fqn, offset, index."""


_PLACE = "torch.distributed.checkpoint"
_KNOWN: dict[str, type[object]] = {
    f"{_PLACE}.metadata.TensorStorageMetadata": _Tensor,
    f"{_PLACE}.metadata.MetadataIndex": _Index,
    **{
        f"{_PLACE}.{name}": Record
        for name in (
            "metadata.Metadata",
            "metadata.BytesStorageMetadata",
            "metadata.ChunkStorageMetadata",
            "metadata.TensorProperties",
            "metadata._MEM_FORMAT_ENCODING",
            "metadata.StorageMeta",
            "filesystem._StorageInfo",
        )
    },
    # of what FSDP1 shards without a device mesh
    **{
        f"torch.distributed._shard.{name}": Record
        for name in (
            "metadata.ShardMetadata",
            "sharded_tensor.metadata.TensorProperties",
            "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        )
    },
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": str,
    "collections.OrderedDict": dict,
    **{f"{module}.{name}": PurePosixPath for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "Path")},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[object] | torch.dtype:
        path = f"{module}.{name}"
        if path in _KNOWN:
            return _KNOWN[path]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {path}, which does not belong there")


def open_distributed(folder: Path, prefix: str) -> dict[str, Assembled]:
    """Open the tensors whose keys begin with a prefix, under the rest of their keys.

    Args:
        folder: a folder of torch's distributed checkpoints, with ``.metadata``.
        prefix: what the keys begin with, such as ``"model."``.

    Raises:
        WeightsError: a file is missing or damaged, or the chunks of a tensor do not make it up.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        tensors, places = _contents(metadata)
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing, without which {folder} cannot be read") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise WeightsError(f"{path} cannot be read, it is damaged: {type(error).__name__}: {error}") from error
    chosen = {key: entry for key, entry in tensors.items() if key.startswith(prefix)}
    if not chosen:
        raise WeightsError(f"{path} lists no tensor below {prefix!r}")
    return {key.removeprefix(prefix): _open(folder, key, entry, places) for key, entry in chosen.items()}


_Places = Mapping[tuple[str, tuple[int, ...]], Record]


def _contents(metadata: Record) -> tuple[dict[str, _Tensor], _Places]:
    tensors = {str(key): entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, _Tensor)}
    places = {
        (index.fqn, tuple(index.offset)): place
        for index, place in metadata.storage_data.items()
        if getattr(index, "offset", None) is not None
    }
    return tensors, places


def _open(folder: Path, key: str, entry: Record, places: _Places) -> Assembled:
    path = folder / METADATA
    try:
        info = TensorInfo(from_torch(entry.properties.state[0]), tuple(entry.size))
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        pieces = [_piece(folder, key, start, sizes, places[key, start]) for start, sizes in chunks]
    except KeyError:
        raise WeightsError(f"{path} lists a chunk of {key}, but not the file that it is in") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} does not describe {key} as expected: {type(error).__name__}: {error}") from error
    return assembled(key, info, pieces)


def _piece(folder: Path, key: str, start: tuple[int, ...], sizes: tuple[int, ...], place: Record) -> Piece:
    relative = PurePosixPath(place.relative_path)
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"it is said to be in {relative}, outside of the folder")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"it was stored through {place.transform_descriptors}, which is not supported")
    file = folder / relative
    offset, length = int(place.offset), int(place.length)
    found = file.stat().st_size if file.is_file() else None
    if found is None:
        raise WeightsError(f"{file} is missing, which holds {key}")
    if offset < 0 or length < 0 or offset + length > found:
        raise WeightsError(f"{file} is torn: it has {found} bytes, {key} is to end at {offset + length}")
    load: Callable[[], torch.Tensor] = partial(_load, file, key, offset, length)
    return Piece(file, start, sizes, load)


def _load(file: Path, key: str, offset: int, length: int) -> torch.Tensor:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything for a damaged file
        raise WeightsError(
            f"{file}: {key} at byte {offset} cannot be read, it is damaged: {loading_fault(error)}"
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"{file}: at byte {offset} is no tensor, though {key} is to be there")
    return tensor.detach()
