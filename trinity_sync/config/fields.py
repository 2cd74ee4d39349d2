"""The fields of the dataclasses that type the configuration: the range of each, and never a default."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING

LONGEST_S = 10**9
"""More than this, 30 years, is more than a wait for a lock takes."""


def choice(*values: str) -> Any:
    """One of these texts."""
    return field(default=MISSING, metadata={"choices": values})


def number(*, at_least: float | None = None, more_than: float | None = None, at_most: float | None = None) -> Any:
    """A number within these bounds; with None there is none on that side."""
    bounds = {"at_least": at_least, "more_than": more_than, "at_most": at_most}
    return field(default=MISSING, metadata={name: bound for name, bound in bounds.items() if bound is not None})


def seconds(*, at_least: float | None = None, more_than: float | None = None) -> Any:
    """A time, up to the longest that can be waited for."""
    return number(at_least=at_least, more_than=more_than, at_most=LONGEST_S)
