"""The option files that come with this program, read as they stand: what they name may be named by any configuration,
and what they call themselves by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from trinity_sync.config.composition import conf_dir

TARGET = "_target_"
"""The key that names a class."""

GROUPS = ("retention",)
"""Groups whose options name the class that they configure."""


@cache
def own_options(group: str) -> Mapping[str, Mapping[str, Any]]:
    """Our options of a group by name, each with what stands in its file: nothing is merged or resolved."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return {file.stem: _content(OmegaConf.to_container(OmegaConf.load(file), resolve=False)) for file in files}


@cache
def own_targets() -> frozenset[str]:
    """The classes that our options name."""
    return frozenset(name for group in GROUPS for option in own_options(group).values() for name in _targets(option))


def _content(value: Any) -> dict[str, Any]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, dict) else {}


def _targets(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == TARGET and isinstance(inner, str):
            yield inner
        else:
            yield from _targets(inner)
