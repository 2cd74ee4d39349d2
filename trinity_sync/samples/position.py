"""The position of a run in its data, by prompt numbers, so that a resume with another number of prompts per step goes
on with the next ones. For both schedules, and for pairs as for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, TypedDict


class GroupId(NamedTuple):
    """A prompt of the task: the step that it was given out for, and its number within that step."""

    step: int
    prompt: int


class Numbering(NamedTuple):
    """The prompts of each step. `first`: number of its first prompt in the order of the data, from 0."""

    step: int
    first: int
    per_step: int

    def number(self, group: GroupId) -> int:
        """Return the number of a prompt in the order of the data."""
        return self.first + (group.step - self.step) * self.per_step + group.prompt

    def group(self, number: int) -> GroupId:
        """Return the step of a prompt, and its number there."""
        steps, prompt = divmod(number - self.first, self.per_step)
        return GroupId(self.step + steps, prompt)

    def first_of(self, step: int) -> int:
        """Return the number of a step's first prompt."""
        return self.number(GroupId(step, 0))

    def after(self, step: int, used: int) -> Numbering:
        """Return the numbering of the steps after one that used so many prompts, more or fewer than `per_step`."""
        return self if used == self.per_step else Numbering(step + 1, self.first_of(step) + used, self.per_step)


class SavedPosition(TypedDict):
    """A `Position` as JSON values."""

    groups_per_step: int
    next: Sequence[int]
    waiting: Sequence[Sequence[int]]
    numbered_from: NotRequired[Sequence[int]]  # earlier releases did not save it


@dataclass(frozen=True)
class Position:
    """The position of a run in its data. `waiting`: prompts given out before and not trained on yet, ascending."""

    numbering: Numbering
    next: GroupId
    waiting: Sequence[GroupId] = ()

    @classmethod
    def at(cls, step: int, count: int) -> Position:
        """Return the position before `step` of a run that has always trained on `count` prompts a step."""
        return cls(Numbering(1, 0, count), GroupId(step, 0))

    @classmethod
    def of_json(cls, saved: SavedPosition) -> Position:
        """Read the JSON values of `to_json`, also of releases that did not save the numbering."""
        step, first = saved.get("numbered_from", (1, 0))
        return cls(
            Numbering(step, first, saved["groups_per_step"]),
            GroupId(*saved["next"]),
            sorted(GroupId(*group) for group in saved["waiting"]),
        )

    def to_json(self) -> SavedPosition:
        """Return JSON values, for a checkpoint."""
        step, first, count = self.numbering
        return {
            "groups_per_step": count,
            "next": list(self.next),
            "waiting": [list(group) for group in self.waiting],
            "numbered_from": [step, first],
        }

    def with_count(self, step: int, count: int) -> Position:
        """Return the position for steps of another size, without missing or repeating a prompt."""
        if count == self.numbering.per_step:
            return self
        old = self.numbering
        waiting, following = [old.number(group) for group in self.waiting], old.number(self.next)
        new = Numbering(step, min([*waiting, following]), count)
        return Position(new, new.group(following), sorted(map(new.group, waiting)))

    def in_step(self, step: int, count: int) -> tuple[Position, int, int]:
        """Return the position for `trainer.schedule=lockstep`, whose steps have their own prompts only. Returns the
        position, the number of prompts that it misses, and the number trained on twice. Both are 0 unless
        `trainer.schedule=free` saved this position.
        """
        old = self.numbering
        first, following = old.first_of(step), old.number(self.next)
        waiting = {old.number(group) for group in self.waiting}
        missed = sum(number < first for number in waiting) + max(0, first - following)
        twice = sum(number not in waiting for number in range(first, following))
        new = old if count == old.per_step else Numbering(step, first, count)
        return Position(new, GroupId(step, 0)), missed, twice
