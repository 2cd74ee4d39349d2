"""What megatron-core's distributed optimizer needs so that torch's Adam can be saved and loaded.

Apex's and Transformer Engine's Adam keep one step count per group of parameters; torch's keeps one tensor per
parameter, and creates its state only at the first step. megatron-core 0.16.1 does not follow it everywhere. With the
other two nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_STATES = ("param", "exp_avg", "exp_avg_sq")


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """megatron-core's optimizers whose inner one is torch's Adam, the distributed ones around it."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(getattr(one, "optimizer", None), torch.optim.Adam | torch.optim.AdamW):
            yield one


def materialise(optimizer: Any) -> None:
    """Give each parameter the state that torch's Adam would create at the first step: without it an optimizer that has
    not stepped yet can be neither saved nor loaded.
    """
    for one in inner_optimizers(optimizer):
        inner = one.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0, dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }


def load(optimizer: Any, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, with torch's step counts.

    megatron-core looks for a saved tensor of each kind that the live state has, and a step is not among them: it
    travels with the groups. It then gives one step tensor to all parameters, so that each step would count once per
    parameter.
    """
    distributed = list(inner_optimizers(optimizer))
    for one in distributed:
        one._set_main_param_and_optimizer_states = _with_step(one)
    try:
        optimizer.load_state_dict(state)
    finally:
        for one in distributed:
            del one._set_main_param_and_optimizer_states
    for one in distributed:
        for of_parameter in one.optimizer.state.values():
            of_parameter["step"] = of_parameter["step"].clone()


class HostCopies:
    """Copies of the optimizers' states in host memory that is kept from save to save.

    megatron-core gathers a fully reshardable state over the data-parallel ranks through fresh buffers, five passes over
    the bytes. Where there is one such rank, there is nothing to gather, and this makes it one pass.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    @contextmanager
    def used_by(self, optimizer: Any) -> Iterator[None]:
        """Inside, the optimizers that have no data-parallel peers are copied so. What was copied before is overwritten:
        it has to be written by now.
        """
        alone = [
            one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if one.data_parallel_group.size() == 1
        ]
        for index, one in enumerate(alone):
            one.get_parameter_state_dp_zero = partial(self._state, index, one)
        try:
            yield
        finally:
            for one in alone:
                del one.get_parameter_state_dp_zero

    def _state(self, index: int, one: Any, **_: Any) -> dict[Any, Any]:
        """What megatron-core's function of this name returns on its first rank."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, of_buffer in enumerate(one.gbuf_ranges):
            for dtype, buckets in of_buffer.items():
                numel = one.buffers[number].numel_unpadded
                world = {name: self._place((index, number, name), numel) for name in _STATES}
                start = 0
                for bucket, ranges in zip(one.buffers[number].buckets, buckets, strict=True):
                    for parameter, places in ranges["param_map"].items():
                        tensors = one._get_main_param_and_optimizer_states(parameter)
                        within = slice(start + places["gbuf_local"].start, start + places["gbuf_local"].end)
                        for name, target in world.items():
                            target[within].copy_(tensors[name].detach())
                    start += bucket.numel_unpadded
                state[number] = {dtype: {**world, "numel_unpadded": numel}}
        return state

    def _place(self, key: Any, numel: int) -> torch.Tensor:
        if key not in self._kept:
            pinned = torch.cuda.is_available()
            self._kept[key] = torch.zeros(numel, dtype=torch.float32, pin_memory=pinned)
        return self._kept[key]


def _with_step(one: Any) -> Any:
    set_states = one._set_main_param_and_optimizer_states

    def with_step(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = one.model_param_group_index_map[model_param]
        step = one.optimizer.state[one.optimizer.param_groups[group]["params"][order]]["step"]
        set_states(model_param, {**tensors, "step": step})

    return with_step
