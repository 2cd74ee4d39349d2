"""How tokens go to their experts on a CPU: there is no stream on which counts come to the host, and gloo gathers and
scatters tensors of one size only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

_gather_equal = mappings._gather_along_first_dim
_reduce_scatter_equal = mappings._reduce_scatter_along_first_dim


class HostAllToAll(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher, whose counts are on the host already. Its groups have to be gloo's."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on a CPU"  # else it makes one
        super().__init__(*args, **kwargs)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name, None)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
        return tokens_per_expert


def gather(
    mine: torch.Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """megatron-core's `_gather_along_first_dim`: what the ranks of a group have, one below the other. Collective.

    Args:
        mine: of this rank.
        group: of gloo.
        output_split_sizes: rows of each rank; None: of all as many.
        use_global_buffer: for equal ones.
    """
    ranks = group.size()
    if output_split_sizes is None or ranks == 1:
        whole: torch.Tensor = _gather_equal(mine, group, output_split_sizes, use_global_buffer)
        return whole
    found = mine.new_empty((sum(output_split_sizes), *mine.shape[1:]))
    dist.all_to_all_single(found, torch.cat([mine] * ranks), [*output_split_sizes], [len(mine)] * ranks, group=group)
    return found


def reduce_scatter(
    mine: torch.Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """megatron-core's `_reduce_scatter_along_first_dim`: of the sum over a group, the rows of this rank. Collective.

    Args:
        mine: of this rank, what it adds for each rank, one below the other.
        group: of gloo.
        input_split_sizes: rows for each rank; None: for all as many.
        use_global_buffer: for equal ones.
    """
    ranks = group.size()
    if input_split_sizes is None or ranks == 1:
        part: torch.Tensor = _reduce_scatter_equal(mine, group, input_split_sizes, use_global_buffer)
        return part
    rows = input_split_sizes[group.rank()]
    found = mine.new_empty((ranks, rows, *mine.shape[1:]))
    dist.all_to_all_single(found.flatten(0, 1), mine.contiguous(), [rows] * ranks, [*input_split_sizes], group=group)
    return found.sum(0)


def install() -> None:
    """Have layers that are made from now on go these ways."""
    moe_layer.MoEAlltoAllTokenDispatcher = HostAllToAll
    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter
