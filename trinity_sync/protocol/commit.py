"""The state machine that decides when a step's checkpoint is committed, by counting its parts.

The monitor actor (`trinity_sync.checkpoint.monitor`) passes it the writers' reports and executes its decisions. It uses
no disk, no network and an injected clock, so a test can drive thousands of steps through it.

How a step goes through the book, in any order unless the list says otherwise:

1. Its parts become known: by name (`begin`) or as a number (`register`).
2. A kind of commit is asked for (`begin` or `mark`).
3. A writer asks for its turn (`started`), gets a `Grant` when the save strategy allows, reports `finished` or `failed`.
4. When all parts of the requested kind are in and no announced part is missing, the book decides `Commit`. The caller
   executes it and answers with `commit_done` or `commit_failed`. Only then do trackers move (`MoveTracker`), and only
   forward.
5. A failed part, a lost writer, a failed commit or a timeout fails the step for good: one `Abort`, and no later commit
   of the step. Earlier commits of it (its weights, say) stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import (
    DIGEST_PART,
    FULL,
    KINDS,
    STATE_DICT,
    Abort,
    Cleanup,
    CommitMeta,
    Decision,
    FileTuple,
    Grant,
    Kind,
    MoveTracker,
    covers,
    describe_part,
    is_beside,
)
from trinity_sync.protocol.step import JournalEntry, Step, StepStatus, Turn, TurnQueue


class CommitBook:
    """All steps of one attempt, their parts, the writers' turns and the two trackers.

    Every method that takes a report returns the resulting decisions, to be executed in order. A step is named by its
    number and its attempt; ``attempt=None`` means the book's own.

    Args:
        clock: returns seconds; Unix time where the result of `dump` is to outlive the process.
        strategy: one of `trinity_sync.protocol.step.SAVE_STRATEGIES`.
        attempt: the attempt of this book; reports for another one are refused.
        step_timeout_s: a step without a report for so long fails; the error names the missing parts.
        committed: the commits on disk at the start, as (step, attempt, kind).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        strategy: str = "unrestricted",
        attempt: int = 0,
        step_timeout_s: float = 1800.0,
        committed: Iterable[tuple[int, int, Kind]] = (),
    ) -> None:
        self.attempt = attempt
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._turns = TurnQueue(strategy)
        self._committed = CommittedSteps(attempt, committed)
        self._steps = StepTable(clock, self._turns, self._committed.own)
        self._listed: dict[int, frozenset[FileTuple]] = {}

    # ---- queries

    @property
    def trackers(self) -> Mapping[Kind, int | None]:
        """The step that each tracker names; None before the first commit."""
        return self._committed.trackers

    def status(self, step: int, kind: Kind | None = None) -> StepStatus:
        """Return where the step stands in this attempt: as a whole, or its commit as `kind`."""
        entry = self._steps.get(step)
        visible = self._committed.kind(step)
        if entry is not None:
            return entry.status(visible, kind)
        done = visible is not None and covers(visible, kind or STATE_DICT)
        return StepStatus("committed" if done else "unknown", visible)

    def own(self, step: int) -> Kind | None:
        """Return the kind as which this attempt has committed a step; None: it has not."""
        return self._committed.own(step)

    def has(self, step: int, part: str) -> bool:
        """Return whether the part is in. Writing its files again would damage the commit."""
        entry = self._steps.get(step)
        return entry is not None and entry.failed is None and not entry.deleted and part in entry.parts.done

    def awaited(self, step: int) -> list[str]:
        """Return the names of the announced parts of a step that are missing."""
        entry = self._steps.get(step)
        if entry is None:
            return []
        return [name for name in (*entry.parts.expected, *entry.parts.announced) if name not in entry.parts.done]

    def turn(self, ticket: str) -> bool | None:
        """Return whether this ticket has its turn. None: unknown, because its step failed or its writer is lost."""
        turn = self._turns.get(ticket)
        return None if turn is None else turn.granted

    @property
    def failures(self) -> dict[int, str]:
        """The failed steps that are remembered, with the errors."""
        return {entry.step: entry.failed for entry in self._steps if entry.failed is not None}

    def open_steps(self) -> list[int]:
        """List the steps that have a save or a commit in progress."""
        return sorted(entry.step for entry in self._steps if self._steps.is_open(entry))

    def writers(self) -> set[tuple[str, str, str]]:
        """Return (node_id, job_id, life) of each process that writes or waits for its turn."""
        return {turn.writer for turn in self._turns.select(lambda turn: True)}

    # ---- parts and marks

    def begin(
        self,
        step: int,
        kind: Kind,
        parts: Iterable[str],
        *,
        weights_parts: Collection[str] = (),
        meta: CommitMeta | None = None,
        durable: bool | None = None,
        attempt: int | None = None,
    ) -> list[Decision]:
        """Name all parts of a step and ask for its commit as `kind`. Further calls add to it. `weights_parts`: those of
        them that are weights; for a ``state_dict`` commit all of them are.
        """
        entry = self._announced(step, attempt)
        if entry.failed is not None:
            raise RunError(f"step {step} has failed and is not saved again in attempt {self.attempt}: {entry.failed}")
        parts = list(parts)
        if entry.is_committed(kind) and set(parts) <= entry.committed_keys:
            raise RunError(f"step {step} is already committed as {entry.committed}; saving it again would add nothing")
        if entry.settled:  # its weights are committed, and this is another save
            entry.opened = entry.touched
        entry.ask(kind, parts, weights_parts, meta or CommitMeta(), durable)
        return self._evaluate(entry)

    def register(
        self, step: int, *, weights: int = 0, checkpoint: int = 0, report: str | None = None, attempt: int | None = None
    ) -> list[Decision]:
        """Add to the numbers of expected parts. Calls add up; a repeated `report` id counts once."""
        if weights < 0 or checkpoint < 0:
            raise ValueError(f"part counts cannot be negative: weights {weights}, checkpoint {checkpoint}")
        entry = self._announced(step, attempt)
        entry.parts.register(weights, checkpoint, report)
        return self._evaluate(entry)

    def announce(self, step: int, parts: Iterable[str], *, weights: bool, attempt: int | None = None) -> None:
        """Name parts that writers are going to start; the step waits for them, in addition to the registered ones."""
        entry = self._announced(step, attempt)
        self._check_not_failed(entry)
        for name in parts:
            entry.parts.announce(name, weights)

    def mark(self, step: int, kind: Kind, *, attempt: int | None = None) -> list[Decision]:
        """Ask for a commit of the step as `kind` when its parts are in."""
        entry = self._announced(step, attempt)
        entry.marks.add(kind)
        return self._evaluate(entry)

    # ---- writers

    def started(
        self,
        ticket: str,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        part: str | None = None,
        weights: bool | None = None,
        life: str = "",
        collective: bool = False,
        anonymous: bool = False,
        attempt: int | None = None,
    ) -> list[Decision]:
        """Note that a writer asks for its turn, and wait for its part. The `Grant` is among the decisions or comes
        later. `collective`: the save has barriers with its peers, so it does not queue.
        """
        if step is not None:
            entry = self._open(step, attempt)
            if not collective:
                self._check_not_failed(entry)
            if ticket in entry.ended:
                return []  # a late repeat of the request: its turn would never end
            late = entry.late(part, weights) if part is not None else None
            if late is not None and not collective:
                raise RunError(late)
            if late is None and not (anonymous and part is None):
                entry.parts.announce(part or f"#{ticket}", weights)
        known = self._turns.get(ticket)
        if known is not None and known.granted:
            return [Grant(ticket)]
        now = self._clock()
        self._turns.ask(Turn(ticket, node_id, job_id, step, part, collective, anonymous, since=now, life=life))
        return self._grants()

    def cancel(self, ticket: str | None) -> list[Decision]:
        """End the turn of a writer that no longer needs it, or that ended without a report."""
        self._turns.release(ticket)
        return self._grants()

    def finished(
        self,
        step: int,
        *,
        weights: bool = False,
        part: str | None = None,
        report: str | None = None,
        files: Iterable[FileTuple] | None = (),
        digest: str | None = None,
        ticket: str | None = None,
        attempt: int | None = None,
    ) -> list[Decision]:
        """Note that a part is written."""
        if part == DIGEST_PART and digest is None:
            raise ValueError(f"the part {DIGEST_PART!r} of step {step} was reported without a digest")
        entry = self._open(step, attempt)
        late = entry.late(part, weights) if part is not None and entry.failed is None else None
        if late is not None:
            if files is not None and step in self._listed and self._listed[step].issuperset(files):
                return self._release(ticket)  # the writer missed the answer of the actor's earlier process
            raise RunError(late)
        entry.ended |= {ticket} if ticket is not None else set()
        decisions = self._release(ticket) if part != DIGEST_PART else []
        if entry.failed is not None:
            return [*decisions, Cleanup(step, self.attempt)]
        key = part if part is not None else f"#{report if report is not None else len(entry.parts.done)}"
        clash = entry.add(key, weights, files, digest, ticket)
        return decisions + (self._fail(entry, clash) if clash is not None else self._evaluate(entry))

    def failed(
        self, step: int, part: str | None, error: str, *, ticket: str | None = None, attempt: int | None = None
    ) -> list[Decision]:
        """Note that a part could not be written: the step fails. A part that was reported finished cannot fail."""
        entry = self._open(step, attempt)
        entry.ended |= {ticket} if ticket is not None else set()
        decisions: list[Decision] = []
        if part is None or part not in entry.parts.done:
            decisions = self._fail(entry, f"{describe_part(part)} failed: {error}")
        return decisions + self._release(ticket)

    def writer_lost(
        self, node_id: str, job_id: str | None = None, life: str | None = None, *, error: str = "its process died"
    ) -> list[Decision]:
        """Fail the parts that a lost process (without `job_id`: a lost node) was writing."""
        named = (node_id, job_id, life)
        lost = self._turns.select(
            lambda turn: all(name in (None, own) for name, own in zip(named, turn.writer, strict=True))
        )
        decisions: list[Decision] = []
        for turn in lost:
            self._turns.release(turn.ticket)
            reason = f"failed: the writer {turn.job_id} on node {turn.node_id} was lost: {error}"
            if turn.step is not None:
                entry = self._steps[turn.step]
                if turn.part is None or turn.part not in entry.parts.done:
                    decisions += self._fail(entry, f"{describe_part(turn.part)} {reason}")
                continue
            # A writer without a step: any step that still waits may be waiting for it.
            for entry in self._steps:
                if self._steps.is_open(entry) and entry.committing is None:
                    decisions += self._fail(entry, f"a part {reason}")
        return decisions + self._grants()

    # ---- answers to the decisions

    def commit_done(self, step: int, kind: Kind, *, beside: bool = False) -> list[Decision]:
        """Note that the step is visible as `kind`; `beside`: in a folder beside its place, because that is taken."""
        entry = self._steps[step]
        assert entry.committing == kind, f"step {step} was not being committed as {kind}"
        decisions: list[Decision] = []
        if beside or entry.pending_beside:
            self._committed.add_beside(step)
        else:
            decisions += self._committed.add(step, kind)
        entry.end_commit(self._committed.own(step))
        return [*decisions, *([Cleanup(step, self.attempt)] if entry.failed is not None else self._evaluate(entry))]

    def commit_failed(self, step: int, kind: Kind, error: str) -> list[Decision]:
        """Note that the commit failed; the step fails."""
        entry = self._steps[step]
        assert entry.committing == kind, f"step {step} was not being committed as {kind}"
        entry.committing = None
        return self._fail(entry, f"the commit as {kind} failed: {error}")

    def forget(self, step: int) -> None:
        """Note that the checkpoint of this step was deleted. Its status stays committed until a new announcement."""
        self._committed.forget(step)
        entry = self._steps.get(step)
        if entry is not None:
            entry.deleted = True

    def tick(self) -> list[Decision]:
        """Fail the steps without a report for `step_timeout_s`, and end turns as old as that.

        A step that waits only for the files of verl's trainer does not time out: the trainer may validate first.
        """
        decisions: list[Decision] = []
        now = self._clock()
        for entry in self._steps:
            silent = now - entry.touched
            if silent <= self._step_timeout_s or entry.committing is not None or not self._steps.is_open(entry):
                continue
            awaited = self.awaited(entry.step)
            if awaited and all(map(is_beside, awaited)):
                continue
            missing = ", ".join(self.status(entry.step).missing) or "the end of a save that began"
            decisions += self._fail(entry, f"nothing was heard of it for {silent:g} s; missing: {missing}")
        for turn in self._turns.select(lambda turn: turn.granted and now - turn.since > self._step_timeout_s):
            if turn.step is None or self._steps[turn.step].failed is not None:
                self._turns.release(turn.ticket)
        return decisions + self._grants()

    # ---- restart of the actor

    def dump(self, step: int) -> JournalEntry | None:
        """Return the step as JSON values, so that it survives a restart; None: it is not open."""
        entry = self._steps.get(step)
        if entry is None or not self._steps.is_open(entry):
            return None
        return {"attempt": self.attempt, **entry.dump(), "turns": self._turns.dump(step)}

    def restore(self, dumped: JournalEntry, committed_paths: Collection[str] = ()) -> list[Decision]:
        """Restore a step from `dump`; `committed_paths`: the files of this attempt's commit on disk, which may be
        newer. Raises ValueError, KeyError, TypeError: `dumped` is not a result of `dump`, or is of another attempt.
        """
        if dumped["attempt"] != self.attempt:
            raise ValueError(f"it is of attempt {dumped['attempt']}, not {self.attempt}")
        now = self._clock()
        entry = Step.load(dumped, now, self._committed.own(int(dumped["step"])), committed_paths)
        self._steps.put(entry)
        self._turns.restore(entry.step, dumped["turns"], now)
        return self._evaluate(entry)

    def restore_files(self, step: int, files: Iterable[FileTuple]) -> None:
        """Note the files that the manifest of this attempt's commit of the step lists."""
        self._listed[step] = frozenset(files)

    def restore_beside(self, step: int) -> None:
        """Note that this attempt committed weights of the step beside its place before the restart."""
        self._committed.add_beside(step)

    def restore_failure(self, step: int, error: str) -> None:
        """Note that the step failed before the restart: it stays failed and is not reported again."""
        entry = self._open(step, None)
        entry.failed = error
        self._steps.note_settled(entry)

    # ---- inside

    def _open(self, step: int, attempt: int | None) -> Step:
        self._check_named(step, attempt)
        return self._steps.touch(step)

    def _announced(self, step: int, attempt: int | None) -> Step:
        self._check_named(step, attempt)
        return self._steps.announce(step)

    def _check_named(self, step: int, attempt: int | None) -> None:
        if attempt is not None and attempt != self.attempt:
            raise RunError(f"step {step} was reported for attempt {attempt}, but attempt {self.attempt} is running")
        if step < 0:
            raise ValueError(f"a step cannot be negative: {step}")

    def _check_not_failed(self, entry: Step) -> None:
        if entry.failed is not None:
            raise RunError(f"step {entry.step} has already failed, nothing more is saved of it: {entry.failed}")

    def _evaluate(self, entry: Step) -> list[Decision]:
        kind = entry.due()
        if kind is None:
            self._steps.note_settled(entry)
            return []
        return [entry.begin_commit(self.attempt, kind, beside=self._committed.is_taken(entry.step, kind))]

    def _fail(self, entry: Step, error: str) -> list[Decision]:
        if entry.failed is not None:
            return [Cleanup(entry.step, self.attempt)]
        entry.failed = error
        # Queued writers would write in vain. Active writers keep their turn until they report.
        for turn in self._turns.of_step(entry.step):
            if not turn.granted:
                self._turns.release(turn.ticket)
        self._steps.note_settled(entry)
        return [Abort(entry.step, self.attempt, error), *self._grants()]

    def _release(self, ticket: str | None) -> list[Decision]:
        if self._turns.release(ticket):
            # The queue moves, so the steps in it are waiting and must not time out.
            for turn in self._turns.select(lambda turn: turn.step is not None and not turn.granted):
                self._steps[turn.step].touched = self._clock()  # type: ignore[index]
        return self._grants()

    def _grants(self) -> list[Decision]:
        return [Grant(ticket) for ticket in self._turns.grant(self._clock())]


