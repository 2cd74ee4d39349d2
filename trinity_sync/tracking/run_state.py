"""How a run stands, as its lines tell: the one model behind the live view and `trinity-sync watch`.

The recorder feeds it with what it writes, a watcher with what it reads, so both see the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from trinity_sync.tracking import json_lines, units
from trinity_sync.tracking.events import (
    CommitEvent,
    Event,
    FaultEvent,
    LoadEvent,
    LogLine,
    PhaseEvent,
    PublishEvent,
    SaveEvent,
    line_time,
)
from trinity_sync.tracking.json_lines import Record
from trinity_sync.tracking.summary import is_late

_TIMED_STEPS = 20
_STALLED_S, _STALLED_PACES = 10.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that failed: who, what, and when in Unix seconds."""

    where: str
    error: str
    at: float

    def __str__(self) -> str:
        return self.error if self.error.startswith(self.where) else f"{self.where}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class _TimedStep:
    """A step that was timed: its seconds, and what it trained on, where that is known."""

    seconds: float
    samples: float | None
    tokens: float | None


class RunState:
    """Takes lines of metrics.jsonl and events.jsonl, in any order of the two files. Not for two threads at a time.

    Args:
        total_steps: the last step, None if the run is open.
        title, subtitle: the run's name, and what stands beside it.
        began: when its first attempt began, in Unix seconds.

    Attributes:
        attempt, began: the newest attempt, and when it began.
        step: the last that was completed.
        stepped: when that was, in Unix seconds; None before the attempt's first one.
        phases: what the attempt was busy with outside of its steps, and since when.
        metrics: the line of the last step.
        rewards, losses: one per step that has one, of all attempts.
        published, loaded: the last such events.
        committed: the last commit of a full checkpoint, of all attempts; there are also those of weights alone.
        held: explorer -> step of the version that it has.
        saving: the step of which a checkpoint is being written.
        faults: how many there were in the attempt.
        fault: the newest of them.
        dropped: samples dropped as over-stale in the attempt.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        title: str = "",
        subtitle: str = "",
        began: float = 0.0,
    ) -> None:
        self.total_steps, self.title, self.subtitle = total_steps, title, subtitle
        self.step = 0
        self.rewards: list[float] = []
        self.losses: list[float] = []
        self.metrics: Record = {}
        self.committed: CommitEvent | None = None
        self.committed_at = 0.0
        self.begin(0, began)

    def begin(self, attempt: int, at: float) -> None:
        """Take note that an attempt begins. What the one before held and met is gone; what it learned and saved stays.

        Args:
            at: when, in Unix seconds.
        """
        self.attempt, self.began = attempt, at
        self.stepped: float | None = None
        self.phases: list[tuple[str, float]] = []
        self.published: PublishEvent | None = None
        self.loaded: LoadEvent | None = None
        self.held: dict[str, int] = {}
        self.saving: int | None = None
        self.faults = 0
        self.fault: Fault | None = None
        self.dropped = 0.0
        self._timed: deque[_TimedStep] = deque(maxlen=_TIMED_STEPS)

    def take(self, line: LogLine, now: float) -> None:
        """Take a line. What it does not understand it leaves.

        Args:
            line: as it stands in its file; one with `event` is an event, any other the metrics of a step.
            now: when it happened where the line does not say, in Unix seconds.
        """
        at = line_time(line)
        at = now if at is None else at
        attempt = line.attempt if isinstance(line, Event) else line.get("attempt")
        if isinstance(attempt, int) and attempt != self.attempt:
            if attempt < self.attempt:
                return
            self.begin(attempt, at)
        if isinstance(line, Event):
            self._take_event(line, at)
        else:
            self._take_step(line, at)

    def _take_step(self, line: Record, at: float) -> None:
        step = json_lines.metrics_step(line)
        if step is None or is_late(line):
            return
        if self.stepped is not None and at >= self.stepped:
            # The first step is no measure: it has the start-up in it.
            samples, tokens = (units.finite(line.get(f"batch/{unit}")) for unit in ("samples", "tokens"))
            self._timed.append(_TimedStep(seconds=at - self.stepped, samples=samples, tokens=tokens))
        self.stepped, self.step, self.metrics = at, step, dict(line)
        for name, course in (("reward/mean", self.rewards), ("loss", self.losses)):
            value = units.finite(line.get(name))
            if value is not None:
                course.append(value)
        self.dropped += units.finite(line.get("samples/dropped")) or 0.0

    def _take_event(self, event: Event, at: float) -> None:
        match event:
            case PhaseEvent():
                self.phases.append((event.what, at))
            case PublishEvent():
                self.published = event
            case LoadEvent():
                self.loaded = event
                self.held[event.explorer] = event.version
            case SaveEvent():
                self.saving = event.step
            case CommitEvent(kind="full"):
                self.committed, self.committed_at = event, at
                if self.saving is not None and self.saving <= event.step:
                    self.saving = None
            case FaultEvent():
                self.faults += 1
                self.fault = Fault(where=event.where, error=event.error, at=at)

    @property
    def newest(self) -> int | None:
        """The step of the newest version that was published."""
        return None if self.published is None else self.published.version

    def behind(self, version: int) -> int:
        """Count the steps from a version to the newest one."""
        return max(0, (self.newest or 0) - version)

    @property
    def busy(self) -> str | None:
        """What the run is busy with outside of its steps, if it is."""
        if not self.phases or self.phases[-1][1] <= (self.stepped or float("-inf")):
            return None
        return self.phases[-1][0]

    @property
    def pace_s(self) -> float | None:
        """Seconds of a step: the median of the last ones."""
        return statistics.median(one.seconds for one in self._timed) if self._timed else None

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining steps will take at this pace."""
        if self.total_steps is None or self.pace_s is None:
            return None
        return self.pace_s * max(0, self.total_steps - self.step)

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained on per second of the last steps."""
        return self._rate([(one.samples, one.seconds) for one in self._timed])

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on per second of the last steps."""
        return self._rate([(one.tokens, one.seconds) for one in self._timed])

    def stalled_s(self, now: float) -> float | None:
        """Seconds since the last step, where that is much longer than steps take; else None."""
        if self.stepped is None or self.pace_s is None or self.step == self.total_steps:
            return None
        waited = now - self.stepped
        return waited if waited > max(_STALLED_S, _STALLED_PACES * self.pace_s) else None

    @staticmethod
    def _rate(measured: list[tuple[float | None, float]]) -> float | None:
        known = [(amount, seconds) for amount, seconds in measured if amount is not None]
        seconds = sum(seconds for _, seconds in known)
        return sum(amount for amount, _ in known) / seconds if seconds > 0 else None
