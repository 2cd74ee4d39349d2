"""What a check says, and how it asks for values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong: the key, and what is wrong and what would be right."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} {self.text}"


Get = Callable[[str], Any]
"""The value of a key, None where there is no such key. Ends the check where that value is wrong by itself already."""

Check = Callable[[Get], Iterator[Problem]]
"""A check between fields."""
