"""A model in one dtype, but for what stays in fp32, as `from_pretrained` of transformers would have it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trinity_sync.weights.tensors import to_torch
from trinity_sync.weights.wire import found_in


def kept_by_class(model: torch.nn.Module, dtype: str) -> tuple[str, ...]:
    """Parts of names of the tensors that `from_pretrained` would hold in fp32 when asked for another dtype.

    Those of `_keep_in_fp32_modules_strict`, in fp16 also those of `_keep_in_fp32_modules`.

    Args:
        model: of transformers; of others nothing is kept. May be on the meta device.
        dtype: safetensors name.
    """
    plan = getattr(model, "_get_dtype_plan", None)
    return () if plan is None else tuple(sorted(plan(to_torch(dtype))))


def hold_fp32(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Cast floating tensors of a model to fp32, in place, and leave the others as they are.

    Args:
        model: any module, its tensors on any device.
        patterns: parts of names of the tensors, see `found_in`.
    """
    for tensor in _floating(model, patterns).values():
        tensor.data = tensor.data.to(torch.float32)


def cast_model(model: torch.nn.Module, dtype: torch.dtype, keep: Iterable[str]) -> None:
    """Cast a model of fp32 in place, but for tensors that are to be kept whole.

    Args:
        model: any module, its tensors on any device.
        dtype: a floating one.
        keep: parts of names of the tensors, see `found_in`.
    """
    patterns = tuple(keep)
    kept = {name: tensor.data for name, tensor in _floating(model, patterns).items()}
    model.to(dtype)
    for name, tensor in _floating(model, patterns).items():
        tensor.data = kept[name]


def _floating(model: torch.nn.Module, patterns: Iterable[str]) -> dict[str, torch.Tensor]:
    patterns = tuple(patterns)
    return {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and any(found_in(pattern, name) for pattern in patterns)
    }
