"""Additions to megatron-core's distributed optimizer, so that torch's Adam can be saved and loaded.

Apex's and Transformer Engine's Adam keep one step count per group of parameters; torch's keeps one tensor per
parameter, and creates its state only at the first step. megatron-core 0.16.1 does not handle that everywhere. With the
other two nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from operator import add
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from trinity_sync.weights.shards import boxes

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

T = TypeVar("T")

ShardedStateDict: TypeAlias = dict[str, object]
"""A sharded state dict of megatron-core: nested containers of `ShardedTensor` and the like."""

_STATES = ("param", "exp_avg", "exp_avg_sq")


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """Yield megatron-core's distributed optimizers around torch's Adam."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(getattr(one, "optimizer", None), torch.optim.Adam | torch.optim.AdamW):
            yield one


def leave_out_scale(optimizer: MegatronOptimizer) -> None:
    """Leave the scale of gradients out of the optimizer's state: it is always 1, and no other engine saves one."""

    def without(state_dict: Callable[[], ShardedStateDict]) -> ShardedStateDict:
        return {name: value for name, value in state_dict().items() if name != "grad_scaler"}

    for one in inner_optimizers(optimizer):
        one.state_dict = partial(without, one.state_dict)


def materialise(optimizer: MegatronOptimizer) -> None:
    """Give each parameter the state that torch's Adam would create at the first step; without it an optimizer can be
    neither saved nor loaded before that step.
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


def load(optimizer: MegatronOptimizer, state: ShardedStateDict) -> None:
    """Call `optimizer.load_state_dict`, with torch's step counts.

    megatron-core looks for a saved tensor of each kind in the live state, but the step is saved with the groups. It
    then gives one step tensor to all parameters, so that each step would count once per parameter.
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


class OwnShards:
    """Has each rank describe its part of the optimizer's state, in the coordinates of the parameters.

    For a state that any layout can load (``fully_reshardable``) megatron-core gathers all of it over the data-parallel
    ranks, between two training steps, and distributes whole parameters. But a rank's part of a parameter is a range of
    its elements, hence a few rectangles (`boxes`), and the file format takes any rectangles: nothing has to move, and
    megatron-core's own loader assembles them.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.nn.Parameter, list[_Part]] = {}

    @contextmanager
    def used_by(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Have distributed optimizers describe their state so in ``sharded_state_dict`` during the block. Its tensors
        are live.
        """
        distributed = [
            one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(one, "gbuf_ranges")
        ]
        for one in distributed:
            one.sharded_param_state_fully_reshardable = partial(
                self._state, one, one.sharded_param_state_fully_reshardable
            )
        try:
            yield
        finally:
            for one in distributed:
                del one.sharded_param_state_fully_reshardable

    def _state(
        self,
        one: DistributedOptimizer,
        gathered: Callable[[ShardedStateDict, bool, object], T],
        model: ShardedStateDict,
        is_loading: bool = False,
        metadata: object = None,
    ) -> T | dict[int, dict[str, list[ShardedTensor]]]:
        if is_loading or not self._know_parts(one, model):
            return gathered(model, is_loading, metadata)
        state: dict[int, dict[str, list[ShardedTensor]]] = {}
        for ranges in _bucket_ranges(one):
            for parameter, places in ranges.items():
                tensors = one._get_main_param_and_optimizer_states(parameter)
                state[len(state)] = {
                    name: self._shards(parameter, name, tensors[name], places["param"], one) for name in _STATES
                }
        return state

    def _shards(
        self, parameter: torch.nn.Parameter, name: str, held: torch.Tensor, places: Range, one: DistributedOptimizer
    ) -> list[ShardedTensor]:
        """Return this rank's shards of one kind of state of a parameter; `held`: elements ``places.start`` to
        ``places.end``.
        """
        flat = held.detach().reshape(-1).to(torch.float32)
        found = []
        for start, of in self._parts[parameter]:
            first = max(places.start, start)
            stop = min(places.end, start + prod(of.local_shape))
            at = first - places.start
            lead = of.prepend_axis_num
            for offset, size in boxes(tuple(of.local_shape), first - start, stop - start):
                shape = (*(1 for _ in range(lead)), *size)
                count = prod(size)
                found.append(
                    ShardedTensor(
                        key=f"optimizer.state.{name}.{of.key}",
                        data=flat[at : at + count].view(shape),
                        dtype=flat.dtype,
                        local_shape=shape,
                        global_shape=of.global_shape,
                        global_offset=tuple(map(add, of.global_offset, (*(0 for _ in range(lead)), *offset))),
                        axis_fragmentations=None,  # no regular grid
                        # The parameter's replicas are the data-parallel ranks, but each has another part of the state.
                        replica_id=(*of.replica_id[:2], one.distributed_optimizer_instance_id),
                        allow_shape_mismatch=of.allow_shape_mismatch,
                    )
                )
                at += count
        return found

    def _know_parts(self, one: DistributedOptimizer, model: ShardedStateDict) -> bool:
        """Find the places of an optimizer's parameters in the whole; the same on all data-parallel ranks. Returns False
        if a parameter is not made of ranges of its elements: then it has to be gathered.
        """
        wanted = [parameter for buffer in one.buffers for parameter in buffer.param_index_map]
        if not all(parameter in self._parts for parameter in wanted):
            described, _ = extract_sharded_tensors_and_factories(model)
            by_parameter = {of.data: of for of in nested_values(described)}
            for parameter in wanted:
                self._parts[parameter] = _parts(by_parameter[parameter], parameter)
        return all(self._parts[parameter] for parameter in wanted)


_Part = tuple[int, "ShardedTensor"]
"""This rank's part of a parameter: its first element, and its place in the whole, without data."""


def _parts(described: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter) -> list[_Part]:
    """Return megatron-core's parts of a parameter: itself, or pieces, such as the two halves of a gated unit.

    Empty if a piece is not one range of the parameter's elements.
    """
    built = [described] if isinstance(described, ShardedTensor) else list(nested_values(described.build()))
    found: list[_Part] = []
    for piece in built:
        view = piece.data
        within = isinstance(view, torch.Tensor) and view.is_contiguous() and view.dtype == parameter.dtype
        if not within or view.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            return []
        found.append((view.storage_offset() - parameter.storage_offset(), piece.without_data()))
    whole = sum(prod(piece.local_shape) for _, piece in found) == parameter.numel()
    return sorted(found, key=lambda part: part[0]) if whole else []


def _bucket_ranges(one: DistributedOptimizer) -> Iterator[dict[torch.nn.Parameter, dict[str, Range]]]:
    for of_buffer in one.gbuf_ranges:
        for buckets in of_buffer.values():
            for bucket in buckets:
                yield bucket["param_map"]


def _with_step(one: DistributedOptimizer) -> Callable[[torch.nn.Parameter, dict[str, torch.Tensor]], None]:
    set_states = one._set_main_param_and_optimizer_states

    def with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = one.model_param_group_index_map[model_param]
        step = one.optimizer.state[one.optimizer.param_groups[group]["params"][order]]["step"]
        set_states(model_param, {**tensors, "step": step})

    return with_step
