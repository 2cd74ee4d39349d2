"""Rows of different lengths, end to end in one array: where each begins, and how some of them are picked out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def offsets_of(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where each row begins, and last where the last one ends: int64 of shape (rows + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions(offsets: NDArray[np.int64], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where the items of these rows stand, row after row.

    Args:
        offsets: of all rows, see `offsets_of`.
        rows: numbers of rows.
    """
    starts, lengths = offsets[rows], np.diff(offsets)[rows]
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())
