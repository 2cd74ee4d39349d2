"""The `Data` of a supervised run: pairs or conversations of a file, as tokens of the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import PairBatch
from trinity_sync.samples.metrics import Line
from trinity_sync.samples.position import GroupId, Numbering, Position
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.encoding import PairEncoder
from trinity_sync.tasks.pairs import TextPair

Examples = Sequence[TextPair | Conversation]


class SupervisedTask(Protocol):
    """A task for `algorithm=sft`. With a method ``pairs_from(first, count)``, which returns so many examples from
    number `first` on (from 0, without end), a run resumed with another batch size misses and repeats none.
    """

    def pairs(self, step: int, count: int) -> Examples:
        """Return the examples of a trainer step, from 1."""


def pair_batch(encoder: PairEncoder, examples: Examples) -> PairBatch:
    """Return pairs or conversations as tokens."""
    encoded = encoder.encode(examples)
    return PairBatch.of(
        [one.prompt for one in encoded], [one.response for one in encoded], [one.learnt for one in encoded]
    )


class PairsData:
    """A step's batch is the task's examples for it. `task`: gives pairs or conversations. `encoder`: makes tokens of
    them.
    """

    def __init__(self, task: SupervisedTask, encoder: PairEncoder, numbering: Numbering) -> None:
        self._task = task
        self._encoder = encoder
        self._numbering = numbering

    def batch(self, step: int) -> PairBatch:
        """Return the pairs of a step, with an end-of-sequence token after each response."""
        return pair_batch(self._encoder, self._of_step(step))

    def _of_step(self, step: int) -> Examples:
        pairs_from: Callable[[int, int], Examples] | None = getattr(self._task, "pairs_from", None)
        if pairs_from is None:
            return self._task.pairs(step, self._numbering.per_step)
        return pairs_from(self._numbering.first_of(step), self._numbering.per_step)

    def drawn(self) -> None:
        return None

    def position(self, step: int) -> Mapping[str, object]:
        return Position(self._numbering, GroupId(step + 1, 0)).to_json()

    def advantages(self, batch: PairBatch) -> None:
        return None

    def load(self, version: Version) -> list[LoadReport]:
        return []

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        return []
