"""Which replica generates which prompts: a fixed rule, so that a repeated run makes the same calls."""

from __future__ import annotations

from itertools import pairwise


def assign(n_prompts: int, replicas: int) -> list[range]:
    """Divide prompt numbers into contiguous blocks, one per replica; sizes differ by at most one, larger ones first.

    Args:
        n_prompts: prompts of a step; fewer than replicas leave some without any.
        replicas: how many replicas there are, at least 1.

    Raises:
        ValueError: a negative number of prompts, or no replica.
    """
    if n_prompts < 0 or replicas < 1:
        raise ValueError(f"{n_prompts} prompts cannot be assigned to {replicas} replicas")
    size, larger = divmod(n_prompts, replicas)
    starts = [replica * size + min(replica, larger) for replica in range(replicas + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
