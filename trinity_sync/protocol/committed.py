"""Which steps are committed, as what, and which of them the trackers name. Used by `trinity_sync.protocol.commit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trinity_sync.protocol.decisions import MoveTracker
from trinity_sync.protocol.parts import FULL, KINDS, STATE_DICT, Kind


class CommittedSteps:
    """What is on the disk, as one attempt has to know it.

    Args:
        attempt: the run's attempt.
        found: what is there at first, as (step, attempt, kind).
    """

    def __init__(self, attempt: int, found: Iterable[tuple[int, int, Kind]]) -> None:
        self._attempt = attempt
        self._visible: dict[int, tuple[int, Kind]] = {step: (by, kind) for step, by, kind in found}
        self._beside: set[int] = set()
        self._trackers: dict[Kind, int | None] = {
            FULL: max((step for step, (_, kind) in self._visible.items() if kind == FULL), default=None),
            STATE_DICT: max(self._visible, default=None),
        }

    @property
    def trackers(self) -> Mapping[Kind, int | None]:
        """The step that each tracker names; None: nothing committed yet."""
        return dict(self._trackers)

    def kind(self, step: int) -> Kind | None:
        """Return as what a step is committed: by this attempt, else by an earlier one; None: it is not."""
        return self.own(step) or (self._visible[step][1] if step in self._visible else None)

    def own(self, step: int) -> Kind | None:
        """Return as what this attempt has committed a step, visible or beside what must stay; None: it has not."""
        by, kind = self._visible.get(step, (None, None))
        if by == self._attempt:
            return kind
        return STATE_DICT if step in self._beside else None

    def is_taken(self, step: int, kind: Kind) -> bool:
        """Return whether what is visible is in the way of a commit of this kind.

        It is never replaced by less, nor by weights that its own readers and pins do not know of.
        """
        by, visible = self._visible.get(step, (None, None))
        return kind == STATE_DICT and visible is not None and (by != self._attempt or visible == FULL)

    def add(self, step: int, kind: Kind) -> list[MoveTracker]:
        """Note that this attempt's commit is visible; return which trackers follow."""
        self._visible[step] = (self._attempt, kind)
        decisions = []
        for tracked in KINDS if kind == FULL else (STATE_DICT,):
            named = self._trackers[tracked]
            if named is None or step > named:
                self._trackers[tracked] = step
                decisions.append(MoveTracker(tracked, step))
        return decisions

    def add_beside(self, step: int) -> None:
        """Note that this attempt has committed weights beside what is visible."""
        self._beside.add(step)

    def forget(self, step: int) -> None:
        """Note that what was visible is deleted."""
        self._visible.pop(step, None)
