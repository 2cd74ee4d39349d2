"""Records a run: metrics, events, samples, run.json, the live view and the trackers.

The driver has one `Recorder` per run; the training loop, the launcher and the saves report to it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.text import Text

from trinity_sync.errors import RunError, TrinityError
from trinity_sync.host.hardware import peak_rss
from trinity_sync.host.interrupts import shielded
from trinity_sync.host.logs import flush_logs, log_failure, story
from trinity_sync.host.masking import without_hidden
from trinity_sync.host.origin import error_text, origin
from trinity_sync.host.terminal import printable
from trinity_sync.tracking import json_lines, run_end
from trinity_sync.tracking.events import (
    CommitEvent,
    Event,
    FaultEvent,
    HealEvent,
    PhaseEvent,
    PublishEvent,
    SaveEvent,
    event_line,
    event_line_step,
    event_name,
    merged_lines,
    stream_events,
)
from trinity_sync.tracking.json_lines import PackedRecords, plain
from trinity_sync.tracking.live import LiveView, Mode
from trinity_sync.tracking.run_record import RunFolder, RunRecord, Status, VersionJson
from trinity_sync.tracking.run_state import RunState
from trinity_sync.tracking.summary import Summary, summarise, version_digests, wall_seconds, write_summary
from trinity_sync.tracking.tracker_feed import Trackers
from trinity_sync.tracking.trackers import TrackedRun, Tracker

logger = logging.getLogger(__name__)

GoesOn = Callable[[BaseException, int, float], str | None]
"""Returns a sentence if another attempt follows one that an error has ended; see `Recorder.start`."""


class Recorder:
    """Records a run. A context manager: left without `finish`, it finishes with the exception's status.

    ::

        with RunFolder.open(path, resume=False) as folder, Recorder.start(folder, ...) as recorder:
            recorder.phase("starting Ray")
            for step in ...:
                recorder.event(PublishEvent(version=step, ...))  # from any thread
                recorder.metrics(step, {"reward/mean": 0.5, "timing/update": 0.2})
            recorder.finish("completed", peak_memory={"trainer": 10**9})
    """

    def __init__(
        self,
        folder: RunFolder,
        record: RunRecord,
        view: LiveView,
        trackers: Trackers,
        *,
        total_steps: int | None,
        report: Callable[[Path], object] | None,
        resume: run_end.ResumeCommand | None,
        checkpoints: Path | None,
        clock: Callable[[], float],
        goes_on: GoesOn | None,
        healed: HealEvent | None,
    ) -> None:
        self.folder, self.attempt, self.view = folder, record.attempt, view
        self._record, self._trackers, self._report, self._resume = record, trackers, report, resume
        self._total, self._checkpoints, self._clock = total_steps, checkpoints, clock
        self._metrics = json_lines.JsonlWriter(folder.metrics)
        self._events = json_lines.JsonlWriter(folder.events)
        self._samples = json_lines.JsonlWriter(folder.samples)
        self._goes_on, self._healed = goes_on, healed
        self._lives_on: set[str] = set()
        self._made: int | None = None
        self._failed_at: float | None = None
        self._lock = threading.Lock()
        self._finished = False
        self._late: list[Event] = []
        trackers.report_faults(self._tracker_fault)

    @classmethod
    def start(
        cls,
        folder: RunFolder,
        *,
        command: str | Sequence[str],
        seed: int | None,
        config_digest: str | None,
        threads: int | Mapping[str, int] | None,
        total_steps: int | None,
        name: str = "",
        subtitle: str = "",
        config: Mapping[str, object] | None = None,
        reproducible: bool = True,
        resumed_from: int | None = None,
        id: str | None = None,
        places: Mapping[str, str | None] | None = None,
        view: Mode = "auto",
        trackers: Iterable[Tracker] = (),
        report: Callable[[Path], object] | None = None,
        resume: run_end.ResumeCommand | None = None,
        checkpoints: Path | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
        goes_on: GoesOn | None = None,
        healed: HealEvent | None = None,
    ) -> Recorder:
        """Open the record of an attempt: start the trackers, cut abandoned lines, write run.json, show the view.
        `command`, `seed`, `config_digest`, `threads`, `reproducible`, `id`, `places`: for run.json, see `RunRecord`.
        `clock`: returns Unix seconds. `goes_on`: asked after a failure whether another attempt follows in this process,
        with its number and the time of `failing`; its answer replaces the summary. `healed`: recorded with the first
        step, its time that of the failure before.
        """
        if folder.resumed and resumed_from is None:
            raise ValueError("a resume needs the step it starts from")
        record = RunRecord.new(
            folder.run_json,
            command=command,
            seed=seed,
            config_digest=config_digest,
            threads=threads,
            reproducible=reproducible,
            total_steps=total_steps,
            resumed_from=resumed_from,
            id=id,
            places=places,
            clock=clock,
        )
        tracked = TrackedRun(
            folder=folder.path, name=name, config=config or {}, attempt=record.attempt, resumed_from=resumed_from
        )
        started = Trackers(trackers, tracked, required=healed is None)
        try:
            if resumed_from is not None:
                json_lines.cut_after(folder.metrics, resumed_from, key=json_lines.metrics_step)
                json_lines.cut_after(folder.events, resumed_from, key=event_line_step)
                _cut_samples(folder.samples, resumed_from)
            record.start()
            story.info("%s", run_end.beginning_text(record.to_json(), name, subtitle))
            state = RunState(total_steps, title=name, subtitle=subtitle)
            if resumed_from is not None:
                for line in merged_lines(json_lines.stream(folder.events), json_lines.stream(folder.metrics)):
                    state.take(line, record.started or 0.0)
            state.begin(record.attempt, clock())
            shown = LiveView(view, state, console, clock=clock)
            return cls(
                folder,
                record,
                shown,
                started,
                total_steps=total_steps,
                report=report,
                resume=resume,
                checkpoints=checkpoints,
                clock=clock,
                goes_on=goes_on,
                healed=healed,
            )
        except BaseException:
            started.close("failed")
            raise

    def phase(self, text: str) -> None:
        """Record work outside of the steps, such as ``starting Ray``."""
        self._record_shown(PhaseEvent(what=text))

    def saving(self, step: int) -> None:
        """Record that a checkpoint is being written; the commit of this step or of a later one ends it."""
        self._record_shown(SaveEvent(step=step))

    def _record_shown(self, event: Event) -> None:
        """Record an event that only the views need: if the disk refuses it, the run goes on."""
        try:
            self.event(event)
        except RunError as error:
            logger.warning("%s is not recorded: %s", event_name(event), error)
            self.view.take(event)

    def metrics(self, step: int, values: Mapping[str, object] | None = None, **more: object) -> None:
        """Record the numbers of one trainer step, such as ``reward/mean`` and ``timing/update`` (seconds)."""
        numbers = {name: plain(value) for name, value in {**(values or {}), **more}.items()}
        line = {"attempt": self.attempt, "step": int(step), "time": self._clock(), **numbers}
        self._metrics.append(line)
        story.info("%s", run_end.step_text(int(step), numbers))
        self._trackers.log(int(step), numbers)
        self.view.take(line)
        healed = self._healed
        if healed is not None and step > healed.resumed_from:
            self._healed = None
            kept = ", ".join(sorted(self._lives_on)) or None
            took = self._clock() - (healed.time or 0.0)
            self.event(replace(healed, total_s=took, kept=kept, made=self._made))

    def samples(self, step: int, lines: Sequence[Mapping[str, object]]) -> None:
        """Record the lines of a step in samples.jsonl; if the disk refuses them, the run goes on."""
        rows = [{"attempt": self.attempt, "step": int(step), **line} for line in lines]
        if not rows:
            return
        try:
            for row in rows:
                self._samples.append(row)
        except RunError as error:
            story.warning("samples of step %d are not recorded: %s", step, error)
        self._trackers.samples(int(step), rows)

    def event(self, event: Event) -> None:
        """Record one event with the time and the attempt. Any thread; after `finish` it is dropped with a log line."""
        event = replace(event, time=self._clock(), attempt=self.attempt)
        if not self._record_event(event):
            logger.warning("an event came after the end of the run and is not recorded: %s", event_line(event))

    def fault(self, where: str, error: BaseException | str) -> None:
        """Record a failure. Any thread."""
        text = error if isinstance(error, str) else str(error) or type(error).__name__
        found = None if isinstance(error, str) else origin(error)
        trace = None if found is None else without_hidden(found.traceback)
        self.event(FaultEvent(where=where, error=without_hidden(text), traceback=trace))

    def lives_on(self, explorer: str, lives: bool) -> None:
        """Note whether an explorer is one of the attempt before, for the `heal` event. Any thread."""
        (self._lives_on.add if lives else self._lives_on.discard)(explorer)

    def made_meanwhile(self, groups: int) -> None:
        """Note how many groups explorers made between two attempts, for the `heal` event."""
        self._made = groups

    def failing(self) -> None:
        """Note the time of a failure that ends the attempt: to end it in order takes a while."""
        self._failed_at = self._clock()

    def finish(
        self,
        status: Status,
        error: str | None = None,
        peak_memory: Mapping[str, int] | None = None,
        *,
        next_attempt: str | None = None,
    ) -> None:
        """End the record: write run.json, summary.json and the report, and print the summary.

        Every part is tried even if another one fails. A second call does nothing.

        `peak_memory`: bytes by role; the driver's own is added. `next_attempt`: printed in place of the summary, as the
        run goes on.
        """
        error = error and without_hidden(error)
        with self._lock:
            if self._finished:
                return
            self._finished = True
        self.view.close()
        refused: list[RunError] = []
        summary: Summary | None = None

        def attempt(action: Callable[[], None]) -> None:
            try:
                action()
            except RunError as problem:
                refused.append(problem)

        def conclude() -> None:
            nonlocal summary
            summary = self._summarise(status, {**(peak_memory or {}), "driver": peak_rss()})
            write_summary(self.folder.summary, summary)

        attempt(self._metrics.close)
        attempt(self._events.close)
        attempt(self._samples.close)
        # run.json first: its end bounds the wall time, and the status matters more than the figures.
        attempt(lambda: self._record.finish(status, error, self._last_version()))
        attempt(conclude)
        # Trackers come after the summary, as they may be slow; their faults are added to it.
        self._trackers.close(status)
        if self._late:
            attempt(self._add_late)
            attempt(conclude)
        story.info("%s", run_end.ending_text(status, error, summary))
        if next_attempt is not None:
            story.warning("%s", next_attempt)
            self._print(Text(printable(f"{status}: {error}; {next_attempt}", keep="\n"), style="yellow"))
        else:
            self._write_report()
        flush_logs()
        if summary is not None and next_attempt is None:
            folder, total = self.folder.path, self._total
            self._print(run_end.render_summary(summary, folder, total_steps=total, error=error, resume=self._resume))
        if refused:
            raise refused[0]

    def _summarise(self, status: Status, peaks: Mapping[str, int]) -> Summary:
        metrics = PackedRecords(json_lines.stream(self.folder.metrics))
        events = PackedRecords(stream_events(self.folder.events))
        wall = wall_seconds(self._record.to_json(), metrics, events)
        return summarise(metrics, events, status, wall, peaks, self._checkpoints)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error, {})

    @contextlib.contextmanager
    def ending(self, peak_memory: Mapping[str, int]) -> Iterator[None]:
        """Finish with the block, as the recorder does with its own; `peak_memory` may be filled within the block."""
        try:
            yield
        except BaseException as error:
            self._end(error, peak_memory)
            raise
        self._end(None, peak_memory)

    def _end(self, error: BaseException | None, peak_memory: Mapping[str, int]) -> None:
        if error is None:
            self.finish("completed", peak_memory=peak_memory)
            return
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        text = str(error) if isinstance(error, TrinityError) else error_text(error)
        if status == "failed":
            log_failure("the run", error)
        try:
            with shielded():
                asked = self._goes_on if status == "failed" and not self._finished else None
                then = None if asked is None else asked(error, self.attempt, self._failed_at or self._clock())
                self.finish(status, None if status == "interrupted" else text, peak_memory, next_attempt=then)
        except RunError as problem:
            # The exception being raised is the first cause.
            logger.error("the end of the run is not fully recorded: %s", problem)

    def _record_event(self, event: Event) -> bool:
        """Record an event; return False if the run has ended."""
        with self._lock:
            if self._finished:
                return False
            story.log(
                logging.WARNING if isinstance(event, FaultEvent) else logging.INFO, "%s", run_end.event_text(event)
            )
            line = event_line(event)
            self._events.append(line)
        self._trackers.event(line)
        self.view.take(event)
        return True

    def _tracker_fault(self, where: str, error: str) -> None:
        """Record a fault of a tracker. Trackers end after the run's record: their last faults wait for `finish`."""
        event = FaultEvent(time=self._clock(), attempt=self.attempt, where=where, error=without_hidden(error))
        if not self._record_event(event):
            story.warning("%s", run_end.event_text(event))
            self._late.append(event)

    def _add_late(self) -> None:
        with contextlib.closing(json_lines.JsonlWriter(self.folder.events)) as events:
            for event in self._late:
                events.append(event_line(event))

    def _last_version(self) -> VersionJson | None:
        try:
            kinds = (PublishEvent, CommitEvent)
            digests = version_digests(
                PackedRecords(one for one in stream_events(self.folder.events) if isinstance(one, kinds))
            )
        except RunError:
            return None  # the summary reports events that cannot be read
        return [VersionJson(step=int(step), digest=digest) for step, digest in digests.items()][-1] if digests else None

    def _write_report(self) -> None:
        if self._report is None:
            return
        try:
            self._report(self.folder.path)
        except Exception as problem:
            logger.warning("the report could not be written: %s", problem, exc_info=True)

    def _print(self, text: RenderableType) -> None:
        try:
            self.view.console.print(text, crop=False)
        except Exception as problem:
            logger.warning("the summary could not be shown: %s", problem)


def _cut_samples(path: Path, step: int) -> None:
    """Drop samples of steps after `step`. A damaged file is renamed: nothing depends on it."""
    try:
        json_lines.cut_after(path, step, key=json_lines.metrics_step)
    except RunError as error:
        aside = path.with_name(f"{path.name}.damaged")
        story.warning("%s; it is put aside as %s", error, aside.name)
        try:
            path.replace(aside)
        except OSError as problem:
            raise error from problem
