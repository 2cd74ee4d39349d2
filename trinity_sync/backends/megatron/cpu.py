"""megatron-core on a CPU: runs code that was written for CUDA only.

megatron-core uses ``device="cuda"``, ``tensor.cuda()`` and ``tensor.type() == "torch.cuda.FloatTensor"`` in dozens of
places. One mechanism covers all of them: `CudaMeansCpu`, a `torch.overrides.TorchFunctionMode` that is entered for the
duration of an engine's call and translates between the two devices on the way into and out of torch.

A mode cannot catch the plain functions of `torch.cuda` that raise on a build without CUDA (`current_device`, streams,
generators). `install` replaces those, once and for the process. `torch.cuda.is_available()` stays False. `STAND_INS` is
the whole list; the tests check that each of them is needed and that each is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
T = TypeVar("T")

_CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Makes "cuda" another name of the CPU during the block.

    - An argument that names a CUDA device names the CPU; `Tensor.cuda()` returns the tensor.
    - `Tensor.type()` returns ``torch.cuda.FloatTensor`` for a float tensor, by which megatron-core's optimizers
      recognise the parameters that they can handle.
    - `pin_memory` is dropped: there is no device to pin for.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        is_name = func is torch.device  # its uses come through here too
        if is_name:
            return func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        if asks_type:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        kwargs.pop("pin_memory", None)
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return value


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: there is no device to wait for."""


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


# Functions of torch.cuda (and of one module of megatron-core) that raise without CUDA, and their replacements.
STAND_INS: dict[str, Callable[..., object]] = {
    # every buffer is allocated on the current device
    "torch.cuda.current_device": lambda: _CPU,
    # ranks wait for the device when they exchange loaded parts of a checkpoint
    "torch.cuda.synchronize": _nothing,
    # one generator is both the host's and the device's: the RNG tracker forks it to draw initial weights
    "torch.cuda.manual_seed": torch.manual_seed,
    "torch.cuda.get_rng_state": _get_rng_state,
    "torch.cuda.random.get_rng_state": _get_rng_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
}


def install() -> None:
    """Prepare this process for megatron-core without an accelerator; do nothing with one, or the second time.

    Call before megatron-core builds a model; `CudaMeansCpu` is entered separately.
    """
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as random

    for name, stand_in in STAND_INS.items():
        owner, attribute = _owner(name)
        setattr(owner, attribute, stand_in)
    # autograd calls it outside of the mode, and it runs a part of the model again
    random.CheckpointFunction.backward = staticmethod(inside_mode(random.CheckpointFunction.backward))

    install_experts()
    # It warns when the host's generator moves inside a fork of the device's; here they are the same one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def inside_mode(call: Callable[P, T]) -> Callable[P, T]:
    """Have each call of a function run inside of `CudaMeansCpu`."""

    @wraps(call)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with CudaMeansCpu():
            return call(*args, **kwargs)

    return inside


def _owner(name: str) -> tuple[ModuleType, str]:
    import importlib

    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module), attribute


# Tokens to experts on a CPU: there is no stream to copy counts to the host, and gloo only gathers and scatters tensors
# of equal size.

_gather_equal = mappings._gather_along_first_dim
_reduce_scatter_equal = mappings._reduce_scatter_along_first_dim


class HostAllToAll(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher with its counts on the host. Its groups have to be gloo's."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on a CPU"  # else it creates one
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
    """Replace megatron-core's `_gather_along_first_dim`: concatenate the tensors of the ranks of a gloo group.
    Collective.

    `output_split_sizes`: rows of each rank; None: equal.
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
    """Replace megatron-core's `_reduce_scatter_along_first_dim`: sum over a gloo group, and return this rank's rows.
    Collective.

    `input_split_sizes`: rows for each rank; None: equal.
    """
    ranks = group.size()
    if input_split_sizes is None or ranks == 1:
        part: torch.Tensor = _reduce_scatter_equal(mine, group, input_split_sizes, use_global_buffer)
        return part
    rows = input_split_sizes[group.rank()]
    found = mine.new_empty((ranks, rows, *mine.shape[1:]))
    dist.all_to_all_single(found.flatten(0, 1), mine.contiguous(), [rows] * ranks, [*input_split_sizes], group=group)
    return found.sum(0)


def install_experts() -> None:
    """Use these functions in layers that are built from now on."""
    moe_layer.MoEAlltoAllTokenDispatcher = HostAllToAll
    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter
