"""State dicts of what each rank holds, with both generations of FSDP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from verl.utils.fsdp_utils import get_fsdp_state_ctx


@contextmanager
def sharded(model: torch.nn.Module, *, offload: bool) -> Iterator[None]:
    """Inside, the state dicts of a model and of its optimizer are of this rank's shards.

    Args:
        model: wrapped by FSDP.
        offload: what FSDP1 gives lies on the CPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the deprecation of FSDP1's state-dict API on every use
        with get_fsdp_state_ctx(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=offload),
            ShardedOptimStateDictConfig(offload_to_cpu=offload),
        ):
            yield
