"""Reads checkpoints of torch.distributed.checkpoint: ``.metadata`` and ``__R_N.distcp``, with the model below a prefix.

``.metadata`` is a pickle. Its unpickler knows the few classes that belong there, through stand-ins that only keep
fields, and refuses others. Each chunk of a tensor is a small torch file inside a ``.distcp`` file, loaded by torch's
weights-only loader when it is needed.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import torch

from trinity_sync.checkpoint.reading.tensor_pieces import (
    AssembledTensor,
    FileBox,
    Record,
    TensorInfo,
    TensorReader,
    WeightsError,
    assembled,
)
from trinity_sync.models.files import CONFIG
from trinity_sync.weights.tensors import from_torch, loading_fault

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
    # by FSDP1 without a device mesh
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


def open_distributed(folder: Path, prefix: str) -> dict[str, AssembledTensor]:
    """Open the tensors whose keys begin with a prefix, under the rest of their keys. Raises WeightsError if a file is
    missing or damaged, or the chunks of a tensor do not cover it. `folder`: of a torch distributed checkpoint, with
    ``.metadata``. `prefix`: such as ``"model."``.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        tensors, places = _contents(metadata)
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing, without which {folder} cannot be read") from None
    except Exception as error:  # a damaged pickle raises nearly any error
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


def _open(folder: Path, key: str, entry: Record, places: _Places) -> AssembledTensor:
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


def _piece(folder: Path, key: str, start: tuple[int, ...], sizes: tuple[int, ...], place: Record) -> FileBox:
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
    return FileBox(file, start, sizes, load)


def _load(file: Path, key: str, offset: int, length: int) -> torch.Tensor:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly any error for a damaged file
        raise WeightsError(
            f"{file}: {key} at byte {offset} cannot be read, it is damaged: {loading_fault(error)}"
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"{file}: there is no tensor at byte {offset}, where {key} should be")
    return tensor.detach()


# The weights in a Megatron checkpoint (``model/dist_ckpt``), saved by any layout of ranks.


_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."

_WHOLE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",  # of a layer with experts
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def megatron_folder(place: Path) -> Path | None:
    """Return the folder of the model's weights: in an ``actor`` folder, or that folder itself; None: there is none."""
    for folder in (place / "model" / "dist_ckpt", place):
        if (folder / METADATA).is_file() and (folder / "metadata.json").is_file():
            return folder
    return None


def open_megatron(folder: Path, config: Path) -> dict[str, TensorReader]:
    """Open the tensors of a model that Megatron saved, under their Hugging Face names. Raises WeightsError if a file is
    missing or damaged, or the model is not a known one. `folder`: of a torch distributed checkpoint, with ``.metadata``
    and ``metadata.json``. `config`: folder with the model's ``config.json``, for heads and vocabulary, which the
    weights do not show.
    """
    try:
        fields = json.loads((config / CONFIG).read_text(encoding="utf-8"))
        heads, groups = int(fields["num_attention_heads"]), int(fields["num_key_value_heads"])
        vocabulary = int(fields["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{config / CONFIG} does not say heads and vocabulary: {error!r}") from error
    found: dict[str, TensorReader] = {}
    for key, stored in open_distributed(folder, "").items():
        if key.startswith(_LAYERS):
            for index, layer in enumerate(_apart(stored, "layer")):
                for name, source in _of_layer(key.removeprefix(_LAYERS), layer, heads // groups, groups):
                    found[f"model.layers.{index}.{name}"] = source
        elif key in _TOP:
            rows = min(vocabulary, stored.info.shape[0]) if stored.info.shape[1:] else stored.info.shape[0]
            found[_TOP[key]] = _cut(stored, (rows, *stored.info.shape[1:]), lambda whole, rows=rows: whole[:rows])
        else:
            raise WeightsError(f"{folder / METADATA} lists {key}, which no known model has")
    return found


@dataclass(frozen=True)
class _TensorPart:
    """A part of a stored tensor."""

    base: AssembledTensor
    info: TensorInfo
    part: Callable[[torch.Tensor], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.part(self.base.read()).reshape(self.info.shape).contiguous()


def _cut(base: AssembledTensor, shape: tuple[int, ...], part: Callable[..., torch.Tensor]) -> TensorReader:
    return _TensorPart(base, TensorInfo(base.info.dtype, shape), part)


def _apart(stored: AssembledTensor, what: str) -> Iterator[AssembledTensor]:
    """Yield the tensors along the first dimension of one tensor; each of its pieces lies in one of them."""
    if any(piece.sizes[0] != 1 for piece in stored.pieces):
        raise WeightsError(f"{stored.name} is stored in pieces of several {what}s, which cannot be read")
    count, *shape = stored.info.shape
    pieces = defaultdict(list)
    for piece in stored.pieces:
        pieces[piece.start[0]].append(replace(piece, start=piece.start[1:], sizes=piece.sizes[1:]))
    for index in range(count):
        yield AssembledTensor(
            f"{stored.name} of {what} {index}",
            TensorInfo(stored.info.dtype, tuple(shape)),
            stored.grid[1:],
            tuple(pieces[index]),
        )


def _of_layer(key: str, layer: AssembledTensor, per_group: int, groups: int) -> Iterator[tuple[str, TensorReader]]:
    """Yield the tensors in one stored tensor of a layer: (Hugging Face name below the layer, source)."""
    rows, *rest = layer.info.shape
    if key in _WHOLE:
        yield _WHOLE[key], layer
    elif key.startswith(_EXPERTS):
        for index, expert in enumerate(_apart(layer, "expert")):
            for name, source in _of_layer(f"mlp.{key.removeprefix(_EXPERTS)}", expert, per_group, groups):
                yield name.replace("mlp.", f"mlp.experts.{index}.", 1), source
    elif key in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        size = rows // (groups * (per_group + 2))
        spans: Mapping[str, tuple[int, int]] = {
            "q": (0, per_group),
            "k": (per_group, per_group + 1),
            "v": (per_group + 1, per_group + 2),
        }
        for name, (first, last) in spans.items():

            def part(whole: torch.Tensor, first: int = first, last: int = last) -> torch.Tensor:
                return whole.view(groups, per_group + 2, size, *rest)[:, first:last]

            shape = (groups * (last - first) * size, *rest)
            yield f"self_attn.{name}_proj.{key.rpartition('.')[2]}", _cut(layer, shape, part)
    elif key == "mlp.linear_fc1.weight":
        half = rows // 2
        parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "gate": lambda whole: whole[:half],
            "up": lambda whole: whole[half:],
        }
        for name, half_of in parts.items():
            yield f"mlp.{name}_proj.weight", _cut(layer, (half, *rest), half_of)
    else:
        raise WeightsError(f"{layer.name} is not a tensor of a known model")
