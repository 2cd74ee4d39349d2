"""The queue between explorers and a trainer that do not wait for each other: the groups of samples to generate next,
those being generated, and those that the trainer takes. A pure state machine with an injected clock.

A *group* is all samples of one prompt. It is trained on as a whole, and is as stale as its oldest token. The task
numbers groups by (step, prompt). Each is trained on exactly once, but not always in the step of its number: an update
takes the oldest ready groups, so a slow explorer does not delay the others.

    waiting -> out (an explorer generates it) -> ready -> taken

A group goes back to waiting when its explorer is dead or delays the trainer, and when it is over-stale. A *flat* group
teaches nothing: it is put aside, and is used only if the next update finds too few others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from trinity_sync.samples.batch import staleness
from trinity_sync.samples.position import GroupId, Position, SavedPosition

T = TypeVar("T")


class ReadyGroup(NamedTuple, Generic[T]):
    """A group that the trainer may take; `version_step` is of its oldest version."""

    version_step: int
    group: GroupId
    samples: T


class UpdateGroups(NamedTuple, Generic[T]):
    """The groups of an update: other ones, flat ones in place of missing ones, and flat ones that are left out."""

    groups: list[ReadyGroup[T]]
    filled: list[ReadyGroup[T]]
    left_out: list[ReadyGroup[T]]


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """The rules of the queue.

    Attributes:
        max_staleness: largest staleness of a group that is trained on, in steps.
        wait: hand out a group only if it will be within the bound at its place in the line. Otherwise hand it out if it
            would be within the bound as the next one, and drop it later if it is not.
        max_open: most groups that are out or ready, at least `groups_per_step`.
        overdue_s: seconds for which a group may delay the trainer before another explorer generates it, too.
        most_made: groups, flat ones included, after which an update takes flat ones, at least `groups_per_step`; None:
            no group is flat.
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
class _Assignment:
    explorer: str
    since: float


class GroupQueue(Generic[T]):
    """All groups of a run that were given out and not taken. Not thread-safe.

    Args:
        clock: seconds, monotonic.
        position: `position` of an earlier queue before that update, perhaps with other rules; None: begin with the
            prompts of `step`.

    Attributes:
        newest: the newest version that explorers can load, None before the first.
        aside: flat groups delivered since the last update.
    """

    def __init__(
        self, rules: QueueRules, step: int, clock: Callable[[], float], position: SavedPosition | None = None
    ) -> None:
        self._rules = rules
        self._clock = clock
        count = rules.groups_per_step
        begin = Position.at(step, count) if position is None else Position.of_json(position).with_count(step, count)
        self.numbering = begin.numbering
        self._next = begin.next
        self._waiting = list(begin.waiting)  # a heap: the oldest is made first
        self._out: dict[GroupId, _Assignment] = {}
        self._ready: dict[GroupId, ReadyGroup[T]] = {}
        self._starved_since: float | None = None
        self._repeated: set[GroupId] = set()  # of the journal, for the steps to come
        self.aside: list[ReadyGroup[T]] = []
        self.step = step
        self.newest: int | None = None
        self.dropped = 0

    @property
    def ready(self) -> int:
        """Number of groups that the trainer may take."""
        return len(self._ready)

    def publish(self, version_step: int) -> None:
        """Note a version that explorers can load."""
        if self.newest is None or version_step > self.newest:
            self.newest = version_step

    def hand_out(self, explorer: str, most: int, version_step: int | None = None) -> list[GroupId]:
        """Give an idle explorer at most so many groups to generate; none: it has to wait. `version_step`: of its
        version; None: it loads the newest.
        """
        self._reclaim()
        groups: list[GroupId] = []
        version_step = self.newest if version_step is None else version_step
        while len(groups) < most and self._admits(version_step):
            group = heapq.heappop(self._waiting) if self._waiting else self._following()
            self._out[group] = _Assignment(explorer, self._clock())
            groups.append(group)
        return groups

    def expects(self, group: GroupId) -> bool:
        """Tell whether a group is out, or was taken back and is not made yet."""
        return group in self._out or group in self._waiting

    def deliver(self, group: GroupId, version_step: int, samples: T, *, flat: bool = False) -> bool:
        """Accept a group. False: another explorer was faster, or it is over-stale."""
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

    def is_open(self, group: GroupId) -> bool:
        """Tell whether a group is still to be generated. Others were trained on, if this is before `hand_out`."""
        return group in self._waiting or group >= self._next

    def reserve(self, groups: Collection[GroupId]) -> None:
        """Exclude open groups that an earlier attempt finished from generation. Called before `hand_out`."""
        self._repeated = {*groups}
        last = max(groups, default=None)
        while last is not None and self._next <= last:
            self._waiting.append(self._following())
        self._waiting = sorted({*self._waiting} - self._repeated)

    def repeat(self, groups: Iterable[GroupId]) -> None:
        """Repeat an update of an earlier attempt, with reserved groups."""
        self._repeated.difference_update(groups)
        self._starved_since = None
        self.step += 1

    def restore(self, group: GroupId, version_step: int, samples: T, *, flat: bool = False) -> None:
        """Accept a reserved group from the journal."""
        self._repeated.discard(group)
        heapq.heappush(self._waiting, group)
        self.deliver(group, version_step, samples, flat=flat)

    def give_back(self, explorer: str) -> None:
        """Take back all groups of an explorer."""
        for group in [group for group, out in self._out.items() if out.explorer == explorer]:
            del self._out[group]
            heapq.heappush(self._waiting, group)

    def take(self) -> UpdateGroups[T] | None:
        """Return the groups of the next update, oldest versions first; None while too few are within the bound."""
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
        aside, self.aside = sorted(self.aside, key=lambda flat: flat[:2]), []
        missing = wanted - len(groups)
        self._starved_since = None
        self.step += 1
        return UpdateGroups(groups, aside[:missing], aside[missing:])

    def _all_made(self) -> bool:
        """Tell whether `most_made` groups, flat ones included, are there for the next update."""
        most = self._rules.most_made
        return most is not None and len(self._ready) + len(self.aside) >= most

    def explorers_out(self) -> list[str]:
        """Return the explorers that have groups out."""
        return sorted({out.explorer for out in self._out.values()})

    def overdue_in(self) -> float | None:
        """Return the seconds until a group becomes overdue; None while the trainer does not wait for one."""
        if self._starved_since is None or not self._out:
            return None
        first = min(max(out.since, self._starved_since) for out in self._out.values())
        return max(0.0, first + self._rules.overdue_s - self._clock())

    def position(self) -> SavedPosition:
        """Return the position in the task's groups as JSON values; see `Position`."""
        waiting = sorted([*self._waiting, *self._out, *self._ready, *self._repeated])
        return Position(self.numbering, self._next, waiting).to_json()

    def _admits(self, version_step: int | None) -> bool:
        ahead = len(self._ready) + len(self._out) + len(self._repeated)
        if version_step is None or ahead >= self._rules.max_open:
            return False
        if ahead + len(self.aside) >= max(self._rules.max_open, self._rules.most_made or 0):
            return False  # all groups may be flat while the trainer trains
        place = ahead // self._rules.groups_per_step if self._rules.wait else 0
        return staleness(version_step, self.step + place) <= self._rules.max_staleness

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
