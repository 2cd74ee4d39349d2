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


def apart_from_buffers(model: torch.nn.Module, state: dict[str, object]) -> dict[str, object]:
    """Put copies in place of the buffers in a state dict of the model, and return it. A forward pass may change them,
    where the parameters stay what they are until the optimizer's step. They are small.
    """
    live = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    for name, value in state.items():
        if type(value) is torch.Tensor and value.untyped_storage()._cdata in live:
            state[name] = value.clone()
    return state


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the optimizer's state dict. Its tensors are live; what else is in it, such as a count of steps that is a
    number, does not change with the optimizer.
    """
    state = optimizer.state_dict()
    held = {key: dict(value) if isinstance(value, dict) else value for key, value in state["state"].items()}
    return {**state, "state": held}
