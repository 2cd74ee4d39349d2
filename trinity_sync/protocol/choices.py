"""Values that others pass to us: members of Trinity-RFT's enums, fields of its `Config`, and arguments of a class,
checked against its annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trinity_sync.errors import ConfigError

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


def plain(choice: object) -> Any:
    """Return the value of an enum's member, because another process may lack the enum; return other values as given."""
    return choice.value if isinstance(choice, Enum) else choice


def trinity_field(config: object, path: str) -> Any:
    """Return a field of a Trinity-RFT `Config`, such as ``trainer.save_strategy``, or raise a `ConfigError` that names
    it.
    """
    found = config
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(
                f"a {type(config).__name__} has no field {path}, which a Config of Trinity-RFT has"
            ) from None
    return found


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
