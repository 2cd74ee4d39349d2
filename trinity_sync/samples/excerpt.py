"""A few samples of a batch as people read them: lines of samples.jsonl, rows of a tracker's table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Prompt

Line = dict[str, object]


def excerpt(
    batch: SampleBatch,
    advantages: np.ndarray | None,
    groups: int,
    prompt: Callable[[int, int], Prompt],
    *,
    validation: bool = False,
) -> list[Line]:
    """Write out all samples of a batch's first groups.

    Args:
        batch: the samples.
        advantages: one per sample, where there are any.
        groups: how many groups, at most.
        prompt: gives the prompt of a step and a number within it.
        validation: the samples are of a validation.

    Returns:
        For each sample, in the order of the batch: ``validation``; ``for_step`` (for which its prompt was given out),
        ``prompt`` and ``sample`` (numbers), ``text`` (the prompt; of a chat its last message), ``response``,
        ``reward`` (None: it is left out of training), ``exact``, ``advantage``, ``finished``, ``tokens`` (of the
        response), ``version`` (of several, the oldest) and ``spans`` (``[start, end, version]`` of its tokens).
    """
    firsts, group = batch.groups()
    texts = cache(lambda step, number: prompt(step, number).text)
    chosen = np.isin(group, np.argsort(firsts, kind="stable")[:groups])
    lines: list[Line] = []
    for row in np.flatnonzero(chosen).tolist():
        sample = batch[row]
        lines.append(
            {
                "validation": validation,
                "for_step": sample.step,
                "prompt": sample.prompt,
                "sample": sample.sample,
                "text": texts(sample.step, sample.prompt),
                "response": sample.text,
                "reward": sample.reward,
                "exact": sample.exact,
                "advantage": None if advantages is None else float(advantages[row]),
                "finished": sample.finished,
                "tokens": len(sample.response_ids),
                "version": sample.version[1],
                "spans": [list(span) for span in sample.spans],
            }
        )
    return lines
