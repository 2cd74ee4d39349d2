"""What megatron-core's distributed optimizer needs so that torch's Adam can be saved and loaded.

Apex's and Transformer Engine's Adam keep one step count per group of parameters; torch's keeps one tensor per
parameter, and creates its state only at the first step. megatron-core 0.16.1 does not follow it everywhere. With the
other two nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


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


def _with_step(one: Any) -> Any:
    set_states = one._set_main_param_and_optimizer_states

    def with_step(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = one.model_param_group_index_map[model_param]
        step = one.optimizer.state[one.optimizer.param_groups[group]["params"][order]]["step"]
        set_states(model_param, {**tensors, "step": step})

    return with_step
