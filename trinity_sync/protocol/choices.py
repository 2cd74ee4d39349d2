"""Values that Trinity-RFT's programs pass to ours: members of its enums and fields of its `Config`, read by name."""

from __future__ import annotations

from enum import Enum
from typing import Any

from trinity_sync.errors import ConfigError


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