class CommittedSteps:
    """The commits on disk, as one attempt sees them, and the steps that the trackers name.

    `found` lists the commits at the start, as (step, attempt, kind).
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
        return dict(self._trackers)

    def kind(self, step: int) -> Kind | None:
        """Return the kind as which a step is committed, by this attempt or else an earlier one; None: it is not
        committed.
        """
        return self.own(step) or (self._visible[step][1] if step in self._visible else None)

    def own(self, step: int) -> Kind | None:
        """Return the kind as which this attempt has committed a step, in its place or beside it; None: it has not."""
        by, kind = self._visible.get(step, (None, None))
        if by == self._attempt:
            return kind
        return STATE_DICT if step in self._beside else None

    def is_taken(self, step: int, kind: Kind) -> bool:
        """Return whether the visible commit blocks a commit of this kind.

        It is never replaced by less, nor by weights that its own readers and pins do not know of.
        """
        by, visible = self._visible.get(step, (None, None))
        return kind == STATE_DICT and visible is not None and (by != self._attempt or visible == FULL)

    def add(self, step: int, kind: Kind) -> list[MoveTracker]:
        """Note that this attempt's commit is visible; return the trackers that move."""
        self._visible[step] = (self._attempt, kind)
        decisions = []
        for tracked in KINDS if kind == FULL else (STATE_DICT,):
            named = self._trackers[tracked]
            if named is None or step > named:
                self._trackers[tracked] = step
                decisions.append(MoveTracker(tracked, step))
        return decisions

    def add_beside(self, step: int) -> None:
        self._beside.add(step)

    def forget(self, step: int) -> None:
        self._visible.pop(step, None)


