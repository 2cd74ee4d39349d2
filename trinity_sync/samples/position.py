"""Where a run is in its data: by the number of the prompt, so that a resume with another number of prompts per step
goes on with those that come next. Pure; for both schedules, and for pairs as for prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class GroupId(NamedTuple):
    """One prompt of the task: the step for which it was given out, and its number within that step."""

    step: int
    prompt: int


class Numbering(NamedTuple):
    """Which prompts of the data a step is for.

    Attributes:
        step: a step.
        first: number of its first prompt in the order of the data, from 0.
        per_step: prompts of each step.
    """

    step: int
    first: int
    per_step: int

    def number(self, group: GroupId) -> int:
        """The number of a prompt in the order of the data."""
        return self.first + (group.step - self.step) * self.per_step + group.prompt

    def group(self, number: int) -> GroupId:
        """For which step a prompt is, and where it stands there."""
        steps, prompt = divmod(number - self.first, self.per_step)
        return GroupId(self.step + steps, prompt)

    def first_of(self, step: int) -> int:
        """The number of a step's first prompt."""
        return self.number(GroupId(step, 0))

    def after(self, step: int, used: int) -> Numbering:
        """The same for the steps after one that used so many prompts, which may be more than it is meant to have."""
        return self if used == self.per_step else Numbering(step + 1, self.first_of(step) + used, self.per_step)


@dataclass(frozen=True)
class Position:
    """Where a run is in its data.

    Attributes:
        numbering: how steps and prompts go together.
        next: what is given out next.
        waiting: what was given out before, and is not trained on yet, ascending.
    """

    numbering: Numbering
    next: GroupId
    waiting: Sequence[GroupId] = ()

    @classmethod
    def at(cls, step: int, count: int) -> Position:
        """That of a run which trains on `count` prompts in each step and always has, with `step` to come."""
        return cls(Numbering(1, 0, count), GroupId(step, 0))

    @classmethod
    def of_json(cls, saved: Mapping[str, Any]) -> Position:
        """Read what `to_json` gave, also of releases that did not save the numbering."""
        step, first = saved.get("numbered_from", (1, 0))
        return cls(
            Numbering(step, first, saved["groups_per_step"]),
            GroupId(*saved["next"]),
            sorted(GroupId(*group) for group in saved["waiting"]),
        )

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values, for a checkpoint."""
        step, first, count = self.numbering
        return {
            "groups_per_step": count,
            "next": list(self.next),
            "waiting": [list(group) for group in self.waiting],
            "numbered_from": [step, first],
        }

    def with_count(self, step: int, count: int) -> Position:
        """The same prompts to come, none missed and none repeated, for steps of so many.

        Args:
            step: the step that comes next.
            count: prompts of each step from then on.
        """
        if count == self.numbering.per_step:
            return self
        old = self.numbering
        waiting, following = [old.number(group) for group in self.waiting], old.number(self.next)
        new = Numbering(step, min([*waiting, following]), count)
        return Position(new, new.group(following), sorted(map(new.group, waiting)))

    def in_step(self, step: int, count: int) -> tuple[Position, int, int]:
        """For a run whose steps have the prompts of their own numbers, and no others.

        Args:
            step: the step that comes next.
            count: prompts of each step from then on.

        Returns:
            The position, how many prompts are missed by it, and how many are trained on twice: both 0 unless a
            schedule saved it that trains on prompts as they become ready.
        """
        old = self.numbering
        first, following = old.first_of(step), old.number(self.next)
        waiting = {old.number(group) for group in self.waiting}
        missed = sum(number < first for number in waiting) + max(0, first - following)
        twice = sum(number not in waiting for number in range(first, following))
        new = old if count == old.per_step else Numbering(step, first, count)
        return Position(new, GroupId(step, 0)), missed, twice
