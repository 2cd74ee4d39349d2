"""Which version made which tokens: spans of the tokens of samples, for engines that change their weights in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.ragged import offsets_of, positions

Span = tuple[int, int, int]
"""``[start, end, version]``: tokens from start up to end (without it) of a response, and the step of their version."""


@dataclass(frozen=True, slots=True)
class VersionSpans:
    """The spans of many samples, those of one sample end to end; at least one each.

    Attributes:
        rows: int64 of shape (spans, 3), see `Span`.
        offsets: int64 of shape (samples + 1,); sample i has ``rows[offsets[i]:offsets[i + 1]]``.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]]) -> VersionSpans:
        """Build from the spans of each sample."""
        rows = np.array([span for sample in spans for span in sample], np.int64).reshape(-1, 3)
        return cls(rows, offsets_of([len(sample) for sample in spans]))

    @classmethod
    def whole(cls, lengths: NDArray[np.integer], step: int) -> VersionSpans:
        """Build for samples of which each was made by one version, the same for all.

        Args:
            lengths: tokens of each response.
            step: the version's step.
        """
        rows = np.stack([np.zeros_like(lengths), lengths, np.full_like(lengths, step)], axis=1).astype(np.int64)
        return cls(rows, np.arange(len(lengths) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def oldest(self) -> NDArray[np.int64]:
        """The step of the oldest version of each sample: what its staleness goes by."""
        if not len(self):
            return np.zeros(0, np.int64)
        oldest: NDArray[np.int64] = np.minimum.reduceat(self.rows[:, 2], self.offsets[:-1])
        return oldest

    @property
    def mixed(self) -> NDArray[np.bool_]:
        """Whether more than one version made the sample."""
        return np.diff(self.offsets) > 1

    def of_sample(self, index: int) -> tuple[Span, ...]:
        """Return the spans of one sample."""
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]].tolist()
        return tuple((start, end, step) for start, end, step in rows)

    def staleness(self, index: int, step: int) -> NDArray[np.int64]:
        """Return how stale each token of one sample is where the trainer updates at `step`, in steps."""
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]]
        return np.repeat(step - 1 - rows[:, 2], rows[:, 1] - rows[:, 0])

    def take(self, samples: NDArray[np.integer]) -> VersionSpans:
        """Return the spans of these samples, in this order."""
        return VersionSpans(self.rows[positions(self.offsets, samples)], offsets_of(np.diff(self.offsets)[samples]))

    @staticmethod
    def concatenate(parts: Sequence[VersionSpans]) -> VersionSpans:
        """Return the spans of all parts, one part after the other."""
        return VersionSpans(
            np.concatenate([part.rows for part in parts]),
            offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        )
