"""The weights in a Megatron checkpoint (``model/dist_ckpt``), whatever layout of ranks saved it.

megatron-core writes a checkpoint of torch.distributed.checkpoint under its own names, the tensors of all layers as one
with the layer as first dimension (those of experts with the expert as second), query, key and value fused by groups of
heads, gate above up, and the vocabulary padded. Here they come apart under the names of Hugging Face.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trinity_sync.checkpoint.reading.distributed import METADATA, open_distributed
from trinity_sync.checkpoint.reading.pieces import Assembled, Source, TensorInfo, WeightsError
from trinity_sync.models.files import CONFIG

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
    """Find the folder of the model's weights: in an ``actor`` folder, or that folder itself; None: there is none."""
    for folder in (place / "model" / "dist_ckpt", place):
        if (folder / METADATA).is_file() and (folder / "metadata.json").is_file():
            return folder
    return None


def open_megatron(folder: Path, config: Path) -> dict[str, Source]:
    """Open the tensors of a model that Megatron saved, under their Hugging Face names.

    Args:
        folder: a folder of torch's distributed checkpoints, with ``.metadata`` and ``metadata.json``.
        config: folder with the model's ``config.json``: heads and the size of the vocabulary are not in the weights.

    Raises:
        WeightsError: a file is missing or damaged, or the weights are not those of a model that is known here.
    """
    try:
        fields = json.loads((config / CONFIG).read_text(encoding="utf-8"))
        heads, groups = int(fields["num_attention_heads"]), int(fields["num_key_value_heads"])
        vocabulary = int(fields["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{config / CONFIG} does not say heads and vocabulary: {error!r}") from error
    found: dict[str, Source] = {}
    for key, stored in open_distributed(folder, "").items():
        if key.startswith(_LAYERS):
            for index, layer in enumerate(_apart(stored, "layer")):
                for name, source in _of_layer(key.removeprefix(_LAYERS), layer, heads // groups, groups):
                    found[f"model.layers.{index}.{name}"] = source
        elif key in _TOP:
            rows = min(vocabulary, stored.info.shape[0]) if stored.info.shape[1:] else stored.info.shape[0]
            found[_TOP[key]] = _cut(stored, (rows, *stored.info.shape[1:]), lambda whole, rows=rows: whole[:rows])
        else:
            raise WeightsError(f"{folder / METADATA} lists {key}, which no model that is known here has")
    return found


@dataclass(frozen=True)
class _Cut:
    """A part of a stored tensor."""

    base: Assembled
    info: TensorInfo
    part: Callable[[torch.Tensor], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.part(self.base.read()).reshape(self.info.shape).contiguous()


def _cut(base: Assembled, shape: tuple[int, ...], part: Callable[..., torch.Tensor]) -> Source:
    return _Cut(base, TensorInfo(base.info.dtype, shape), part)


def _apart(stored: Assembled, what: str) -> Iterator[Assembled]:
    """Yield the tensors that lie along the first dimension of one; each of its pieces lies in one of them."""
    if any(piece.sizes[0] != 1 for piece in stored.pieces):
        raise WeightsError(f"{stored.name} is stored in pieces of several {what}s, which is not read")
    count, *shape = stored.info.shape
    pieces = defaultdict(list)
    for piece in stored.pieces:
        pieces[piece.start[0]].append(replace(piece, start=piece.start[1:], sizes=piece.sizes[1:]))
    for index in range(count):
        yield Assembled(
            f"{stored.name} of {what} {index}",
            TensorInfo(stored.info.dtype, tuple(shape)),
            stored.grid[1:],
            tuple(pieces[index]),
        )


def _of_layer(key: str, layer: Assembled, per_group: int, groups: int) -> Iterator[tuple[str, Source]]:
    """Yield the tensors that one tensor of a layer is made of: (Hugging Face name below the layer, source)."""
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
        raise WeightsError(f"{layer.name} is no tensor of a model that is known here")
