"""Reads weights in the files of verl (``model_world_size_W_rank_R.pt``), of Hugging Face folders, and of weights-only
checkpoints; and adapters, alone or merged.

Each file of verl's is a pickled state dict of DTensors (cut over a device mesh, maybe with replicas), ShardedTensors
(FSDP1 without a mesh) or whole tensors. torch's weights-only loader unpickles it, which makes only objects of an
allow-list, and the bytes are mapped, not read. No process group is needed: a DTensor is read through its local part and
the rank's place in the mesh, and ShardedTensor, which asks for a process group, has a stand-in.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, Replicate, Shard

from trinity_sync.checkpoint.reading.tensor_pieces import (
    AssembledTensor,
    FileBox,
    Record,
    TensorInfo,
    TensorReader,
    View,
    WeightsError,
    assembled,
)
from trinity_sync.errors import RunError
from trinity_sync.models.files import CONFIG, INDEX, IndexedFile, index_of
from trinity_sync.protocol.parts import rank_file
from trinity_sync.weights import lora, shards
from trinity_sync.weights.shard_file import ShardFileError, open_shard_file
from trinity_sync.weights.shards import Rect, listed, matrix_view
from trinity_sync.weights.tensors import byte_tensor, from_torch, loading_fault, saved_tensors, storage_of, to_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_LOADING = threading.Lock()
"""torch's allow-list is global to the process: one load must not remove what another has added."""


class _ShardedTensor(torch.Tensor):
    """Stands in for torch's ShardedTensor, which needs a process group to be unpickled."""

    local: list[Record]
    announced: Record

    def __setstate__(self, state: tuple[list[Record], Record, *tuple[object, ...]]) -> None:
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
    """List the model files in a folder, by rank; empty if there are none. With files of several numbers of ranks (a job
    that was restarted with another number), ``fsdp_config.json`` decides. Raises WeightsError if a rank's file is
    missing, or it is not known which files belong together.
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
        name = rank_file("model", world_size, missing[0])
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


def open_shards(files: list[Path]) -> dict[str, AssembledTensor]:
    """Open the tensors of a model, under the names of its state dict. Raises WeightsError."""
    infos: dict[str, tuple[TensorInfo, Path]] = {}
    pieces: dict[str, list[FileBox]] = {}
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
    except Exception as error:  # torch raises nearly any error for a damaged file
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
    """Silence the warning of an unpickled mesh that it has no process groups, which are not needed here."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _pieces(file: Path, name: str, value: torch.Tensor) -> tuple[TensorInfo, list[FileBox]]:
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
    return info, [FileBox(file, start, sizes, tensor.detach) for start, sizes, tensor in local]


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (start, sizes) of the local part. torch cuts chunks of the rounded-up size, and the last ones are smaller
    or empty. Raises ValueError for a placement that FSDP does not make.
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


