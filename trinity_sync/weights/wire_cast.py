"""A model in one dtype, but for what stays in fp32, as `from_pretrained` of transformers would have it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trinity_sync.errors import ConfigError
from trinity_sync.weights.dtypes import is_floating
from trinity_sync.weights.saved_views import by_held
from trinity_sync.weights.tensors import saved_list, to_torch
from trinity_sync.weights.wire import kept_names


def kept_by_class(model: torch.nn.Module, dtype: str) -> tuple[str, ...]:
    """Parts of names of the tensors that `from_pretrained` would hold in fp32 when asked for another dtype.

    Those of `_keep_in_fp32_modules_strict`, in fp16 also those of `_keep_in_fp32_modules`.

    Args:
        model: of transformers; of others nothing is kept. May be on the meta device.
        dtype: safetensors name.
    """
    plan = getattr(model, "_get_dtype_plan", None)
    return () if plan is None else tuple(sorted(plan(to_torch(dtype))))


def hold_fp32(model: torch.nn.Module, patterns: Iterable[str]) -> list[str]:
    """Cast what is to be kept of a model to fp32, in place, and leave all else as it is.

    Args:
        model: any module, its tensors on any device.
        patterns: parts of the names that tensors are saved by, see `kept_names`.

    Returns:
        These names.

    Raises:
        ConfigError: of what the model holds as one tensor only some is to be kept.
    """
    names, kept = _kept(model, patterns)
    for tensor in kept:
        tensor.data = tensor.data.to(torch.float32)
    return names


def cast_model(model: torch.nn.Module, dtype: torch.dtype, keep: Iterable[str]) -> None:
    """Cast what a state dict has of a model in place, but for tensors that are to be kept. What it computes by itself,
    such as rotary frequencies, stays as it is, as with `from_pretrained`.

    Args:
        model: any module, its tensors on any device.
        dtype: a floating one.
        keep: parts of the names that tensors are saved by, see `kept_names`.

    Raises:
        ConfigError: as of `hold_fp32`.
    """
    kept = {id(tensor) for tensor in _kept(model, keep)[1]}
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(dtype)


def _kept(model: torch.nn.Module, patterns: Iterable[str]) -> tuple[list[str], list[torch.Tensor]]:
    """The floating tensors that patterns mean, by the names they are saved by; and what the model holds them in."""
    saved, live = saved_list(model), model.state_dict(keep_vars=True)
    floating = {name: tensor for name, tensor in saved.items() if is_floating(tensor.dtype)}
    meant = kept_names(patterns, floating)
    tensors = []
    for held, names in by_held(floating).items():
        others = [name for name in names if name not in meant]
        if not others:
            tensors.append(live[held])
        elif len(others) < len(names):
            kept = next(name for name in names if name in meant)
            raise ConfigError(
                f"sync.keep_fp32 keeps {kept} in fp32 and not {others[0]}, which the model holds as one tensor, "
                f"{held}, of one dtype; keep all of it, or nothing"
            )
    return sorted(meant), tensors
