"""Carries out the decisions of the monitor's book: commits, trackers, retention, journals, copies to the mirror.

It runs on the actor's event loop, and uses the disk in threads, so that the loop never waits for it. Decisions are
carried out one after another, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace

from trinity_sync.actors.monitor_client import CommitReport, EventLine, PrunedStep
from trinity_sync.actors.pending import Changes
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.folder.owner import Owner
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, Uploads
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.logs import log_failure, story
from trinity_sync.host.origin import error_text, origin
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, STATE_DICT, Abort, Cleanup, Commit, Decision, Grant, Kind, MoveTracker
from trinity_sync.protocol.retention import KeepLast
from trinity_sync.tracking import units
from trinity_sync.tracking.events import Event, FaultEvent, MirrorEvent, PruneEvent, event_line

_MOST_RESULTS = 10_000


class Execution:
    """Carries out decisions. `clock`: Unix seconds."""

    announce: Callable[[CommitReport], None] | None = None  # called in a thread with each commit

    def __init__(
        self, disk: CheckpointDisk, book: CommitBook, events: EventLog, changes: Changes, clock: Callable[[], float]
    ) -> None:
        self._disk = disk
        self._book = book
        self._events = events
        self._changes = changes
        self._clock = clock
        self._uploads: Uploads | None = None
        self._queue: asyncio.Queue[Decision] = asyncio.Queue()
        self._working = False
        self._finishing: set[int] = set()
        self._results: dict[tuple[int, Kind], CommitReport] = {}
        self._unnoted: set[int] = set()
        self._journal_lock = asyncio.Lock()
        self._retention_lock = asyncio.Lock()
        self._background: set[asyncio.Task[object]] = set()
        self._warned: set[str] = set()
        self._forever = asyncio.ensure_future(self._work())

    def start_mirror(self, place: str, settings: MirrorSettings, owner: Owner | None, *, resumed: bool) -> None:
        """Copy committed full checkpoints to a mirror from now on, after those that are missing there."""
        assert self._disk.root is not None, "there is nothing to copy"
        loop = asyncio.get_event_loop()
        steps = self._disk.full_steps()
        self._uploads = Uploads(
            self._disk.root,
            place,
            settings,
            owner=owner or Owner.new(str(self._disk.run), self._disk.root),
            policies=self._disk.policies,
            start=max(steps, default=0) if resumed else None,
            report=lambda event: loop.call_soon_threadsafe(self._mirrored, event),
            on_idle=lambda: loop.call_soon_threadsafe(self._unmirrored),
            clock=self._clock,
        )
        if steps:
            self._uploads.catch_up(steps)

    def announce_newest(self) -> None:
        """Announce the newest weights again: an earlier process of the monitor may have died between commit and
        announcement.
        """

        def tell() -> None:
            if self.announce is not None and (step := self._disk.newest_weights()) is not None:
                self.announce(self._disk.describe_committed(step, STATE_DICT))

        self._in_background(asyncio.to_thread(tell))

    def apply(self, decisions: Iterable[Decision]) -> None:
        """Carry out these decisions after the earlier ones."""
        for decision in decisions:
            if not isinstance(decision, Grant):
                self._queue.put_nowait(decision)
        self._changes.announce()

    @property
    def idle(self) -> bool:
        """Whether nothing is being carried out, deleted or copied."""
        busy = self._working or self._background or (self._uploads is not None and self._uploads.busy)
        return self._queue.empty() and not busy

    def finishing(self, step: int) -> bool:
        """Return whether the step is committed, but its trackers have not moved or retention has not run."""
        return step in self._finishing

    def result(self, step: int, *kinds: Kind | None) -> CommitReport | None:
        """Return the step's commit by this process, as the first of these kinds; None: there is none."""
        for kind in kinds:
            if kind is not None and (step, kind) in self._results:
                return self._results[step, kind]
        return None

    async def note(self, step: int) -> None:
        """Write or remove the journal of an open step. An error of the disk is a fault event and is not raised."""
        self._unnoted.add(step)
        async with self._journal_lock:
            if step not in self._unnoted:
                return  # an earlier call has written our change too
            self._unnoted.discard(step)
            try:
                await asyncio.to_thread(self._disk.write_journal, step, self._book.dump(step))
            except OSError as error:
                self._events.fault(f"journal of step {step}", error)

    async def prune(self, keep_last: int | None = None) -> list[PrunedStep]:
        """Run retention; the newest `keep_last` full checkpoints stay too. Errors never fail a commit."""
        try:
            extra = () if keep_last is None else (KeepLast(keep_last),)
            async with self._retention_lock:
                pruned, warnings = await asyncio.to_thread(self._disk.prune, self._book.open_steps(), extra)
        except Exception as error:
            self._events.fault("retention", error)
            return []
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._events.fault("retention", warning)
        for deleted in pruned:
            step, reason, freed = deleted["step"], deleted["reason"], units.size(deleted["freed_bytes"])
            self._book.forget(step)
            story.info("checkpoint of step %d deleted by retention: %s; %s freed", step, reason, freed)
        if pruned:
            self._in_background(self._empty_trash())
        return pruned

    async def prune_and_record(self, keep_last: int | None = None) -> list[PrunedStep]:
        """As `prune`; each deletion is an event of its own, as no commit names it."""
        pruned = await self.prune(keep_last)
        for deleted in pruned:
            self._events.add(PruneEvent(**deleted))
        return pruned

    async def wait_mirrored(self, timeout_s: float) -> dict[int, str]:
        """Wait until nothing is being copied to the mirror, at most so long; return the missing steps and why."""
        uploads = self._uploads
        if uploads is None:
            return {}
        with contextlib.suppress(WaitTimeout):
            await self._changes.wait(
                lambda: not uploads.busy, lambda: ("the mirror", "take all checkpoints"), timeout_s
            )
        return uploads.left()

    async def stop(self) -> None:
        """Cancel all work."""
        tasks = [self._forever, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one decision after another

    async def _work(self) -> None:
        while True:
            decision = await self._queue.get()
            self._working = True
            try:
                await self._carry_out(decision)
            except Exception as error:
                self._events.fault("checkpoint monitor", error)
            self._working = False
            self._changes.announce()

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Commit():
                await self._commit(decision)
            case MoveTracker(kind, step):
                await asyncio.to_thread(self._disk.move_tracker, kind, step, self._book.open_steps())
            case Abort(step, _, error):
                log_fault(f"checkpoint of step {step}", error)
                await self._fail(step)
            case Cleanup(step, _):
                await self._clean(step)

    async def _fail(self, step: int) -> None:
        """Write the failure for a restarted monitor before the staged files are removed; on a full disk, after that."""
        try:
            await asyncio.to_thread(self._disk.write_failed, self._book.failures)
            await self._clean(step)
        except OSError:
            await self._clean(step)
            await asyncio.to_thread(self._disk.write_failed, self._book.failures)

    async def _clean(self, step: int) -> None:
        async with self._journal_lock:
            await asyncio.to_thread(self._disk.clean, step)

    async def _commit(self, commit: Commit) -> None:
        written_s = max(0.0, self._clock() - commit.opened)
        try:
            commit = await asyncio.to_thread(self._disk.placed, commit)
            manifest = await asyncio.to_thread(self._disk.commit, commit)
        except Exception as error:
            text = "; ".join((str(error) or type(error).__name__, *getattr(error, "__notes__", ())))
            log_failure(f"the commit of step {commit.step}", error)
            self.apply(self._book.commit_failed(commit.step, commit.kind, text))
            return
        self._finishing.add(commit.step)
        try:
            for decision in self._book.commit_done(commit.step, commit.kind, beside=commit.beside):
                if not isinstance(decision, MoveTracker):
                    self._queue.put_nowait(decision)
                    continue
                try:
                    await self._carry_out(decision)
                except RunError as error:
                    self._events.fault("checkpoint trackers", error)
            await self.note(commit.step)
            pruned = await self.prune(commit.meta.get("keep_last"))
            total_s = max(0.0, self._clock() - commit.opened)
            times = {"written_s": written_s, "total_s": total_s}
            result = self._disk.describe(manifest, pruned, **times, beside=commit.beside)
            self._record(commit, result)
            if commit.kind == FULL and self._uploads is not None:
                self._uploads.add(commit.step)
            if self.announce is not None:
                await asyncio.to_thread(self.announce, result)
        finally:
            self._finishing.discard(commit.step)

    def _record(self, commit: Commit, result: CommitReport) -> None:
        story.info(
            "checkpoint of step %d committed (%s): %s after %s",
            commit.step,
            commit.kind,
            units.size(result["bytes"]),
            units.seconds(result["total_s"]),
        )
        self._results[commit.step, commit.kind] = result
        while len(self._results) > _MOST_RESULTS:
            del self._results[next(iter(self._results))]

    # ---- in the background

    def _in_background(self, work: Coroutine[object, None, object]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda _: self._changes.announce())

    async def _empty_trash(self) -> None:
        for problem in await asyncio.to_thread(self._disk.empty_trash):
            self._events.fault("retention", problem)

    def _mirrored(self, event: MirrorEvent | FaultEvent) -> None:
        """Record an event of the mirror."""
        if isinstance(event, FaultEvent):
            self._events.fault(event.where, event.error)
        else:
            self._events.add(event)
            story.info("checkpoint of step %s %s: %s", event.step, event.state, event.url)
            self._unmirrored()
        self._changes.announce()

    def _unmirrored(self) -> None:
        """Run retention again: a lease of the mirror, which may have kept an old checkpoint, has ended."""
        self._in_background(self.prune_and_record())


# Events that the driver fetches.


_MOST = 10_000


class EventLog:
    """Keeps events until they are fetched, oldest first; the oldest are dropped when there are very many.

    They are ``mirror``, ``fault``, and ``prune`` of late deletions. The result of a save is not among them:
    `wait_committed` returns it. `clock`: Unix seconds.
    """

    def __init__(self, attempt: int, clock: Callable[[], float]) -> None:
        self._attempt = attempt
        self._clock = clock
        self._events: deque[EventLine] = deque(maxlen=_MOST)

    def add(self, event: Event) -> None:
        """Keep an event, with the time and the attempt."""
        self._events.append(event_line(replace(event, time=self._clock(), attempt=self._attempt)))

    def fault(self, where: str, error: object) -> None:
        """Keep an error, and write it to the actor's log."""
        found = origin(error) if isinstance(error, BaseException) else None
        trace = None if found is None else found.traceback
        self.add(FaultEvent(where=where, error=log_fault(where, error), traceback=trace))

    def drain(self) -> list[EventLine]:
        """Return the events since the last call."""
        drained = list(self._events)
        self._events.clear()
        return drained


def log_fault(where: str, error: object) -> str:
    """Write an error to the actor's log, with its traceback if it is not one of ours; return it as one text."""
    if isinstance(error, BaseException):
        log_failure(where, error)
        return str(error) if isinstance(error, TrinityError | OSError) else error_text(error)
    story.error("fault in %s: %s", where, error)
    return str(error)
