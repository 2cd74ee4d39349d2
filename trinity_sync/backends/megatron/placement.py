"""Which rectangles of which Hugging Face tensors a local Megatron parameter holds, and where in it they lie.

megatron-core cuts a model over tensor-parallel ranks and keeps some tensors as one:

- vocabulary (embedding, output layer): rows, the last rank's padded with rows that are nobody's;
- query, key and value: by groups of heads; in a group the query heads, then the key, then the value;
- gate and up projections: a rank holds its rows of the gate above its rows of up;
- the layers behind them (output of attention, down projection): columns;
- norms and the routers of experts: the same on every rank, so the first contributes them;
- experts: each is cut as a layer without experts would be, over the same ranks.

Pure geometry over names and shapes; `backend` knows the model, its pipeline stage and the replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trinity_sync.errors import ConfigError
from trinity_sync.weights.shards import Rect, Shard, listed, row_slice, whole
from trinity_sync.weights.wire import FP32, Wire

# An expert's parameter where each expert is a module of its own, and where all are parameters of one.
_OWN_MODULE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)$")
_NUMBERED = re.compile(r"(\.experts\.linear_fc\d\.weight)(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What fixes the cut of a model.

    Attributes:
        heads: query heads.
        groups: key and value heads.
        head_size: elements of one head.
        vocabulary: rows of the embedding, without padding.
        tp_rank, tp_size: this rank among those that share each layer.
    """

    heads: int
    groups: int
    head_size: int
    vocabulary: int
    tp_rank: int
    tp_size: int


@dataclass(frozen=True)
class Piece:
    """A shard and the view of the local parameter that holds its elements, in the shard's order."""

    shard: Shard
    view: Callable[[torch.Tensor], torch.Tensor]


def dtypes_of(hf_names: Iterable[str], held: str, wire: Wire) -> dict[str, str]:
    """In which dtype each of the Hugging Face tensors travels that a local parameter is made of.

    Args:
        hf_names: of the tensors.
        held: dtype of the parameter; as all, safetensors' name of it.
        wire: the dtypes of the version.

    Raises:
        ConfigError: one is to be kept in fp32, and the engine has rounded it.
    """
    found = {name: wire.of(name, held) for name in hf_names}
    rounded = sorted(name for name, dtype in found.items() if dtype == FP32 not in (held, wire.dtype))
    if rounded:
        raise ConfigError(
            f"sync.keep_fp32 keeps {listed(rounded)} in fp32, which backend=megatron trains in {held} with a master "
            "copy of its own; use backend=fsdp2, or leave it out (sync.keep_fp32=[] keeps nothing)"
        )
    return found


def pieces(
    name: str, hf_names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry
) -> list[Piece]:
    """What this rank contributes of a local parameter; nothing where it only repeats another rank's.

    Args:
        name: megatron-core's, such as ``"decoder.layers.0.mlp.linear_fc1.weight"``.
        hf_names: the Hugging Face tensors that it is made of, in mbridge's order.
        shape: the shape of the local parameter.
        dtypes: in which the tensors travel, by their names, see `dtypes_of`.
        at: this rank's place in the model.

    Raises:
        NotImplementedError: a parameter of a kind that is not known here.
    """
    name = _NUMBERED.sub(r"\1", name)
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        found = _vocabulary(hf_names[0], shape, dtypes, at)
    elif name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        found = _attention(hf_names, shape, dtypes, at)
    elif name.endswith("linear_fc1.weight"):
        found = _gate_and_up(hf_names, shape, dtypes, at)
    elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        found = [_columns(hf_names[0], shape, dtypes, at)]
    elif name.endswith(("norm.weight", "layer_norm_weight", "router.weight")):
        found = [Piece(whole(hf_names[0], dtypes[hf_names[0]], shape), _itself)] if at.tp_rank == 0 else []
    else:
        raise NotImplementedError(f"{name}: no rule says how tensor-parallel ranks share it")
    return [piece for piece in found if piece.shard.rects]


def among_all_experts(name: str, first: int) -> str:
    """Name an expert's parameter by its number among the experts of all expert-parallel ranks; others keep their name.

    Args:
        name: the rank's own name of it. Experts are modules of their own (megatron-core's layers) or parameters of one
            (Transformer Engine's), and named as the latter.
        first: number of the rank's first expert.
    """
    numbered = _OWN_MODULE.sub(r".experts.\2\1", name)
    return _NUMBERED.sub(lambda found: f"{found[1]}{first + int(found[2])}", numbered)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rows(
    name: str, full: Sequence[int], dtypes: Mapping[str, str], at: Geometry, view: Callable[..., torch.Tensor]
) -> Piece:
    """This rank's equal share of the rows of a tensor."""
    count = full[0] // at.tp_size
    return Piece(row_slice(name, dtypes[name], full, at.tp_rank * count, (at.tp_rank + 1) * count), view)


def _vocabulary(name: str, shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> list[Piece]:
    start = at.tp_rank * shape[0]
    stop = min(start + shape[0], at.vocabulary)
    if stop <= start:
        return []
    shard = row_slice(name, dtypes[name], (at.vocabulary, *shape[1:]), start, stop)
    return [Piece(shard, lambda local: local[: stop - start])]


def _attention(names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> list[Piece]:
    per_group = at.heads // at.groups
    spans = ((0, per_group), (per_group, per_group + 1), (per_group + 1, per_group + 2))

    def part(first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda local: local.view(-1, per_group + 2, at.head_size, *shape[1:])[:, first:last]

    return [
        _rows(name, (at.groups * (last - first) * at.head_size, *shape[1:]), dtypes, at, part(first, last))
        for name, (first, last) in zip(names, spans, strict=True)
    ]


def _gate_and_up(names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> list[Piece]:
    half = shape[0] // 2
    views = (lambda local: local[:half], lambda local: local[half:])
    full = (half * at.tp_size, *shape[1:])
    return [_rows(name, full, dtypes, at, view) for name, view in zip(names, views, strict=True)]


def _columns(name: str, shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> Piece:
    rows, columns = shape
    rect = Rect(0, 0, at.tp_rank * columns, rows, columns)
    return Piece(Shard(name, dtypes[name], (rows, columns * at.tp_size), (rect,)), _itself)
