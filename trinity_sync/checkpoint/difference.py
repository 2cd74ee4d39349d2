"""Compares two sets of weights, tensor by tensor and bit by bit. Behind ``trinity-sync ckpt diff``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trinity_sync.checkpoint.reading import TensorInfo, Weights
from trinity_sync.weights.shards import is_floating
from trinity_sync.weights.tensors import to_torch, wire_name

_CHUNK = 1 << 20
"""Elements compared at a time, which limits temporary memory to some tens of MB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference of one tensor of the weights B from that of the weights A."""

    name: str  # Hugging Face name
    a: TensorInfo | None  # dtype and shape in A; None: the tensor is missing there
    b: TensorInfo | None
    elements: int = 0  # 0 if shapes differ or one is missing
    changed: int = 0  # elements that differ in their bits; if dtypes differ, in their values
    max_abs: float = 0.0  # the largest abs(b - a) of all elements; non-finite differences count as 0
    mean_abs: float = 0.0
    relative: float | None = 0.0  # the sum of abs(b - a) over the sum of abs(a); None if all of a is 0 and b is not
    not_finite: int = 0  # elements changed to or from an infinity or NaN

    @property
    def differs(self) -> bool:
        """Whether dtype, shape or an element differs."""
        return self.a != self.b or self.changed > 0


def compare(
    a: Weights, b: Weights, *, dtype: str | None = None, progress: Callable[[int, int], None] | None = None
) -> list[TensorDifference]:
    """Compare two sets of weights; return one entry for each tensor of either, by name. Raises WeightsError if a file
    is damaged. `dtype`: safetensors name of the dtype to which floating tensors are cast first; None: not cast.
    """
    names = sorted({*a, *b})
    found = []
    for at, name in enumerate(names, 1):
        found.append(_compare(name, a, b, dtype))
        if progress is not None:
            progress(at, len(names))
    return found


def _compare(name: str, a: Weights, b: Weights, dtype: str | None) -> TensorDifference:
    infos = [_cast_info(weights.info(name), dtype) if name in weights else None for weights in (a, b)]
    one, other = infos
    if one is None or other is None or one.shape != other.shape:
        return TensorDifference(name, one, other)
    first, second = (weights.read(name).reshape(-1) for weights in (a, b))
    changed = not_finite = 0
    largest = total = scale = 0.0
    for x, y in zip(first.split(_CHUNK), second.split(_CHUNK), strict=True):
        x, y = x.to(to_torch(one.dtype)), y.to(to_torch(other.dtype))
        differing = _bits(x) != _bits(y) if x.dtype == y.dtype else _values_differ(x.double(), y.double())
        scale += _finite_sum(x.double().abs())
        if not bool(differing.any()):
            continue
        changed += int(differing.sum())
        # The difference of non-finite values means nothing; equal NaNs are no difference.
        gap = (y.double() - x.double()).abs()[differing]
        finite = gap.isfinite()
        not_finite += int((~finite).sum())
        if bool(finite.any()):
            largest = max(largest, float(gap[finite].max()))
            total += float(gap[finite].sum())
    elements = math.prod(one.shape)
    return TensorDifference(
        name=name,
        a=one,
        b=other,
        elements=elements,
        changed=changed,
        max_abs=largest,
        mean_abs=total / elements if elements else 0.0,
        relative=total / scale if scale else (None if total else 0.0),
        not_finite=not_finite,
    )


def _cast_info(info: TensorInfo, dtype: str | None) -> TensorInfo:
    return TensorInfo(wire_name(info.dtype, dtype), info.shape) if is_floating(info.dtype) else info


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _values_differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x != y) & ~(x.isnan() & y.isnan())


def _finite_sum(values: torch.Tensor) -> float:
    return float(values[values.isfinite()].sum())
