"""The queue between explorers that never stop and a trainer that takes whole batches: which groups of samples are to be
made next, which are on their way, and which the trainer gets. A pure state machine with an injected clock.

A *group* is all samples of one prompt; it is trained on whole, is never split, and is as stale as its oldest token.
Groups are numbered (step, prompt) as the task gives them out, and each is trained on exactly once, though not always in
the step whose number it bears: an update takes the oldest that are ready, so one explorer that is slow holds nobody up.

    waiting -> out (an explorer makes it) -> ready -> taken

A group goes back to waiting when its explorer is gone or keeps the trainer waiting, and when it turned over-stale. One
that is *flat* teaches nothing: it is laid aside, and done with, unless too few others are found for the next update.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from trinity_sync.samples.batch import staleness
from trinity_sync.samples.position import GroupId, Position

T = TypeVar("T")


class ReadyGroup(NamedTuple, Generic[T]):
    """A group that the trainer may take: the step of the (oldest) version that made it, which group, its samples."""

    version_step: int
    group: GroupId
    samples: T


class UpdateGroups(NamedTuple, Generic[T]):
    """What an update takes: its groups; flat ones, where it lacks others; and flat ones that it leaves out."""

    groups: list[ReadyGroup[T]]
    filled: list[ReadyGroup[T]]
    left_out: list[ReadyGroup[T]]


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """What the queue goes by.

    Attributes:
        groups_per_step: groups that one update takes.
        max_staleness: the largest staleness at which a group is trained on.
        wait: admit a group only if it will be within the bound at its place in the line; else as soon as it would be
            if it were the next, and drop it when it is not.
        max_open: groups that may be out or ready at a time, at least `groups_per_step`.
        overdue_s: how long a group that is out may keep the trainer waiting before another explorer makes it too.
        most_made: groups, flat ones included, of which an update that lacks others takes flat ones, at least
            `groups_per_step`; None: no group is flat.
    """

    groups_per_step: int
    max_staleness: int
    wait: bool
    max_open: int
    overdue_s: float
    most_made: int | None = None

    def __post_init__(self) -> None:
        for places in (self.max_open, self.most_made):
            if places is not None and places < self.groups_per_step:
                raise ValueError(f"room for {places} groups, but an update takes {self.groups_per_step}")


@dataclass(frozen=True)
class _Out:
    explorer: str
    since: float


class GroupQueue(Generic[T]):
    """All groups of a run that were given out and not taken. Not thread-safe.

    Args:
        rules: see `QueueRules`.
        step: the first update that takes groups; the task's groups from this step on are made.
        clock: seconds, monotonic.
        position: what `position` gave when that step was to come, to go on from there, also with other rules; None:
            nothing of the steps from `step` on was taken, and everything before.

    Attributes:
        step: the next update that takes groups.
        newest: the newest version that explorers can load, None before the first.
        dropped: groups that were thrown away as over-stale.
        aside: flat groups that were made since the last update, and not taken.
        numbering: which prompts of the data the groups of a step are.
    """

    def __init__(
        self, rules: QueueRules, step: int, clock: Callable[[], float], position: Mapping[str, Any] | None = None
    ) -> None:
        self._rules = rules
        self._clock = clock
        count = rules.groups_per_step
        begin = Position.at(step, count) if position is None else Position.of_json(position).with_count(step, count)
        self.numbering = begin.numbering
        self._next = begin.next
        self._waiting = list(begin.waiting)  # a heap: the oldest is made first
        self._out: dict[GroupId, _Out] = {}
        self._ready: dict[GroupId, ReadyGroup[T]] = {}
        self._starved_since: float | None = None
        self.aside: list[ReadyGroup[T]] = []
        self.step = step
        self.newest: int | None = None
        self.dropped = 0

    @property
    def ready(self) -> int:
        """Groups that the trainer may take."""
        return len(self._ready)

    def publish(self, version_step: int) -> None:
        """Note that a version is there for explorers to load."""
        if self.newest is None or version_step > self.newest:
            self.newest = version_step

    def hand_out(self, explorer: str, most: int) -> list[GroupId]:
        """Give an idle explorer at most so many groups to make with the newest version; none: it has to wait."""
        self._reclaim()
        handed: list[GroupId] = []
        while len(handed) < most and self._admits():
            group = heapq.heappop(self._waiting) if self._waiting else self._following()
            self._out[group] = _Out(explorer, self._clock())
            handed.append(group)
        return handed

    def deliver(self, group: GroupId, version_step: int, samples: T, *, flat: bool = False) -> bool:
        """Take a group that is made. False where it is not needed: another explorer was faster, or it is over-stale."""
        if self._out.pop(group, None) is None:
            if group not in self._waiting:
                return False
            self._waiting.remove(group)
            heapq.heapify(self._waiting)
        if self._over_stale(version_step):
            self._drop(group)
            return False
        made = ReadyGroup(version_step, group, samples)
        if flat:
            self.aside.append(made)
        else:
            self._ready[group] = made
        return True

    def give_back(self, explorer: str) -> None:
        """Note that the explorer will not make what it was handed."""
        for group in [group for group, out in self._out.items() if out.explorer == explorer]:
            del self._out[group]
            heapq.heappush(self._waiting, group)

    def take(self) -> UpdateGroups[T] | None:
        """Take the groups of the next update, the oldest versions first; None while too few are within the bound."""
        for group, ready in list(self._ready.items()):
            if self._over_stale(ready.version_step):
                del self._ready[group]
                self._drop(group)
        wanted = self._rules.groups_per_step
        if len(self._ready) < wanted and not self._all_made():
            if self._starved_since is None:
                self._starved_since = self._clock()
            return None
        groups = heapq.nsmallest(wanted, self._ready.values(), key=lambda ready: ready[:2])
        for ready in groups:
            del self._ready[ready.group]
        aside, self.aside = sorted(self.aside, key=lambda made: made[:2]), []
        missing = wanted - len(groups)
        self._starved_since = None
        self.step += 1
        return UpdateGroups(groups, aside[:missing], aside[missing:])

    def _all_made(self) -> bool:
        """Tell whether no more groups are made for the next update than there are, flat ones included."""
        most = self._rules.most_made
        return most is not None and len(self._ready) + len(self.aside) >= most

    def explorers_out(self) -> list[str]:
        """Return the explorers that have groups out."""
        return sorted({out.explorer for out in self._out.values()})

    def overdue_in(self) -> float | None:
        """Return the seconds until a group that is out becomes overdue; None while the trainer waits for none."""
        if self._starved_since is None or not self._out:
            return None
        first = min(max(out.since, self._starved_since) for out in self._out.values())
        return max(0.0, first + self._rules.overdue_s - self._clock())

    def position(self) -> dict[str, object]:
        """Tell where the run is in the task's groups, as JSON: what was given out and not taken, what comes next."""
        return Position(self.numbering, self._next, sorted([*self._waiting, *self._out, *self._ready])).to_json()

    def _admits(self) -> bool:
        ahead = len(self._ready) + len(self._out)
        if self.newest is None or ahead >= self._rules.max_open:
            return False
        if ahead + len(self.aside) >= max(self._rules.max_open, self._rules.most_made or 0):
            return False  # all are flat while the trainer trains
        place = ahead // self._rules.groups_per_step if self._rules.wait else 0
        return staleness(self.newest, self.step + place) <= self._rules.max_staleness

    def _following(self) -> GroupId:
        group = self._next
        last = group.prompt + 1 == self._rules.groups_per_step
        self._next = GroupId(group.step + 1, 0) if last else GroupId(group.step, group.prompt + 1)
        return group

    def _reclaim(self) -> None:
        if self.overdue_in() != 0.0:
            return
        assert self._starved_since is not None, "groups are overdue only while the trainer waits"
        limit = self._clock() - self._rules.overdue_s
        for group, out in list(self._out.items()):
            if max(out.since, self._starved_since) <= limit:
                del self._out[group]
                heapq.heappush(self._waiting, group)

    def _over_stale(self, version_step: int) -> bool:
        return staleness(version_step, self.step) > self._rules.max_staleness

    def _drop(self, group: GroupId) -> None:
        self.dropped += 1
        heapq.heappush(self._waiting, group)
