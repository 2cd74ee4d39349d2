"""What programs of Trinity-RFT pass: members of its enums, and fields of its `Config`, known by their names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from trinity_sync.errors import ConfigError


def plain(choice: object) -> Any:
    """Return the value of an enum's member, which a process without that enum cannot unpickle; else what is given."""
    return choice.value if isinstance(choice, Enum) else choice


def trinity_field(config: object, path: str) -> Any:
    """Return a field of a configuration, such as ``trainer.save_strategy``.

    Raises:
        ConfigError: there is none; names it.
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
