"""Checks values of a configuration against the type annotations of a class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


def mistyped(kind: type, values: Mapping[str, object]) -> str | None:
    """Return an error for the first value whose type differs from the constructor's annotation, or None.

    Only flags, numbers, texts, null and unions of them are checked; a whole number is a number, too.
    """
    try:
        hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__)  # type: ignore[misc]
    except Exception:  # names that only a type checker knows
        return None
    for name, value in values.items():
        hint: Any = hints.get(name, Any)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(one in _KINDS for one in kinds) and not any(_is(value, one) for one in kinds):
            return f"{name} is {value}; must be {' or '.join(_KINDS[one] for one in kinds)}"
    return None


def _is(value: object, kind: type) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)
