"""verl's per-rank files ``model_world_size_W_rank_R.pt``, of FSDP and FSDP2, as verl, Trinity and this program write
them.

Each file is a pickled state dict of DTensors (cut over a device mesh, maybe with replicas), ShardedTensors (FSDP1
without a mesh) or whole tensors. The files are unpickled by torch's weights-only loader, which makes objects of an
allow-list only, and their bytes are mapped, not read. A process group is not needed: of a DTensor its local part and
the rank's place in the mesh are enough, and ShardedTensor, which asks for a process group, has a stand-in here.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from trinity_sync.checkpoint.reading.pieces import Assembled, Piece, TensorInfo, WeightsError, assembled, loading_fault
from trinity_sync.checkpoint.reading.records import Record
from trinity_sync.weights.tensors import from_torch

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_LOADING = threading.Lock()
"""torch's allow-list is one for the process: what one load adds, another must not take away."""


class _ShardedTensor(torch.Tensor):
    """Stands in for torch's ShardedTensor, which cannot be unpickled without a process group."""

    local: list[Record]
    announced: Record

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.local, self.announced = state[0], state[1]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise NotImplementedError(f"{func} on a tensor that only describes its parts")


def _nested_class(owner: object, name: str) -> type[Record]:
    """Stand in for ``getattr``, by which the pickle of a ShardedTensor names a nested class."""
    return Record


_SHARDED = "torch.distributed._shard"
_STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (_ShardedTensor, f"{_SHARDED}.sharded_tensor.api.ShardedTensor"),
    (_nested_class, "builtins.getattr"),
    *(
        (Record, f"{_SHARDED}.{path}")
        for path in (
            "metadata.ShardMetadata",
            "sharded_tensor.shard.Shard",
            "sharded_tensor.metadata.ShardedTensorMetadata",
            "sharded_tensor.metadata.TensorProperties",
            "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
            "sharding_spec.api.EnumerableShardingSpec",
        )
    ),
    (Record, "torch.distributed.remote_device._remote_device"),
]


def shard_files(folder: Path) -> list[Path]:
    """List the model files in a folder, by rank; empty where it has none.

    Where files of several numbers of ranks lie side by side (a job that was started again with another number),
    ``fsdp_config.json`` says which are the ones.

    Raises:
        WeightsError: a rank's file is missing, or it is not known which files belong together.
    """
    found = {(int(match[1]), int(match[2])): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not found:
        return []
    sizes = sorted({ranks for ranks, _ in found})
    world_size = _world_size(folder / "fsdp_config.json")
    if world_size is None:
        if len(sizes) > 1:
            raise WeightsError(
                f"{folder} holds model files of {' and of '.join(map(str, sizes))} ranks; which to read?"
            )
        (world_size,) = sizes
    missing = [rank for rank in range(world_size) if (world_size, rank) not in found]
    if missing:
        name = f"model_world_size_{world_size}_rank_{missing[0]}.pt"
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"{folder / name} is missing{more}: a model of {world_size} ranks needs the files of all")
    return [found[world_size, rank] for rank in range(world_size)]


def _world_size(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["world_size"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def open_shards(files: list[Path]) -> dict[str, Assembled]:
    """Open the tensors of a model, under the names of its state dict.

    Args:
        files: one file per rank, see `shard_files`.

    Raises:
        WeightsError: a file is damaged or holds something else, or the ranks' files contradict each other.
    """
    infos: dict[str, tuple[TensorInfo, Path]] = {}
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        state = _load(file)
        if infos and state.keys() != infos.keys():
            differing = sorted(state.keys() ^ infos.keys())
            raise WeightsError(f"{file} and {files[0]} hold different tensors, such as {differing[0]}")
        for name, value in state.items():
            info, found = _pieces(file, name, value)
            known, first = infos.setdefault(name, (info, file))
            if known != info:
                raise WeightsError(f"{name} is {known} in {first}, but {info} in {file}")
            pieces.setdefault(name, []).extend(found)
    return {name: assembled(name, info, pieces[name]) for name, (info, _) in infos.items()}


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        with _LOADING, _quiet_meshes(), torch.serialization.safe_globals(_STAND_INS):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises nearly anything for a damaged file
        raise WeightsError(
            f"{file} cannot be read, it is damaged or no file of weights: {loading_fault(error)}"
        ) from error
    if not isinstance(state, Mapping) or not state:
        raise WeightsError(f"{file} holds no state dict, but a {type(state).__name__}")
    odd = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, torch.Tensor)]
    if odd:
        raise WeightsError(f"{file} holds something else than tensors, such as {odd[0]!r}")
    return state


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Keep a mesh that is unpickled from logging that it misses its process groups, which are not needed to read."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _pieces(file: Path, name: str, value: torch.Tensor) -> tuple[TensorInfo, list[Piece]]:
    try:
        info = TensorInfo(from_torch(value.dtype), tuple(value.shape))
        if isinstance(value, DTensor):
            start, sizes = _box(value)
            local = [(start, sizes, value._local_tensor)]
        elif isinstance(value, _ShardedTensor):
            info = TensorInfo(info.dtype, tuple(value.announced.size))
            local = [
                (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), shard.tensor)
                for shard in value.local
            ]
        else:
            local = [((0,) * value.ndim, info.shape, value)]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise WeightsError(f"{file}: {name} cannot be understood: {type(error).__name__}: {error}") from error
    for _, sizes, tensor in local:
        if tuple(tensor.shape) != sizes:
            raise WeightsError(
                f"{file} holds {list(tensor.shape)} of {name}, whose placement says {list(sizes)} of {list(info.shape)}"
            )
    return info, [Piece(file, start, sizes, tensor.detach) for start, sizes, tensor in local]


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (start, sizes) of the local part. torch cuts chunks of the rounded-up size, the last ones smaller or
    empty.

    Raises:
        ValueError: a placement that FSDP does not make.
    """
    mesh_sizes, coordinate = _place(tensor.device_mesh)
    start, sizes = [0] * tensor.ndim, list(tensor.shape)
    for placement, ranks, at in zip(tensor.placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise ValueError(f"its placement {placement} is none of FSDP's")
        chunk = -(-sizes[placement.dim] // ranks)
        before = min(at * chunk, sizes[placement.dim])
        start[placement.dim] += before
        sizes[placement.dim] = min(chunk, sizes[placement.dim] - before)
    return tuple(start), tuple(sizes)


def _place(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes of the mesh, the rank's place in it). Releases of torch before 2.9 kept the mesh as a tensor."""
    kept = vars(mesh).get("mesh")
    sizes = kept.shape if isinstance(kept, torch.Tensor) else mesh.shape
    coordinate = vars(mesh)["_coordinate_on_dim"]
    if coordinate is None:
        raise ValueError("the rank that wrote it is not part of its mesh")
    return tuple(sizes), tuple(coordinate)
