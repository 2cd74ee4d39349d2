"""Where a run is in its data: by the number of the prompt, so that a resume with another number of prompts per step
goes on with those that come next. Pure; for both schedules, and for pairs as for prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.advantages import of_rewards
from trinity_sync.samples.batch import SampleBatch


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


# When a validation takes place, and what is measured of its samples.


@dataclass(frozen=True, kw_only=True)
class ValidationTimes:
    """When a validation takes place.

    Attributes:
        interval: steps between validations, 0 for the last step only.
        last: the run's last step, which is always validated.
        at_start: whether what a run begins with is validated.
    """

    interval: int
    last: int
    at_start: bool

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is validated."""
        return step == self.last or bool(self.interval and step % self.interval == 0)


def validation_metrics(batch: SampleBatch) -> dict[str, float]:
    """Measure the samples of a validation.

    Args:
        batch: as many samples of each prompt, at least one.

    Returns:
        ``val/prompts``, ``val/samples`` (how many), ``val/failed`` (how many samples could not be judged);
        ``val/reward/mean``, ``std``, ``min``, ``max`` of those that have a reward, if there is one;
        ``val/response_length/mean`` and ``max`` (in tokens) and ``val/truncated`` (share that did not end by itself).
        Where the task says which samples are right: ``val/exact``, their share of those that were judged, and
        ``val/pass@k`` for k of 2, 4, 8 and so on below the samples of a prompt, and for these; of prompts all of whose
        samples were judged, if there is one.
    """
    lengths = batch.response_lengths
    _, group = batch.groups()
    counts = np.bincount(group)
    failed = np.array([bool(error) for error in batch.errors])
    metrics = {
        "val/prompts": float(len(counts)),
        "val/samples": float(len(batch)),
        "val/failed": float(failed.sum()),
        **{f"val/{name}": value for name, value in of_rewards(batch.rewards[~np.isnan(batch.rewards)]).items()},
        "val/response_length/mean": float(lengths.mean()),
        "val/response_length/max": float(lengths.max()),
        "val/truncated": float(1.0 - batch.finished.mean()),
    }
    exact = batch.exact[~failed]
    if len(exact) and np.isfinite(exact).all():
        metrics["val/exact"] = float(exact.mean())
        right = np.bincount(group, batch.exact == 1.0).astype(np.int64)
        judged = np.bincount(group, failed) == 0
        made = int(counts.min())
        metrics |= {f"val/pass@{k}": pass_at(k, right[judged], made) for k in _sizes(made) if judged.any()}
    return metrics


def pass_at(k: int, right: NDArray[np.int64], made: int) -> float:
    """Estimate without bias how often one of k samples of a prompt is right: 1 - C(made - right, k) / C(made, k), the
    mean over prompts (Chen et al.: "Evaluating Large Language Models Trained on Code", 2021).

    Args:
        k: at most `made`.
        right: of each prompt, how many of its samples are right.
        made: samples of each prompt.
    """
    return float(np.mean([1.0 - comb(made - count, k) / comb(made, k) for count in right.tolist()]))


def _sizes(made: int) -> list[int]:
    """The k of ``pass@k``; that of one sample is ``val/exact``."""
    powers = [1 << exponent for exponent in range(1, made.bit_length()) if 1 << exponent < made]
    return [*powers, made] if made > 1 else []
