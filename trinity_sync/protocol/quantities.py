"""Durations and sizes that a user may give as text, such as ``12h`` and ``100GB``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

QUANTITY = "quantity"
"""Key in the metadata of a dataclass's field whose value may be given as text; its value is the `Quantity`."""


@dataclass(frozen=True)
class Quantity:
    """A number with a unit.

    Args:
        units: unit, in lower case, to what one of it is; the empty one is for a number alone.
        right: what the user may write.
        whole: it comes as a whole number.
    """

    units: Mapping[str, float]
    right: str
    whole: bool = False

    def parse(self, text: str) -> float:
        """Return the number that a text means.

        Raises:
            ValueError: it means none; the message is `right`.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text.lower())
        if not match or match[2] not in self.units:
            raise ValueError(self.right)
        amount = float(match[1]) * self.units[match[2]]
        return int(amount) if self.whole else amount


DURATION = Quantity(
    {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800},
    "a number of seconds, or a text such as 90s, 30m, 12h or 7d",
)
"""In seconds."""

SIZE = Quantity(
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
    "a number of bytes, or a text such as 500MB, 100GB or 2TiB",
    whole=True,
)
"""In bytes."""
