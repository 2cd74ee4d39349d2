"""In which dtype each tensor of a version travels: the wire dtype, but for those that are kept in fp32.

Which are kept is settled once, by name: `kept_names` of a user's list, or of what transformers keeps of the model's
class. No torch here, so that manifests and the control plane can hold a `WireFormat`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_sync.errors import ConfigError
from trinity_sync.weights import shards

FP32 = "F32"


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The dtypes of a version.

    Args:
        dtype: of floating tensors, as safetensors names it; None: each as it is.
        keep_fp32: names of the tensors that travel in fp32 nevertheless.

    Raises:
        ValueError: the dtype is unknown, or not a floating one.
    """

    dtype: str | None
    keep_fp32: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.dtype is not None and not shards.is_floating(self.dtype):
            raise ValueError(f"wire dtype {self.dtype} is not a floating one, such as BF16")

    def of(self, name: str, dtype_name: str) -> str:
        """The dtype in which a tensor travels that is held in another: integers as they are.

        Raises:
            ValueError: an unknown dtype.
        """
        if not shards.is_floating(dtype_name):
            return dtype_name
        return FP32 if name in self.keep_fp32 else self.dtype or dtype_name

    @classmethod
    def seen(cls, dtype: str, published: Mapping[str, str]) -> WireFormat:
        """What a version follows whose wire dtype is `dtype`, from the dtype in which each tensor is published."""
        return cls(dtype, frozenset(name for name, its in published.items() if its == FP32 != dtype))

    def to_json(self) -> dict[str, Any]:
        """Return the object that a manifest holds."""
        return {"dtype": self.dtype, "keep_fp32": sorted(self.keep_fp32)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> WireFormat:
        """Make it from what `to_json` returned.

        Raises:
            ValueError, KeyError, TypeError: it is damaged.
        """
        kept = body["keep_fp32"]
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ValueError(f"what is kept in fp32 is {kept!r}; expected names")
        return cls(body["dtype"], frozenset(kept))


def as_wire(wire: WireFormat | str | None) -> WireFormat:
    """The policy that keeps nothing, where only a dtype is given."""
    return wire if isinstance(wire, WireFormat) else WireFormat(wire)


def found_in(pattern: str, name: str) -> bool:
    """Whether an entry of a list of tensors to keep means this one.

    As in transformers 5: the entry stands anywhere in the name, and ``*`` in it stands for any characters.
    """
    return re.search(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def kept_names(patterns: Iterable[str], names: Collection[str], *, strict: bool = False) -> frozenset[str]:
    """The names that a list means.

    Args:
        patterns: see `found_in`.
        names: of all tensors of the model.
        strict: a user wrote the list, so each entry has to mean something.

    Raises:
        ConfigError: names entries that mean nothing.
    """
    found = {pattern: {name for name in names if found_in(pattern, name)} for pattern in patterns}
    idle = sorted(pattern for pattern, of_it in found.items() if not of_it)
    if strict and idle:
        raise ConfigError(
            f"sync.keep_fp32 names {', '.join(map(repr, idle))}, found in the name of no tensor of this model, which "
            f"has such as {', '.join(sorted(names)[:3])}; correct it, or leave it out"
        )
    return frozenset[str]().union(*found.values())
