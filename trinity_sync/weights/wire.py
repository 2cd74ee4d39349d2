"""The dtype in which each tensor of a version travels: the wire dtype, or fp32 for some.

The fp32 tensors are chosen once, by name: `kept_names` of a user's list, or of transformers' list for the model's
class. No torch here, so that manifests and the control plane can use a `WireFormat`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from trinity_sync.errors import ConfigError
from trinity_sync.weights import shards

FP32 = "F32"


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The dtypes of a version. `dtype`: of floating tensors, as safetensors names it; None: each in its own.
    `keep_fp32`: names of the tensors that travel in fp32 instead. Raises ValueError if the dtype is unknown, or not a
    floating one.
    """

    dtype: str | None
    keep_fp32: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.dtype is not None and not shards.is_floating(self.dtype):
            raise ValueError(f"wire dtype {self.dtype} is not a floating one, such as BF16")

    def of(self, name: str, dtype_name: str) -> str:
        """Return the dtype in which a tensor of this dtype travels: integers in their own."""
        if not shards.is_floating(dtype_name):
            return dtype_name
        return FP32 if name in self.keep_fp32 else self.dtype or dtype_name

    @classmethod
    def seen(cls, dtype: str, published: Mapping[str, str]) -> WireFormat:
        """Return the format of a version whose wire dtype is `dtype`, from each tensor's published dtype."""
        return cls(dtype, frozenset(name for name, actual in published.items() if actual == FP32 != dtype))

    def to_json(self) -> Mapping[str, object]:
        return {"dtype": self.dtype, "keep_fp32": sorted(self.keep_fp32)}

    @classmethod
    def from_json(cls, body: Mapping[str, object]) -> WireFormat:
        """Restore it from `to_json`. Raises ValueError, KeyError, TypeError if it is damaged."""
        dtype, kept = body["dtype"], body["keep_fp32"]
        if dtype is not None and not isinstance(dtype, str):
            raise ValueError(f"dtype is {dtype!r}; expected a name")
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ValueError(f"keep_fp32 is {kept!r}; expected a list of names")
        return cls(dtype, frozenset(kept))


def as_wire(wire: WireFormat | str | None) -> WireFormat:
    """Return the format, with no fp32 tensors if only a dtype is given."""
    return wire if isinstance(wire, WireFormat) else WireFormat(wire)


def found_in(pattern: str, name: str) -> bool:
    """Return whether an entry of a list of tensors to keep matches this name.

    As in transformers 5: anywhere in the name, and ``*`` stands for any characters.
    """
    return re.search(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def kept_names(patterns: Iterable[str], names: Collection[str], *, strict: bool = False) -> frozenset[str]:
    """Return the names that the patterns (see `found_in`) match.

    `strict`: a user wrote the list, so each entry has to match a name, else a `ConfigError` names the others.
    """
    found = {pattern: {name for name in names if found_in(pattern, name)} for pattern in patterns}
    idle = sorted(pattern for pattern, of_it in found.items() if not of_it)
    if strict and idle:
        raise ConfigError(
            f"sync.keep_fp32 names {', '.join(map(repr, idle))}, found in the name of no tensor of this model, which "
            f"has for instance {', '.join(sorted(names)[:3])}; correct it, or leave it out"
        )
    return frozenset[str]().union(*found.values())
