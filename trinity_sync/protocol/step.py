"""What the book of commits knows of one step, and which commit of it is due. Used by `trinity_sync.protocol.commit`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from trinity_sync.protocol.parts import (
    DIGEST_PART,
    FULL,
    KINDS,
    STATE_DICT,
    Commit,
    CommitMeta,
    FileTuple,
    Kind,
    PartsDump,
    StepParts,
    covers,
    describe_part,
)


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


class StepDump(TypedDict):
    """A `Step` as JSON values."""

    step: int
    opened: float
    parts: PartsDump
    marks: list[Kind]
    digest: str | None
    meta: CommitMeta
    durable: dict[Kind, bool]
    committed: Kind | None
    committed_keys: list[str]


class JournalEntry(StepDump):
    """What is kept of an open step, as JSON values."""

    attempt: int
    turns: list[TurnDump]


@dataclass(slots=True)
class Step:
    """One step that is being saved, or was.

    Args:
        step: its number.
        opened: when its newest save was first heard of, in seconds of the book's clock.
        touched: when it was last heard of.
        parts: the parts that are expected, are in, and are missing.
        marks: the kinds of commit that were asked for.
        digest: the version digest of its weights.
        meta: fields of the manifest that whoever began the step has given.
        durable: whether the commit as a kind has to survive a power cut, where that was said.
        committing: the kind of the commit that is being carried out, with the parts `pending_keys`; `pending_beside`:
            beside its place.
        committed: as what this attempt has committed it, with the parts `committed_keys`.
        failed: why it failed.
        ended: tickets of saves that have ended.
        deleted: its checkpoint was deleted since.
    """

    step: int
    opened: float
    touched: float
    parts: StepParts = field(default_factory=StepParts)
    marks: set[Kind] = field(default_factory=set)
    digest: str | None = None
    meta: CommitMeta = field(default_factory=lambda: CommitMeta())
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
        """The most that was asked for; None: nothing yet."""
        if FULL in self.marks:
            return FULL
        return STATE_DICT if STATE_DICT in self.marks else None

    def is_committed(self, kind: Kind) -> bool:
        """Return whether a commit of at least this kind is visible, with every part of that kind, and none is out."""
        if self.committed is None or not covers(self.committed, kind):
            return False
        return self.parts.keys(kind) <= self.committed_keys and not self.parts.missing(kind)

    @property
    def settled(self) -> bool:
        """Whether all that was asked for is visible."""
        wanted = FULL if self.parts.more_than_weights else self.wanted or STATE_DICT
        return self.committing is None and self.is_committed(wanted)

    def status(self, visible: Kind | None, kind: Kind | None = None) -> StepStatus:
        """Return where the step stands.

        Args:
            visible: as what it is committed on the disk, by any attempt.
            kind: the kind of commit that is asked about; None: all that was asked for.
        """
        if kind is not None and self.is_committed(kind):
            return StepStatus("committed", visible, self.wanted)
        if self.failed is not None:
            return StepStatus("failed", visible, self.wanted, self.failed)
        if self.committing is not None:
            return StepStatus("committing", visible, self.wanted)
        announced = visible is not None and not self.parts.any and covers(visible, kind or self.wanted or STATE_DICT)
        if self.settled or announced:
            return StepStatus("committed", visible, self.wanted)
        full = self.parts.more_than_weights or self.wanted != STATE_DICT
        missing = self.parts.missing(FULL if full else STATE_DICT)
        if self.wanted is None or (full and self.wanted != FULL):
            missing.append("the word that it is to be committed")
        return StepStatus("open", visible, self.wanted, None, tuple(missing))

    # ---- its parts

    def ask(
        self,
        kind: Kind,
        parts: Iterable[str],
        weights_parts: Collection[str],
        meta: CommitMeta,
        durable: bool | None,
    ) -> None:
        """Note that a commit as this kind, with these parts, is asked for; see `CommitBook.begin`."""
        for name in parts:
            self.parts.expect(name, kind == STATE_DICT or name in weights_parts or name == DIGEST_PART)
        self.meta.update(meta)
        if durable is not None:
            self.durable[kind] = durable or self.durable.get(kind, False)
        self.marks.add(kind)

    def late(self, key: str, weights: bool | None) -> str | None:
        """Return a sentence if a part comes after the commit that it belongs to, and was not announced; else None.

        Args:
            key: of the part.
            weights: whether it is a weights part; None: not known.
        """
        done = FULL if FULL in (self.committing, self.committed) else self.committing or self.committed
        if done is None or key == DIGEST_PART or not covers(done, STATE_DICT if weights else FULL):
            return None
        if self.parts.awaits(key, weights):
            return None
        return (
            f"{describe_part(key)} came after the commit of step {self.step} as {done}, which lacks it; announce or "
            "register all parts of a step before the last of them is written"
        )

    def add(
        self, key: str, weights: bool, files: Iterable[FileTuple] | None, digest: str | None, ticket: str | None
    ) -> str | None:
        """Note that a part is in, see `CommitBook.finished`; say where it contradicts what was in before."""
        if digest is not None and self.digest not in (None, digest):
            return f"two digests were reported for the weights of step {self.step}: {self.digest} and {digest}"
        self.digest = digest or self.digest
        if key not in self.parts.done:
            new = None if files is None else tuple(files)
            clash = self.parts.clash(key, new or ())
            if clash is not None:
                return clash
            self.parts.add(key, weights, new, ticket)
        elif key in self.committed_keys | self.pending_keys:
            self.parts.repeat(key, ticket)
        return None

    # ---- its commit

    def due(self) -> Kind | None:
        """Return the kind as which it is to be committed now; None: nothing is to be done, or parts are missing."""
        if self.failed is not None or self.committing is not None:
            return None
        kind = next((of for of in (FULL, STATE_DICT) if of in self.marks and not self.parts.missing(of)), None)
        if kind is None:
            return None
        new = self.parts.keys(kind) - self.committed_keys
        if not new and self.committed is not None and covers(self.committed, kind):
            return None
        if self._is_partial(kind) and self.parts.untold(new):
            return None  # they come with the rest of the step
        return kind

    def begin_commit(self, attempt: int, kind: Kind, *, beside: bool) -> Commit:
        """Begin a commit of all parts of this kind that are in now, and return it."""
        self.committing, self.pending_keys, self.pending_beside = kind, self.parts.keys(kind), beside
        self.parts.settled = dict(self.parts.registered)
        durable = self.durable.get(kind)
        if kind == FULL and self.durable.get(STATE_DICT):
            durable = True  # it takes the place of weights that are
        return Commit(
            step=self.step,
            attempt=attempt,
            kind=kind,
            files=self.parts.files(self.pending_keys),
            digest=self.digest,
            meta=self.meta.copy(),
            opened=self.opened,
            partial=self._is_partial(kind),
            durable=durable,
            beside=beside,
        )

    def end_commit(self, committed: Kind | None) -> None:
        """Note that the commit is done; `committed`: as what this attempt has committed the step by now."""
        kind, self.committing, self.deleted = self.committing, None, False
        self.committed, self.committed_keys = committed, self.committed_keys | self.pending_keys
        if kind == FULL and self.failed is None:
            # The manifest holds them now; only the names are needed, to recognise doubled reports.
            for key in self.committed_keys:
                self.parts.done[key].files = ()

    def _is_partial(self, kind: Kind) -> bool:
        """Return whether a commit of this kind leaves other parts to be written."""
        return kind == STATE_DICT and (FULL in self.marks or self.parts.more_than_weights)

    # ---- a life after the actor's death

    def dump(self) -> StepDump:
        """Return what has to be kept so that it survives a restart, as JSON values."""
        return {
            "step": self.step,
            "opened": self.opened,
            "parts": self.parts.dump(),
            "marks": sorted(self.marks),
            "digest": self.digest,
            "meta": self.meta,
            "durable": self.durable,
            "committed": self.committed,
            "committed_keys": sorted(self.committed_keys),
        }

    @classmethod
    def load(cls, dumped: StepDump, now: float, committed: Kind | None, committed_paths: Collection[str]) -> Step:
        """Make a step from what `dump` returned.

        Args:
            dumped: what `dump` returned.
            now: seconds of the book's clock.
            committed: as what this attempt has committed it, as the disk says; it may be newer than the dump.
            committed_paths: the files that this commit lists.

        Raises:
            ValueError, KeyError, TypeError: it is not what `dump` returns.
        """
        entry = cls(int(dumped["step"]), float(dumped["opened"]), now, StepParts.load(dumped["parts"]))
        entry.marks = {kind for kind in KINDS if kind in dumped["marks"]}
        entry.digest = dumped["digest"]
        entry.meta = dumped["meta"].copy()
        entry.durable = dict(dumped.get("durable", {}))
        if committed is not None:
            entry.committed = committed
            done = entry.parts.done
            listed = {
                key
                for key in entry.parts.keys(committed)
                if all(file[0] in committed_paths for file in done[key].files or ())
            }
            entry.committed_keys = frozenset(dumped["committed_keys"] if committed == dumped["committed"] else listed)
        return entry


# Who may write now: the queue behind the save strategies, used by `trinity_sync.protocol.commit`.


#: Who may write at once: one thread, the threads of one process, those of one node, or everybody.
SAVE_STRATEGIES = ("single_thread", "single_process", "single_node", "unrestricted")


#: A turn as JSON values: ticket, node_id, job_id, life, part, collective, granted.
TurnDump: TypeAlias = tuple[str, str, str, str, str | None, bool, bool]


@dataclass(slots=True, kw_only=True)
class Turn:
    """One save that writes (`granted`) or waits for its turn.

    Args:
        ticket: the name of this turn.
        node_id, job_id: the writer: its node, and its process on it.
        life: tells a process from an earlier one of the same name.
        step, part: what it writes; None where the writer did not say.
        collective: it has barriers with its peers; it is granted at once and stands in nobody's way.
        anonymous: its writer will report the end without the ticket.
        since: when it was asked for or, once granted, when that was, in seconds of the caller's clock.
    """

    ticket: str
    node_id: str
    job_id: str
    step: int | None
    part: str | None
    collective: bool
    anonymous: bool
    since: float
    life: str = ""
    granted: bool = False

    @property
    def writer(self) -> tuple[str, str, str]:
        """The process that writes."""
        return (self.node_id, self.job_id, self.life)


class TurnQueue:
    """Turns in the order in which they were asked for.

    Args:
        strategy: one of `SAVE_STRATEGIES`.
    """

    def __init__(self, strategy: str) -> None:
        if strategy not in SAVE_STRATEGIES:
            raise ValueError(f"save strategy {strategy!r} is not one of {', '.join(SAVE_STRATEGIES)}")
        self._strategy = strategy
        self._turns: dict[str, Turn] = {}

    def get(self, ticket: str) -> Turn | None:
        """Return the turn of this name, if it has not ended."""
        return self._turns.get(ticket)

    def select(self, which: Callable[[Turn], bool]) -> list[Turn]:
        """Return the turns that `which` is true of, oldest first."""
        return [turn for turn in self._turns.values() if which(turn)]

    def of_step(self, step: int) -> list[Turn]:
        """Return the turns of one step."""
        return self.select(lambda turn: turn.step == step)

    def ask(self, turn: Turn) -> None:
        """Queue up; the same ticket again changes nothing."""
        self._turns.setdefault(turn.ticket, turn)

    def release(self, ticket: str | None) -> bool:
        """End a turn; None ends the oldest one of a writer that does not name its tickets. False: there was none."""
        if ticket is None:
            ticket = next((turn.ticket for turn in self.select(lambda turn: turn.anonymous and turn.granted)), None)
        return ticket is not None and self._turns.pop(ticket, None) is not None

    def grant(self, now: float) -> list[str]:
        """Give out all turns that the strategy allows now; return their tickets."""
        granted = []
        for turn in self.select(lambda turn: turn.collective and not turn.granted):
            turn.granted, turn.since = True, now
            granted.append(turn.ticket)
        for turn in self.select(lambda turn: not turn.granted):
            if not self._may_join(turn):
                break
            turn.granted, turn.since = True, now
            granted.append(turn.ticket)
        return granted

    def dump(self, step: int) -> list[TurnDump]:
        """Return the turns of a step, as JSON values."""
        turns = self.of_step(step)
        return [(turn.ticket, *turn.writer, turn.part, turn.collective, turn.granted) for turn in turns]

    def restore(self, step: int, dumped: Iterable[TurnDump], now: float) -> None:
        """Take up the turns again that `dump` gave."""
        for ticket, node_id, job_id, life, part, collective, granted in dumped:
            self.ask(
                Turn(
                    ticket=ticket,
                    node_id=node_id,
                    job_id=job_id,
                    step=step,
                    part=part,
                    collective=bool(collective),
                    anonymous=False,
                    since=now,
                    life=life,
                    granted=bool(granted),
                )
            )

    def _may_join(self, turn: Turn) -> bool:
        others = self.select(lambda other: other.granted and not other.collective)
        if self._strategy == "unrestricted" or not others:
            return True
        if self._strategy == "single_node":
            return all(other.node_id == turn.node_id for other in others)
        if self._strategy == "single_process":
            return all(other.writer == turn.writer for other in others)
        return False
