"""Which values of a column are the best, and which of them are a tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from trinity_sync.report.figures import Better, Figure

Mark = Literal["best", "tie"]
RULE = (
    "A tie: the bands overlap, or the figures read the same. The band of a job is the middle half of what it measured; "
    "of several seeds, lowest to highest. Only jobs that completed compete."
)


def marks(figures: Sequence[Figure | None], better: Better, text: Callable[[float], str]) -> list[Mark | None]:
    """Mark the best figure of a column; where others are a tie with it, all of these.

    Fewer than two figures, or figures that all read the same, leave nothing to mark.

    Args:
        figures: those that compete; None for one that does not.
        better: which values are.
        text: puts a value into words.
    """
    known = [one for one in figures if one is not None]
    if len({text(one.value) for one in known}) < 2:
        return [None] * len(figures)
    best = text((min if better == "lower" else max)(one.value for one in known))
    leading = [one for one in known if text(one.value) == best]
    level = [one is not None and any(_overlap(one, leader) for leader in leading) for one in figures]
    word: Mark = "tie" if sum(level) > 1 else "best"
    return [word if equal else None for equal in level]


def _overlap(one: Figure, other: Figure) -> bool:
    return one.low <= other.high and other.low <= one.high
