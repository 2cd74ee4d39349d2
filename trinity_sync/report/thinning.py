"""Fewer points for a curve than a screen has pixels, without losing what stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float | None]]


def thin(points: Points, most: int) -> Points:
    """Return at most so many of the points: of each share of neighbours the lowest and the highest, and both ends.

    A share without a value keeps one point without, so that a gap of its length stays one.

    Args:
        points: (x, y) by x.
        most: at least 4.
    """
    if len(points) <= most:
        return points
    share = math.ceil(len(points) / ((most - 2) // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), share):
        values = [(y, at) for at, (_, y) in enumerate(points[start : start + share], start) if y is not None]
        kept |= {min(values)[1], max(values)[1]} if values else {start}
    return [points[at] for at in sorted(kept)]