def _place(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes of the mesh, the rank's place in it). Before 2.9, torch kept the mesh as a tensor."""
    kept = vars(mesh).get("mesh")
    sizes = kept.shape if isinstance(kept, torch.Tensor) else mesh.shape
    coordinate = vars(mesh)["_coordinate_on_dim"]
    if coordinate is None:
        raise ValueError("the rank that wrote it is not part of its mesh")
    return tuple(sizes), tuple(coordinate)


# LoRA adapters: their tensors under peft's names, and adapters merged into their base.


def adapter_form(sources: Mapping[str, TensorReader], place: Path) -> dict[str, TensorReader] | None:
    """Return an adapter's tensors by peft's names; None: the tensors are not an adapter's. Raises WeightsError: adapter
    and base are stored together.
    """
    # A model that is not wrapped by peft may have layers of such names itself.
    adapter = [name for name in sources if name.startswith(lora.PREFIX) and lora.is_adapter(name)]
    if not adapter:
        return None
    if len(adapter) < len(sources):
        raise WeightsError(
            f"{place} holds a model together with a LoRA adapter, such as {adapter[0]}; merge them with verl"
        )
    return {lora.saved_name(name): sources[name] for name in sorted(adapter)}


def read_adapter_config(path: Path) -> Mapping[str, object]:
    """Read an ``adapter_config.json``. Raises WeightsError if it cannot be read, or is not of LoRA."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.get("peft_type") != "LORA":
        raise WeightsError(f"{path} describes no LoRA adapter")
    return body


def merge(
    adapter: Mapping[str, TensorReader],
    config: Mapping[str, object],
    base: Mapping[str, TensorReader],
    folder: Path | None,
) -> dict[str, TensorReader]:
    """Return the tensors of the base with the adapter's products added. Raises WeightsError if the adapter does not fit
    the model, or its kind cannot be merged. `config`: the ``adapter_config.json``.
    """
    try:
        scale, pairs = lora.scaling(config), lora.pairs(adapter)
    except RunError as error:
        raise WeightsError(f"the adapter cannot be merged: {error}") from error
    if folder is not None and pairs.keys() - base.keys():
        names = renamed(folder)
        pairs = {names.get(name, name): pair for name, pair in pairs.items()}
    absent = sorted(pairs.keys() - base.keys())
    if absent:
        why = next(filter(None, (_not_apart(name, base, folder) for name in absent)), None)
        raise WeightsError(why or f"the adapter belongs to another model: the base has no {listed(absent)}")
    transposed = bool(config.get("fan_in_fan_out"))
    found = dict(base)
    for name, pair in pairs.items():
        a, b = adapter[pair.a], adapter[pair.b]
        outer, inner = b.info.shape[0], a.info.shape[-1]
        shape = (inner, outer) if transposed else (outer, inner)
        if base[name].info.shape != shape:
            raise WeightsError(
                f"the adapter belongs to another model: it is for a {name} of {list(shape)}, the base has "
                f"{list(base[name].info.shape)}"
            )
        found[name] = _MergedTensor(base[name].info, base[name], a, b, scale, transposed)
    return found


def _not_apart(name: str, base: Mapping[str, TensorReader], folder: Path | None) -> str | None:
    """Return why the base saves no tensor of this name although its model has the layer; None: the model does not have
    it.
    """
    layer, advice = name.removesuffix(".weight").removesuffix(".base_layer"), "export it with --adapter"
    if any(other.startswith(f"{layer}.") for other in base):
        return f"the adapter is for {layer}, which is fused experts: merge it with peft, or {advice}"
    model = made_of(folder) if folder is not None else None
    weight = None if model is None else dict(model.named_parameters(remove_duplicate=False)).get(name)
    if model is None or weight is None:
        return None
    tied = next(other for other, each in model.named_parameters() if each is weight)
    return (
        f"the adapter is for {layer}, and this model ties {name} to {tied} (tie_word_embeddings in {folder}/{CONFIG}): "
        f"merged, they would no longer be one tensor; {advice}, or train one without that layer"
    )


@dataclass(frozen=True, slots=True)
class _MergedTensor:
    """A weight with its adapter added: read in float32; `info` has the weight's dtype."""

    info: TensorInfo
    weight: TensorReader
    a: TensorReader
    b: TensorReader
    scale: float
    transposed: bool

    def read(self) -> torch.Tensor:
        weight = self.weight.read().float()
        return lora.merged(weight, self.a.read(), self.b.read(), self.scale, transposed=self.transposed)


# Hugging Face folders: safetensors files, one or several with an index; and the folder of a model's config.


WHOLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    info: TensorInfo

    def read(self) -> torch.Tensor:
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.file}: {self.name} cannot be read: {error}") from error
        return tensor


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has a model's weights as safetensors."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def open_hugging_face(folder: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a model, under their stored names, of the files that transformers would load: one with the
    usual name goes before an index, and an index before all other files. If several files have a tensor, the index
    decides. Raises WeightsError.
    """
    index = None
    if (folder / WHOLE).is_file():
        files = [folder / WHOLE]
    elif (index := _index(folder / INDEX)) is not None:
        files = sorted({folder / name for name in index.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, info in _infos(file).items():
            if name in tensors:
                raise WeightsError(f"{tensors[name].file} and {file} both hold {name}")
            tensors[name] = StoredTensor(file, name, info)
    for name, file_name in (index or {}).items():
        if name not in tensors:
            raise WeightsError(f"{folder / INDEX} says that {name} is in {file_name}, but it is not")
    return tensors


def _index(path: Path) -> dict[str, str] | None:
    try:
        return index_of(path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _infos(file: Path) -> dict[str, TensorInfo]:
    try:
        with IndexedFile(file, framework="pt") as opened:
            infos = {}
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                piece = opened.get_slice(name)
                infos[name] = TensorInfo(piece.get_dtype(), tuple(piece.get_shape()))
    except FileNotFoundError:
        raise WeightsError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged or no safetensors file: {error}") from error
    unknown = {info.dtype for info in infos.values()} - set(shards.NAMES)
    if unknown:
        raise WeightsError(f"{file} holds tensors of dtype {sorted(unknown)[0]}, which cannot be read")
    return infos


# Weights-only checkpoints of this program: ``weights_rank-*.safetensors``, each with its layout in the header.


def part_files(folder: Path) -> list[Path]:
    """List the files of the parts in a folder, by name; empty if there are none."""
    return sorted(folder.glob("weights_*.safetensors"))


def open_parts(files: list[Path]) -> dict[str, AssembledTensor]:
    """Open the tensors of all parts together, under their Hugging Face names. Raises WeightsError if a file is damaged,
    or the parts contradict each other or are incomplete.
    """
    infos: dict[str, tuple[TensorInfo, Path]] = {}
    pieces: dict[str, list[FileBox]] = {}
    for file in files:
        try:
            layout, data = open_shard_file(file)
        except ShardFileError as error:
            raise WeightsError(str(error)) from error
        for shard, offset in layout.entries:
            info = TensorInfo(shard.dtype, shard.shape)
            known, first = infos.setdefault(shard.name, (info, file))
            if known != info:
                raise WeightsError(f"{shard.name} is {known} in {first}, but {info} in {file}")
            local = data[offset : offset + shard.nbytes]
            pieces.setdefault(shard.name, []).extend(_piece(file, info, rect, local) for rect in shard.rects)
    return {
        name: assembled(name, info, pieces[name], grid=matrix_view(info.shape)) for name, (info, _) in infos.items()
    }


def _piece(file: Path, info: TensorInfo, rect: Rect, local: memoryview) -> FileBox:
    dtype = to_torch(info.dtype)

    def load() -> torch.Tensor:
        nbytes = rect.rows * rect.cols * dtype.itemsize
        return byte_tensor(local[rect.offset : rect.offset + nbytes]).view(dtype)

    return FileBox(file, (rect.row, rect.col), (rect.rows, rect.cols), load)


# From the names of a model's state dict to those that ``save_pretrained`` writes.


def saved_form(sources: Mapping[str, TensorReader], config: Path) -> dict[str, TensorReader]:
    """Map stored tensors to the tensors that ``save_pretrained`` would write, by their names there.

    Sources of an architecture that transformers does not know (the model's own code, which is not run) are returned
    unchanged. Raises WeightsError. `config`: folder with the model's ``config.json``.
    """
    model = made_of(config)
    if model is None:
        return dict(sources)
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    saved = saved_tensors(model)
    known = {**saved, **state}
    unknown = sorted(sources.keys() - known.keys())
    if unknown:
        raise WeightsError(
            f"{type(model).__name__}, which {config / CONFIG} describes, has no {listed(unknown)}, which is stored"
        )
    names: dict[int, str] = {}
    for name in state:
        if name in sources:
            names.setdefault(storage_of(state[name]), name)
    missing = sorted(name for name, tensor in saved.items() if name not in sources and storage_of(tensor) not in names)
    if missing:
        raise WeightsError(
            f"of the {type(model).__name__} that {config / CONFIG} describes, {listed(missing)} is missing"
        )
    found: dict[str, TensorReader] = {}
    for name, tensor in saved.items():
        stored = name if name in sources else names[storage_of(tensor)]
        source, whole = sources[stored], known[stored]
        if source.info.shape != tuple(whole.shape):
            raise WeightsError(
                f"{stored} is stored as {list(source.info.shape)}, the config in {config} says {list(whole.shape)}"
            )
        offset = int(tensor.storage_offset()) - int(whole.storage_offset())
        same = (tuple(tensor.shape), tensor.stride(), offset) == (tuple(whole.shape), whole.stride(), 0)
        found[name] = source if same else View(source, tuple(tensor.shape), tensor.stride(), offset)
    return found


def renamed(config: Path) -> dict[str, str]:
    """Return the parameters that ``save_pretrained`` writes whole under another name: saved name -> name in the model.
    Raises WeightsError as `made_of`.
    """
    model = made_of(config)
    if model is None:
        return {}
    saved = {(storage_of(one), one.shape): name for name, one in saved_tensors(model).items()}
    names = {name: saved.get((storage_of(one), one.shape), name) for name, one in model.named_parameters()}
    return {name: other for name, other in names.items() if name != other}


def made_of(config: Path) -> torch.nn.Module | None:
    """Build the architecture of a config without storage; None: transformers does not know it. Raises WeightsError if
    the config cannot be read, or no model can be made of it.
    """
    path = config / CONFIG
    try:
        architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    import transformers

    kind = getattr(transformers, str(architectures[0]), None) if architectures else None
    if kind is None:
        return None
    try:
        loaded = transformers.AutoConfig.from_pretrained(config)
        with torch.device("meta"):
            model: torch.nn.Module = kind._from_config(loaded)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{path} does not describe a model that transformers can make: {reason}") from error
    return model
