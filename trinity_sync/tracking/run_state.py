"""The state of a run, computed from its lines, for the live view and `trinity-sync watch`."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from trinity_sync.tracking import events, json_lines, units
from trinity_sync.tracking.json_lines import Record
from trinity_sync.tracking.summary import is_late

_TIMED_STEPS = 20
_STALLED_S, _STALLED_PACES = 10.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The newest failure; `at` in Unix seconds."""

    where: str
    error: str
    at: float

    def __str__(self) -> str:
        return self.error if self.error.startswith(self.where) else f"{self.where}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class _TimedStep:
    """The seconds of a step, and the numbers of its samples and tokens."""

    seconds: float
    samples: float | None
    tokens: float | None


class RunState:
    """Follows a run by its lines in metrics.jsonl and events.jsonl. Not thread-safe.

    Attributes:
        attempt, began: the newest attempt, and its beginning in Unix seconds.
        step, stepped: the last completed step; its end in Unix seconds, None before the attempt's first step.
        phases: work of the attempt outside of its steps, each with its beginning.
        metrics: the line of the last step.
        rewards, losses: values of the steps of all attempts.
        committed, committed_at: the newest full checkpoint of all attempts, and its time.
        held: explorer -> step of its version.
        saving: the step whose checkpoint is being written.
        faults, fault: the attempt's number of faults, and the newest.
        heals, healed: how often the run went on by itself after a death, and the last time.
        dropped: samples dropped as too stale in the attempt.
    """

    def __init__(
        self, total_steps: int | None = None, *, title: str = "", subtitle: str = "", began: float = 0.0
    ) -> None:
        self.total_steps, self.title, self.subtitle = total_steps, title, subtitle
        self.step = 0
        self.rewards: list[float] = []
        self.losses: list[float] = []
        self.metrics: Record = {}
        self.committed: events.CommitEvent | None = None
        self.committed_at = 0.0
        self.heals = 0
        self.healed: events.HealEvent | None = None
        self.begin(0, began)

    def begin(self, attempt: int, at: float) -> None:
        """Begin an attempt: its versions, phases and faults are new; rewards, losses and the checkpoint stay."""
        self.attempt, self.began = attempt, at
        self.stepped: float | None = None
        self.phases: list[tuple[str, float]] = []
        self.published: events.PublishEvent | None = None
        self.loaded: events.LoadEvent | None = None
        self.held: dict[str, int] = {}
        self.saving: int | None = None
        self.faults = 0
        self.fault: Fault | None = None
        self.dropped = 0.0
        self._timed: deque[_TimedStep] = deque(maxlen=_TIMED_STEPS)

    def take(self, line: events.LogLine, now: float) -> None:
        """Take an event or the metrics of a step, if known. `now`: Unix seconds, for a line without a time."""
        at = events.line_time(line)
        at = now if at is None else at
        attempt = line.attempt if isinstance(line, events.Event) else line.get("attempt")
        if isinstance(attempt, int) and attempt != self.attempt:
            if attempt < self.attempt:
                return
            self.begin(attempt, at)
        if isinstance(line, events.Event):
            self._take_event(line, at)
        else:
            self._take_step(line, at)

    def _take_step(self, line: Record, at: float) -> None:
        step = json_lines.metrics_step(line)
        if step is None or is_late(line):
            return
        if self.stepped is not None and at >= self.stepped:
            # The first step is not timed: it includes the start-up.
            samples, tokens = (units.finite(line.get(f"batch/{unit}")) for unit in ("samples", "tokens"))
            self._timed.append(_TimedStep(seconds=at - self.stepped, samples=samples, tokens=tokens))
        self.stepped, self.step, self.metrics = at, step, dict(line)
        for name, course in (("reward/mean", self.rewards), ("loss", self.losses)):
            value = units.finite(line.get(name))
            if value is not None:
                course.append(value)
        self.dropped += units.finite(line.get("samples/dropped")) or 0.0

    def _take_event(self, event: events.Event, at: float) -> None:
        match event:
            case events.PhaseEvent():
                self.phases.append((event.what, at))
            case events.PublishEvent():
                self.published = event
            case events.LoadEvent():
                self.loaded = event
                self.held[event.explorer] = event.version
            case events.SaveEvent():
                self.saving = event.step
            case events.CommitEvent(kind="full"):
                self.committed, self.committed_at = event, at
                if self.saving is not None and self.saving <= event.step:
                    self.saving = None
            case events.FaultEvent():
                self.faults += 1
                self.fault = Fault(where=event.where, error=event.error, at=at)
            case events.HealEvent():
                self.heals += 1
                self.healed = event

    @property
    def newest(self) -> int | None:
        """The step of the newest published version."""
        return None if self.published is None else self.published.version

    def behind(self, version: int) -> int:
        return max(0, (self.newest or 0) - version)

    @property
    def busy(self) -> str | None:
        """The current work outside of the steps; None within a step."""
        if not self.phases or self.phases[-1][1] <= (self.stepped or float("-inf")):
            return None
        return self.phases[-1][0]

    @property
    def pace_s(self) -> float | None:
        """Median seconds of the last steps."""
        return statistics.median(one.seconds for one in self._timed) if self._timed else None

    @property
    def left_s(self) -> float | None:
        """Estimated seconds of the remaining steps."""
        if self.total_steps is None or self.pace_s is None:
            return None
        return self.pace_s * max(0, self.total_steps - self.step)

    @property
    def samples_per_s(self) -> float | None:
        return self._rate([(one.samples, one.seconds) for one in self._timed])

    @property
    def tokens_per_s(self) -> float | None:
        return self._rate([(one.tokens, one.seconds) for one in self._timed])

    def stalled_s(self, now: float) -> float | None:
        """Return the seconds since the last step if they are much longer than steps take, else None."""
        if self.stepped is None or self.pace_s is None or self.step == self.total_steps:
            return None
        waited = now - self.stepped
        return waited if waited > max(_STALLED_S, _STALLED_PACES * self.pace_s) else None

    @staticmethod
    def _rate(measured: list[tuple[float | None, float]]) -> float | None:
        known = [(amount, seconds) for amount, seconds in measured if amount is not None]
        seconds = sum(seconds for _, seconds in known)
        return sum(amount for amount, _ in known) / seconds if seconds > 0 else None
