"""The digests of rows, as they become known in any order: what a load writes down of the tensors that it fills."""

from __future__ import annotations

from itertools import pairwise

from trinity_sync.weights.tensor_rows import DIGEST_BYTES


class RowBook:
    """Row digests by tensor."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, bytes]] = {}

    def add(self, name: str, first: int, digests: bytes) -> None:
        """Digests, 16 bytes each, of consecutive rows, none of which is known."""
        self._known.setdefault(name, {})[first] = digests

    def missing(self, name: str, rows: int) -> list[tuple[int, int]]:
        """(first, last + 1) of the rows of which nothing is known yet."""
        if len(self._known.get(name, {}).get(0, b"")) == rows * DIGEST_BYTES:  # written down at once, as most are
            return []
        known = sorted(self._known.get(name, {}).items())
        ends = [0, *(first + len(digests) // DIGEST_BYTES for first, digests in known)]
        starts = [*(first for first, _ in known), rows]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]

    def digests(self, name: str) -> bytes:
        """All of a tensor, in order; nothing is missing."""
        known = sorted(self._known.get(name, {}).items())
        if len(known) == 1:
            return known[0][1]
        assert all(first + len(digests) // DIGEST_BYTES == after for (first, digests), (after, _) in pairwise(known))
        return b"".join(digests for _, digests in known)
