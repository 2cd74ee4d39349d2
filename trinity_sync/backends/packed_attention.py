"""Attention among packed sequences without flash-attn, by PyTorch's `scaled_dot_product_attention`.

verl passes a model the sequences of a micro-batch in one row, each with positions of its own, as flash-attn's kernels
for variable lengths expect them. transformers' sdpa would make a mask of all tokens by all tokens. Here only queries,
keys and values are padded for the attention, with sequences of similar length, and the rest of the model sees no
padding. Rows are padded on the right, so causality keeps tokens from seeing it.

With Ulysses' sequence parallelism a rank has a slice of the row; verl's all-to-all turns slices of all heads into the
whole row of some heads, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from trinity_sync.backends.option import ATTENTION

_LONGER = 1.25
"""Largest ratio of lengths among sequences that are padded together."""


def register() -> None:
    """Register the attention with transformers in this process, under the name `ATTENTION`."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # no mask without padding


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sequence. Collective among the ranks that share a sequence.

    Queries, keys and values are of shape (1, heads, tokens, head size), keys and values with as many heads or fewer;
    `position_ids` (1, tokens), from 0 in each sequence. Returns (1, tokens, heads, head size), and no weights.
    """
    if attention_mask is not None or position_ids is None or len(query) != 1:
        raise ValueError(f"{ATTENTION} takes packed sequences: one row with positions and without a mask")
    ranks = get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        position_ids = _of_all(position_ids)
        query, key, value = (_whole_row(heads, ranks) for heads in (query, key, value))
    groups = _groups(position_ids[0])
    found = [_attend(query, key, value, group, scaling, dropout) for group in groups]
    places = torch.cat([group.tokens.flatten()[group.kept] for group in groups])
    tokens = torch.cat(found).index_select(0, places.argsort())[None]
    if ranks > 1:
        tokens = gather_heads_scatter_seq(tokens, head_dim=2, seq_dim=1)
    return tokens, None


@dataclass(frozen=True)
class _Group:
    """Sequences that are padded together."""

    tokens: torch.Tensor  # (sequences, longest): places in the packed row; arbitrary after the end of a sequence
    kept: torch.Tensor  # places of the sequences' tokens in `tokens`, flattened


def _groups(positions: torch.Tensor) -> list[_Group]:
    starts = (positions == 0).nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([len(positions)]))
    kinds = (lengths.double().log() / math.log(_LONGER)).ceil()
    groups = []
    for kind in kinds.unique():
        first, length = starts[kinds == kind, None], lengths[kinds == kind, None]
        inside = torch.arange(int(length.max()), device=positions.device)
        tokens = (first + inside).clamp(max=len(positions) - 1)
        groups.append(_Group(tokens, (inside < length).flatten().nonzero()[:, 0]))
    return groups


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: _Group, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Attend within the sequences of a group; of shape (tokens, heads, head size)."""

    def padded(packed: torch.Tensor) -> torch.Tensor:
        rows = packed[0].transpose(0, 1).index_select(0, group.tokens.flatten())
        heads: torch.Tensor = rows.unflatten(0, group.tokens.shape).transpose(1, 2)
        return heads

    found: torch.Tensor = scaled_dot_product_attention(
        padded(query),
        padded(key),
        padded(value),
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).flatten(0, 1).index_select(0, group.kept)


def _of_all(positions: torch.Tensor) -> torch.Tensor:
    group = get_ulysses_sequence_parallel_group()
    slices = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slices, positions.contiguous(), group=group)
    return torch.cat(slices, dim=-1)


def _whole_row(heads: torch.Tensor, ranks: int) -> torch.Tensor:
    """Turn a slice of the row with all heads into the row with this rank's heads; repeat fewer heads than ranks."""
    repeated = heads.repeat_interleave(max(ranks // heads.shape[1], 1), dim=1)
    whole: torch.Tensor = gather_seq_scatter_heads(repeated, seq_dim=2, head_dim=1)
    return whole
