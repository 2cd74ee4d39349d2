"""When does a checkpoint become one? The state machine that counts the parts of every step and decides.

The monitor actor (`trinity_sync.checkpoint.monitor`) feeds it what writers report and carries out what it decides.
Nothing here touches a disk, a clock of its own or a network, so a test can drive thousands of steps through it.

How a step goes through the book, in any order unless said otherwise:

1. Its parts become known: by name (`begin`) or as a number (`register`).
2. A kind of commit is asked for (`begin` or `mark`).
3. A writer asks for its turn (`started`), gets a `Grant` when the save strategy allows, reports `finished` or `failed`.
4. When the parts of a kind that was asked for are in, the book decides `Commit`; the caller does it and answers with
   `commit_done` or `commit_failed`. Only then do trackers move (`MoveTracker`), and never backwards.
5. One failed part, lost writer or failed commit, or silence for too long, ends the step for good: one `Fail`, and
   nothing of it is committed afterwards. What had been committed before (its weights, say) stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import (
    DIGEST_PART,
    FULL,
    KINDS,
    STATE_DICT,
    FileTuple,
    Kind,
    StepParts,
    covers,
    describe_part,
)
from trinity_sync.protocol.turns import Turn, TurnQueue

#: How many settled steps are remembered, so that late and doubled reports of them are recognised.
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Grant:
    """The writer that holds this ticket may write now."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the step as `kind`.

    Args:
        files: what the parts said they wrote; parts that named no files are not in it.
        digest: the version digest of the weights, where it was reported.
        meta: what `CommitBook.begin` was given.
        opened: when the step was first heard of, in seconds of the book's clock.
        partial: other parts of the step are still being written: only `files` may go into the commit, and the
            staging folder has to stay. Weights that did not name their files are not committed so: which of those that
            are there are theirs, nobody knows.
        durable: whether it has to survive a power cut, as was asked for this kind; None: as all commits do.
        beside: weights whose place is taken by what they must not replace: a full checkpoint, or any of another
            attempt. They are committed beside it.
    """

    step: int
    attempt: int
    kind: Kind
    files: tuple[FileTuple, ...]
    digest: str | None
    meta: Mapping[str, Any]
    opened: float
    partial: bool
    durable: bool | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The step is lost: report it (this comes once) and remove what is staged."""

    step: int
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class Clean:
    """A writer of a failed step has ended only now: remove what is staged again."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class MoveTracker:
    """Let the tracker of this kind name the step."""

    kind: Kind
    step: int


Decision: TypeAlias = Grant | Commit | Fail | Clean | MoveTracker


@dataclass(frozen=True, slots=True)
class StepStatus:
    """Where a step stands.

    Args:
        state: ``open``: parts are missing; ``committed``: as all that was asked for.
        committed: the kind that there is now, whatever the state: of this attempt, else of an earlier one.
        wanted: the most that was asked for; None: nothing yet.
        error: why it failed.
        missing: what is still waited for, one phrase each.
    """

    state: Literal["unknown", "open", "committing", "committed", "failed"]
    committed: Kind | None
    wanted: Kind | None = None
    error: str | None = None
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class _Step:
    step: int
    opened: float
    touched: float
    parts: StepParts = field(default_factory=StepParts)
    marks: set[Kind] = field(default_factory=set)
    digest: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    durable: dict[Kind, bool] = field(default_factory=dict)
    committing: Kind | None = None
    pending_keys: frozenset[str] = frozenset()
    pending_beside: bool = False
    committed: Kind | None = None
    committed_keys: frozenset[str] = frozenset()
    failed: str | None = None
    ended: set[str] = field(default_factory=set)
    deleted: bool = False

    @property
    def wanted(self) -> Kind | None:
        if FULL in self.marks:
            return FULL
        return STATE_DICT if STATE_DICT in self.marks else None

    def holds(self, kind: Kind) -> bool:
        """A commit of at least this kind is visible, with every part of that kind, and none is out."""
        if self.committed is None or not covers(self.committed, kind):
            return False
        return self.parts.keys(kind) <= self.committed_keys and not self.parts.missing(kind)

    @property
    def settled(self) -> bool:
        """All that was asked for is visible."""
        wanted = FULL if self.parts.more_than_weights else self.wanted or STATE_DICT
        return self.committing is None and self.holds(wanted)


class CommitBook:
    """All steps of one attempt, their parts, the writers' turns and the two trackers.

    Args:
        clock: returns seconds; Unix time where the result of `dump` is to outlive the process.
        strategy: one of `trinity_sync.protocol.turns.SAVE_STRATEGIES`.
        attempt: the attempt this book is for. Reports for another one are refused.
        step_timeout_s: a step of which nothing was heard for so long fails, with the names of what is missing.
        committed: what is on the disk already, as (step, attempt, kind); this is how a restarted actor begins.

    Every method that takes a report returns the decisions that follow from it, in the order in which to carry them out.
    A step is named by its number and the attempt; ``attempt=None`` means the book's own.
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
        self._steps: dict[int, _Step] = {}
        self._settled: deque[int] = deque()
        self._turns = TurnQueue(strategy)
        self._disk: dict[int, tuple[int, Kind]] = {step: (by, kind) for step, by, kind in committed}
        self._beside: set[int] = set()
        self._trackers: dict[Kind, int | None] = {
            FULL: max((step for step, (_, kind) in self._disk.items() if kind == FULL), default=None),
            STATE_DICT: max(self._disk, default=None),
        }

    # ---- what callers may ask

    @property
    def trackers(self) -> Mapping[Kind, int | None]:
        """The step that each tracker names; None: nothing committed yet."""
        return dict(self._trackers)

    def status(self, step: int, kind: Kind | None = None) -> StepStatus:
        """Where the step stands in this attempt; with a kind: where its commit as that kind does."""
        entry = self._steps.get(step)
        visible = self._own(step) or (self._disk[step][1] if step in self._disk else None)
        if entry is None:
            done = visible is not None and covers(visible, kind or STATE_DICT)
            return StepStatus("committed" if done else "unknown", visible)
        if kind is not None and entry.holds(kind):
            return StepStatus("committed", visible, entry.wanted)
        if entry.failed is not None:
            return StepStatus("failed", visible, entry.wanted, entry.failed)
        if entry.committing is not None:
            return StepStatus("committing", visible, entry.wanted)
        announced = visible is not None and not entry.parts.any and covers(visible, kind or entry.wanted or STATE_DICT)
        if entry.settled or announced:
            return StepStatus("committed", visible, entry.wanted)
        full = entry.parts.more_than_weights or entry.wanted != STATE_DICT
        missing = entry.parts.missing(FULL if full else STATE_DICT)
        if entry.wanted is None or (full and entry.wanted != FULL):
            missing.append("the word that it is to be committed")
        return StepStatus("open", visible, entry.wanted, None, tuple(missing))

    def has(self, step: int, part: str) -> bool:
        """Whether a commit of this attempt holds the part, so that there is nothing to write for it."""
        entry = self._steps.get(step)
        if entry is None or entry.failed is not None or entry.deleted:
            return False
        return part in entry.committed_keys

    def turn(self, ticket: str) -> bool | None:
        """Whether this ticket has its turn. None: it is not known (any more); its step failed or its writer is lost."""
        turn = self._turns.get(ticket)
        return None if turn is None else turn.granted

    @property
    def failures(self) -> dict[int, str]:
        """The steps that failed (of those remembered), and why."""
        return {step: entry.failed for step, entry in self._steps.items() if entry.failed is not None}

    def open_steps(self) -> list[int]:
        """Steps of which something is being saved or committed now."""
        return sorted(step for step, entry in self._steps.items() if self._is_open(entry))

    def writers(self) -> set[tuple[str, str, str]]:
        """(node_id, job_id, life) of those that write or wait for their turn."""
        return {turn.writer for turn in self._turns.select(lambda turn: True)}

    # ---- parts and marks

    def begin(
        self,
        step: int,
        kind: Kind,
        parts: Iterable[str],
        *,
        weights_parts: Collection[str] = (),
        meta: Mapping[str, Any] | None = None,
        durable: bool | None = None,
        attempt: int | None = None,
    ) -> list[Decision]:
        """Name all parts of a step and ask for its commit as `kind`. Calling it again adds to it.

        Args:
            parts: names of the parts; `DIGEST_PART` among them makes the commit wait for the version digest.
            weights_parts: those of them that are weights; for a ``state_dict`` commit all of them are.
            durable: whether the commit as this kind, and no other of the step, has to survive a power cut. What was
                asked for once with True stays so.

        Raises:
            RunError: the step has failed, or all of these parts are committed already.
        """
        entry = self._announced(step, attempt)
        if entry.failed is not None:
            raise RunError(f"step {step} has failed and is not saved again in attempt {self.attempt}: {entry.failed}")
        parts = list(parts)
        if entry.holds(kind) and set(parts) <= entry.committed_keys:
            raise RunError(f"step {step} is already committed as {entry.committed}; saving it again would add nothing")
        for name in parts:
            entry.parts.expect(name, kind == STATE_DICT or name in weights_parts or name == DIGEST_PART)
        entry.meta.update(meta or {})
        if durable is not None:
            entry.durable[kind] = durable or entry.durable.get(kind, False)
        entry.marks.add(kind)
        return self._evaluate(entry)

    def register(
        self, step: int, *, weights: int = 0, checkpoint: int = 0, report: str | None = None, attempt: int | None = None
    ) -> list[Decision]:
        """Add to the numbers of expected parts; several callers add up, a doubled `report` id counts once."""
        if weights < 0 or checkpoint < 0:
            raise ValueError(f"part counts cannot be negative: weights {weights}, checkpoint {checkpoint}")
        entry = self._announced(step, attempt)
        entry.parts.register(weights, checkpoint, report)
        return self._evaluate(entry)

    def mark(self, step: int, kind: Kind, *, attempt: int | None = None) -> list[Decision]:
        """The step is to be committed as `kind` as soon as its parts are in."""
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
        life: str = "",
        collective: bool = False,
        anonymous: bool = False,
        attempt: int | None = None,
    ) -> list[Decision]:
        """A writer asks for its turn. The `Grant` may be among the decisions or come later.

        Args:
            ticket: the caller's name for this turn; asking again with the same one is the same turn.
            life: tells the process from an earlier one with the same node_id and job_id.
            collective: the save holds barriers with its peers, so it does not queue.
            anonymous: the writer will report its end without the ticket.

        Raises:
            RunError: the step has failed already, so that writing for it is pointless. A collective save is let
                through: its peers may be in it already.
        """
        if step is not None:
            entry = self._open(step, attempt)
            if entry.failed is not None and not collective:
                raise RunError(f"step {step} has already failed, nothing more is saved of it: {entry.failed}")
            if ticket in entry.ended:
                return []  # a late double of the question: nobody would ever end a turn that it gets
        known = self._turns.get(ticket)
        if known is not None and known.granted:
            return [Grant(ticket)]
        self._turns.ask(
            Turn(
                ticket=ticket,
                node_id=node_id,
                job_id=job_id,
                step=step,
                part=part,
                collective=collective,
                anonymous=anonymous,
                since=self._clock(),
                life=life,
            )
        )
        return self._grants()

    def cancel(self, ticket: str) -> list[Decision]:
        """The writer no longer wants its turn, or has ended without a report."""
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
        """A part is written.

        Args:
            part: its name; a second report of the name counts for nothing, but for another save of what is committed
                already, which is told by its ticket: there is nothing to commit, and what was registered for it is in.
            report: for a part without a name, an id of this report, so that a doubled one is recognised.
            files: what was written for it; None: not told.
            digest: the version digest of the weights; two different ones fail the step.
        """
        if part == DIGEST_PART and digest is None:
            raise ValueError(f"the part {DIGEST_PART!r} of step {step} was reported without a digest")
        entry = self._open(step, attempt)
        entry.ended |= {ticket} if ticket is not None else set()
        decisions = self._release(ticket) if part != DIGEST_PART else []
        if entry.failed is not None:
            return [*decisions, Clean(step, self.attempt)]
        if digest is not None and entry.digest not in (None, digest):
            error = f"two digests were reported for the weights of step {step}: {entry.digest} and {digest}"
            return decisions + self._fail(entry, error)
        entry.digest = digest or entry.digest
        key = part if part is not None else f"#{report if report is not None else len(entry.parts.done)}"
        if key not in entry.parts.done:
            new = None if files is None else tuple(files)
            clash = entry.parts.clash(key, new or ())
            if clash is not None:
                return decisions + self._fail(entry, clash)
            entry.parts.add(key, weights, new, ticket)
        elif key in entry.committed_keys:
            entry.parts.repeat(key, ticket)
        return decisions + self._evaluate(entry)

    def failed(
        self, step: int, part: str | None, error: str, *, ticket: str | None = None, attempt: int | None = None
    ) -> list[Decision]:
        """A part could not be written: the step fails. A part that was reported finished cannot fail any more."""
        entry = self._open(step, attempt)
        entry.ended |= {ticket} if ticket is not None else set()
        decisions: list[Decision] = []
        if part is None or part not in entry.parts.done:
            decisions = self._fail(entry, f"{describe_part(part)} failed: {error}")
        return decisions + self._release(ticket)

    def writer_lost(
        self, node_id: str, job_id: str | None = None, life: str | None = None, *, error: str = "its process died"
    ) -> list[Decision]:
        """A writer process (with no `job_id`: all of a node) is gone: what it was writing fails."""
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
            # It did not say for which step it was writing: any step that still waits may be waiting for it.
            for entry in list(self._steps.values()):
                if self._is_open(entry) and entry.committing is None:
                    decisions += self._fail(entry, f"a part {reason}")
        return decisions + self._grants()

    # ---- answers of the one who carries out the decisions

    def commit_done(self, step: int, kind: Kind, *, beside: bool = False) -> list[Decision]:
        """The step is visible as `kind` now; `beside`: it lies beside its place, as decided or for what was there."""
        entry = self._steps[step]
        assert entry.committing == kind, f"step {step} was not being committed as {kind}"
        entry.committing, entry.deleted = None, False
        decisions: list[Decision] = []
        if beside or entry.pending_beside:
            self._beside.add(step)
        else:
            self._disk[step] = (self.attempt, kind)
            decisions = self._move_trackers(step, kind)
        entry.committed, entry.committed_keys = self._own(step), entry.committed_keys | entry.pending_keys
        if entry.failed is not None:
            return [*decisions, Clean(step, self.attempt)]
        if kind == FULL:
            # The manifest holds them now; only the names are needed, to recognise doubled reports.
            for key in entry.committed_keys:
                entry.parts.done[key].files = ()
        return decisions + self._evaluate(entry)

    def commit_failed(self, step: int, kind: Kind, error: str) -> list[Decision]:
        """The commit could not be carried out; the step fails."""
        entry = self._steps[step]
        assert entry.committing == kind, f"step {step} was not being committed as {kind}"
        entry.committing = None
        return self._fail(entry, f"the commit as {kind} failed: {error}")

    def forget(self, step: int) -> None:
        """The checkpoint of this step was deleted from the disk. Those who ask late still hear that it was committed;
        one who announces it again begins it anew.
        """
        self._disk.pop(step, None)
        if step in self._steps:
            self._steps[step].deleted = True

    def tick(self) -> list[Decision]:
        """Fail the steps of which nothing was heard for `step_timeout_s`, and take back turns held for so long."""
        decisions: list[Decision] = []
        now = self._clock()
        for entry in list(self._steps.values()):
            silent = now - entry.touched
            if silent <= self._step_timeout_s or entry.committing is not None or not self._is_open(entry):
                continue
            missing = ", ".join(self.status(entry.step).missing) or "the end of a save that began"
            decisions += self._fail(entry, f"nothing was heard of it for {silent:g} s; missing: {missing}")
        for turn in self._turns.select(lambda turn: turn.granted and now - turn.since > self._step_timeout_s):
            if turn.step is None or self._steps[turn.step].failed is not None:
                self._turns.release(turn.ticket)
        return decisions + self._grants()

    # ---- a life after the actor's death

    def dump(self, step: int) -> dict[str, Any] | None:
        """What has to be kept so that the step survives a restart, as JSON values; None: nothing of it is open."""
        entry = self._steps.get(step)
        if entry is None or not self._is_open(entry):
            return None
        granted = [turn for turn in self._turns.of_step(step) if turn.granted]
        return {
            "step": step,
            "attempt": self.attempt,
            "opened": entry.opened,
            "parts": entry.parts.dump(),
            "marks": sorted(entry.marks),
            "digest": entry.digest,
            "meta": entry.meta,
            "durable": entry.durable,
            "committed": entry.committed,
            "committed_keys": sorted(entry.committed_keys),
            "turns": [[turn.ticket, *turn.writer, turn.part, turn.collective] for turn in granted],
        }

    def restore(self, dumped: Mapping[str, Any], committed_paths: Collection[str] = ()) -> list[Decision]:
        """Take up a dumped step again.

        Args:
            dumped: what `dump` gave.
            committed_paths: the files that this attempt's commit on the disk lists, which may be newer than the dump.

        Raises:
            ValueError, KeyError, TypeError: `dumped` is not what `dump` gives, or is of another attempt.
        """
        if dumped["attempt"] != self.attempt:
            raise ValueError(f"it is of attempt {dumped['attempt']}, not {self.attempt}")
        now = self._clock()
        entry = _Step(int(dumped["step"]), float(dumped["opened"]), now, StepParts.load(dumped["parts"]))
        entry.marks = {kind for kind in KINDS if kind in dumped["marks"]}
        entry.digest = dumped["digest"]
        entry.meta = dict(dumped["meta"])
        entry.durable = dict(dumped.get("durable", {}))
        kind = self._own(entry.step)
        if kind is not None:
            entry.committed = kind
            done = entry.parts.done
            listed = {
                key
                for key in entry.parts.keys(kind)
                if all(file[0] in committed_paths for file in done[key].files or ())
            }
            entry.committed_keys = frozenset(dumped["committed_keys"] if kind == dumped["committed"] else listed)
        self._steps[entry.step] = entry
        for ticket, node_id, job_id, life, part, collective in dumped["turns"]:
            self._turns.ask(
                Turn(
                    ticket=ticket,
                    node_id=node_id,
                    job_id=job_id,
                    step=entry.step,
                    part=part,
                    collective=bool(collective),
                    anonymous=False,
                    since=now,
                    life=life,
                    granted=True,
                )
            )
        return self._evaluate(entry)

    def restore_beside(self, step: int) -> None:
        """In an earlier life of this attempt, weights of the step were committed beside what is visible."""
        self._beside.add(step)

    def restore_failure(self, step: int, error: str) -> None:
        """The step failed in an earlier life: it stays failed, and is not reported again."""
        entry = self._open(step, None)
        entry.failed = error
        self._note_settled(entry)

    # ---- inside

    def _open(self, step: int, attempt: int | None) -> _Step:
        if attempt is not None and attempt != self.attempt:
            raise RunError(f"step {step} was reported for attempt {attempt}, but attempt {self.attempt} is running")
        if step < 0:
            raise ValueError(f"a step cannot be negative: {step}")
        now = self._clock()
        entry = self._steps.get(step)
        if entry is None:
            entry = self._steps[step] = _Step(step, now, now)
            entry.committed = self._own(step)
        entry.touched = now
        return entry

    def _announced(self, step: int, attempt: int | None) -> _Step:
        """As `_open`; what is known of an earlier checkpoint of the step goes with that, once it was deleted."""
        entry = self._open(step, attempt)
        if not entry.deleted or entry.failed is not None or self._is_open(entry):
            return entry
        del self._steps[step]
        with suppress(ValueError):
            self._settled.remove(step)
        return self._open(step, attempt)

    def _own(self, step: int) -> Kind | None:
        """What this attempt has committed of a step: visible, or beside what must stay."""
        by, kind = self._disk.get(step, (None, None))
        if by == self.attempt:
            return kind
        return STATE_DICT if step in self._beside else None

    def _is_open(self, entry: _Step) -> bool:
        if entry.committing is not None:
            return True
        if entry.failed is not None:
            return False
        return (entry.parts.any and not entry.settled) or bool(self._turns.of_step(entry.step))

    def _evaluate(self, entry: _Step) -> list[Decision]:
        if entry.failed is None and entry.committing is None:
            for kind in (FULL, STATE_DICT):
                if kind in entry.marks and not entry.parts.missing(kind):
                    return self._commit(entry, kind)
        self._note_settled(entry)
        return []

    def _commit(self, entry: _Step, kind: Kind) -> list[Decision]:
        keys = entry.parts.keys(kind)
        if entry.committed is not None and covers(entry.committed, kind) and keys <= entry.committed_keys:
            self._note_settled(entry)
            return []
        partial = kind == STATE_DICT and (FULL in entry.marks or entry.parts.more_than_weights)
        if partial and entry.parts.untold(keys - entry.committed_keys):
            return []  # they come with the rest of the step
        by, visible = self._disk.get(entry.step, (None, None))
        # Whatever is visible is never replaced by less, nor by weights that its own readers and pins do not know of.
        beside = kind == STATE_DICT and visible is not None and (by != self.attempt or visible == FULL)
        entry.committing, entry.pending_keys, entry.pending_beside = kind, keys, beside
        files, meta = entry.parts.files(keys), dict(entry.meta)
        durable = entry.durable.get(kind)
        if kind == FULL and entry.durable.get(STATE_DICT):
            durable = True  # it takes the place of weights that are
        return [
            Commit(entry.step, self.attempt, kind, files, entry.digest, meta, entry.opened, partial, durable, beside)
        ]

    def _move_trackers(self, step: int, kind: Kind) -> list[Decision]:
        decisions: list[Decision] = []
        for tracked in KINDS if kind == FULL else (STATE_DICT,):
            named = self._trackers[tracked]
            if named is None or step > named:
                self._trackers[tracked] = step
                decisions.append(MoveTracker(tracked, step))
        return decisions

    def _fail(self, entry: _Step, error: str) -> list[Decision]:
        if entry.failed is not None:
            return [Clean(entry.step, self.attempt)]
        entry.failed = error
        # Those still in the queue would write what is thrown away. Those at work keep their turn until they report.
        for turn in self._turns.of_step(entry.step):
            if not turn.granted:
                self._turns.release(turn.ticket)
        self._note_settled(entry)
        return [Fail(entry.step, self.attempt, error), *self._grants()]

    def _note_settled(self, entry: _Step) -> None:
        if self._is_open(entry) or not (entry.parts.any or entry.failed) or entry.step in self._settled:
            return
        self._settled.append(entry.step)
        if len(self._settled) > _REMEMBERED:
            oldest = self._settled.popleft()
            if not self._turns.of_step(oldest) and not self._is_open(self._steps[oldest]):
                del self._steps[oldest]

    def _release(self, ticket: str | None) -> list[Decision]:
        if self._turns.release(ticket):
            # The queue moves: the steps in it are not forgotten, only waiting.
            for turn in self._turns.select(lambda turn: turn.step is not None and not turn.granted):
                self._steps[turn.step].touched = self._clock()  # type: ignore[index]
        return self._grants()

    def _grants(self) -> list[Decision]:
        return [Grant(ticket) for ticket in self._turns.grant(self._clock())]
