"""A single prompt and a single sample, for tasks, tests and reports; and the random numbers and index arithmetic of
both.

Explorers and trainer exchange whole batches: `trinity_sync.samples.batch`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Message = Mapping[str, str]
"""One turn of a chat: ``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a trainer step.

    Attributes:
        index: its number within the step, from 0. With seed, step and sample it determines the random numbers.
        text: the prompt; of a chat, the content of the last message.
        messages: the whole chat, for the tokenizer's chat template; None: `text` is the prompt.
        answer: the right answer, for the reward, or None.
        fields: further columns of a data file, for the reward.
    """

    index: int
    text: str
    messages: tuple[Message, ...] | None = None
    answer: object = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt, with its reward and the version that made it.

    Attributes:
        step: the trainer step it was made for.
        prompt: number of the prompt within the step.
        sample: number of the sample within the prompt's group.
        prompt_ids: tokens of the prompt.
        response_ids: tokens of the response, the end-of-sequence token included where it was reached.
        log_probs: natural log-probability of each response token at the sampler's temperature, before truncation.
        version: (attempt, step) of the weights; of several, the oldest.
        reward: None: the response could not be judged and is not trained on.
        exact: 1.0 for a right answer, 0.0 for a wrong one, None if the task does not tell.
        text: the response, as given to the reward.
        finished: whether the end-of-sequence token was reached.
        spans: ``[start, end, step of the version]`` of the response's tokens; empty: `version` made all.
        error: why the response could not be judged; empty: it was judged.
    """

    step: int
    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: tuple[int, int]
    reward: float | None
    exact: float | None
    text: str
    finished: bool
    spans: tuple[tuple[int, int, int], ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", ((0, len(self.response_ids), self.version[1]),))

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the order of training."""
        return self.step, self.prompt, self.sample


# Random numbers that depend on their place of use only, not on earlier draws. For tasks and explorers.


GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The rounds of `mix`: shift right and xor, then multiply. A last shift by `LAST_SHIFT` and xor follows."""
LAST_SHIFT = 31

_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """Separates the random numbers of one seed by their use."""

    SAMPLING = 0
    PROMPTS = 1
    ORDER = 2
    VALIDATION = 3
    VALIDATION_PROMPTS = 4


def child(key: ArrayLike, number: ArrayLike) -> NDArray[np.uint64]:
    """Compute children of keys in the tree.

    Args:
        key: unsigned 64-bit keys.
        number: the number of the child of each key, at least 0; broadcast against `key`.

    Returns:
        uint64 keys of the broadcast shape, at least one-dimensional.
    """
    state = np.atleast_1d(np.asarray(key, np.uint64))
    value: NDArray[np.uint64] = state + (np.atleast_1d(np.asarray(number, np.uint64)) + np.uint64(1)) * np.uint64(GAMMA)
    for shift, factor in MIX:
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    value = value ^ (value >> np.uint64(LAST_SHIFT))
    return value


def path(seed: int, purpose: Purpose, *numbers: ArrayLike) -> NDArray[np.uint64]:
    """Compute the keys at the ends of paths through the tree, from a root that the seed gives.

    Args:
        numbers: the further steps of the path, each an integer or an array of integers, broadcast against each other.

    Returns:
        uint64 keys of the broadcast shape, at least one-dimensional.
    """
    key = child(np.uint64(seed & _MASK), int(purpose))
    for number in numbers:
        key = child(key, number)
    return key


# How samples are drawn.


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of one request for samples.

    Attributes:
        purpose: separates the random numbers of training and validation.
        temperature: None: `explorer.temperature`.
    """

    purpose: Purpose = Purpose.SAMPLING
    temperature: float | None = None


FOR_TRAINING = Drawing()
"""By the keys of `explorer`."""


# Rows of different lengths, end to end in one array.


def offsets_of(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the begin of each row and the end of the last: int64 of shape (rows + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions(offsets: NDArray[np.int64], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the positions of the items of some rows, row after row."""
    starts, lengths = offsets[rows], np.diff(offsets)[rows]
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())