#: Number of settled steps that are remembered, so that late and repeated reports of them are recognised.
_REMEMBERED = 256


class StepTable:
    """Steps by number: all open ones, and the latest of the others. `committed` returns this attempt's commit of a
    step.
    """

    def __init__(self, clock: Callable[[], float], turns: TurnQueue, committed: Callable[[int], Kind | None]) -> None:
        self._clock = clock
        self._turns = turns
        self._committed = committed
        self._steps: dict[int, Step] = {}
        self._settled: deque[int] = deque()

    def __getitem__(self, step: int) -> Step:
        return self._steps[step]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._steps.values()))

    def get(self, step: int) -> Step | None:
        return self._steps.get(step)

    def is_open(self, entry: Step) -> bool:
        """Return whether a save or a commit of the step is in progress."""
        if entry.committing is not None:
            return True
        if entry.failed is not None:
            return False
        return (entry.parts.any and not entry.settled) or bool(self._turns.of_step(entry.step))

    def touch(self, step: int) -> Step:
        """Return the step and note that it was heard of now; an unknown step begins."""
        now = self._clock()
        entry = self._steps.get(step)
        if entry is None:
            entry = self._steps[step] = Step(step, now, now, committed=self._committed(step))
        entry.touched = now
        return entry

    def announce(self, step: int) -> Step:
        """Return the step as `touch` does; if its checkpoint was deleted, the step begins anew."""
        entry = self.touch(step)
        if not entry.deleted or entry.failed is not None or self.is_open(entry):
            return entry
        del self._steps[step]
        with suppress(ValueError):
            self._settled.remove(step)
        return self.touch(step)

    def put(self, entry: Step) -> None:
        self._steps[entry.step] = entry

    def note_settled(self, entry: Step) -> None:
        """Remember a settled or failed step as the latest, and forget the oldest."""
        if self.is_open(entry) or not (entry.parts.any or entry.failed) or entry.step in self._settled:
            return
        self._settled.append(entry.step)
        if len(self._settled) > _REMEMBERED:
            oldest = self._settled.popleft()
            if not self._turns.of_step(oldest) and not self.is_open(self._steps[oldest]):
                del self._steps[oldest]
