"""One step in the book of commits, its due commit, and the queue of writers. Used by `trinity_sync.protocol.commit`."""

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
    """Where a step stands."""

    # ``open``: parts are missing; ``committed``: as all requested kinds
    state: Literal["unknown", "open", "committing", "committed", "failed"]
    committed: Kind | None  # kind of the current commit, whatever the state: of this attempt, else of an earlier one
    wanted: Kind | None = None  # the highest requested kind
    error: str | None = None
    missing: tuple[str, ...] = ()  # one phrase for each missing part


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
    """An open step as JSON values."""

    attempt: int
    turns: list[TurnDump]


@dataclass(slots=True)
class Step:
    """One step that is or was being saved."""

    step: int
    opened: float  # when its newest save was first heard of, in seconds of the book's clock
    touched: float  # when it was last heard of
    parts: StepParts = field(default_factory=StepParts)
    marks: set[Kind] = field(default_factory=set)  # the requested kinds of commit
    digest: str | None = None  # the version digest of its weights
    meta: CommitMeta = field(default_factory=lambda: CommitMeta())
    durable: dict[Kind, bool] = field(default_factory=dict)  # see `CommitBook.begin`
    # The commit in progress, its parts, and whether it goes beside its place.
    committing: Kind | None = None
    pending_keys: frozenset[str] = frozenset()
    pending_beside: bool = False
    # This attempt's commit, with its parts.
    committed: Kind | None = None
    committed_keys: frozenset[str] = frozenset()
    failed: str | None = None  # the error
    ended: set[str] = field(default_factory=set)  # tickets of ended saves
    deleted: bool = False  # its checkpoint was deleted

    @property
    def wanted(self) -> Kind | None:
        """The highest requested kind; None: none yet."""
        if FULL in self.marks:
            return FULL
        return STATE_DICT if STATE_DICT in self.marks else None

    def is_committed(self, kind: Kind) -> bool:
        """Return whether a commit of at least this kind is visible, with every part of that kind and none missing."""
        if self.committed is None or not covers(self.committed, kind):
            return False
        return self.parts.keys(kind) <= self.committed_keys and not self.parts.missing(kind)

    @property
    def settled(self) -> bool:
        """Whether all that was requested is visible."""
        wanted = FULL if self.parts.more_than_weights else self.wanted or STATE_DICT
        return self.committing is None and self.is_committed(wanted)

    def status(self, visible: Kind | None, kind: Kind | None = None) -> StepStatus:
        """Return where the step stands, as a whole or as `kind`; `visible`: the kind of its commit on disk, by any
        attempt.
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
        """Note that a commit as this kind, with these parts, is requested; see `CommitBook.begin`."""
        for name in parts:
            self.parts.expect(name, kind == STATE_DICT or name in weights_parts or name == DIGEST_PART)
        self.meta.update(meta)
        if durable is not None:
            self.durable[kind] = durable or self.durable.get(kind, False)
        self.marks.add(kind)

    def late(self, key: str, weights: bool | None) -> str | None:
        """Return an error if a part comes after the commit that it belongs to, and was not announced.

        `weights`: whether it is a weights part; None: unknown.
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
        """Note that a part is in, see `CommitBook.finished`; return an error where it contradicts an earlier one."""
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
        """Return the kind to commit now; None: there is nothing to do, or parts are missing."""
        if self.failed is not None or self.committing is not None:
            return None
        kind = next((of for of in (FULL, STATE_DICT) if of in self.marks and not self.parts.missing(of)), None)
        if kind is None:
            return None
        new = self.parts.keys(kind) - self.committed_keys
        if not new and self.committed is not None and covers(self.committed, kind):
            return None
        if self._is_partial(kind) and self.parts.has_unknown_files(new):
            return None  # they are committed with the rest of the step
        return kind

    def begin_commit(self, attempt: int, kind: Kind, *, beside: bool) -> Commit:
        """Begin a commit of all present parts of this kind, and return it."""
        self.committing, self.pending_keys, self.pending_beside = kind, self.parts.keys(kind), beside
        self.parts.settled = dict(self.parts.registered)
        durable = self.durable.get(kind)
        if kind == FULL and self.durable.get(STATE_DICT):
            durable = True  # it replaces durable weights
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
        """Note that the commit is done; `committed`: this attempt's commit of the step by now."""
        kind, self.committing, self.deleted = self.committing, None, False
        self.committed, self.committed_keys = committed, self.committed_keys | self.pending_keys
        if kind == FULL and self.failed is None:
            # The manifest has the files now; the names are kept to recognise repeated reports.
            for key in self.committed_keys:
                self.parts.done[key].files = ()

    def _is_partial(self, kind: Kind) -> bool:
        """Return whether a commit of this kind leaves other parts to be written."""
        return kind == STATE_DICT and (FULL in self.marks or self.parts.more_than_weights)

    # ---- restart of the actor

    def dump(self) -> StepDump:
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
        """Restore a step from `dump`. `now`: seconds of the book's clock. `committed`, `committed_paths`: this
        attempt's commit on disk and its files, which may be newer than the dump. Raises ValueError, KeyError,
        TypeError: it is not a result of `dump`.
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


#: Who may write concurrently: one thread, the threads of one process, those of one node, or everybody.
SAVE_STRATEGIES = ("single_thread", "single_process", "single_node", "unrestricted")

#: A turn as JSON values: ticket, node_id, job_id, life, part, collective, granted.
TurnDump: TypeAlias = tuple[str, str, str, str, str | None, bool, bool]


@dataclass(slots=True)
class Turn:
    """One save that writes (`granted`) or waits for its turn."""

    ticket: str
    node_id: str
    job_id: str  # the writing process on its node
    step: int | None
    part: str | None  # None: the writer did not name it
    collective: bool  # it has barriers with its peers: it is granted at once and does not block others
    anonymous: bool  # its writer will report the end without the ticket
    since: float  # when it was requested or, once granted, when that was, in seconds of the caller's clock
    life: str = ""  # tells a process from an earlier one of the same name
    granted: bool = False

    @property
    def writer(self) -> tuple[str, str, str]:
        return (self.node_id, self.job_id, self.life)


class TurnQueue:
    """Turns in the order of the requests. `strategy`: one of `SAVE_STRATEGIES`."""

    def __init__(self, strategy: str) -> None:
        if strategy not in SAVE_STRATEGIES:
            raise ValueError(f"save strategy {strategy!r} is not one of {', '.join(SAVE_STRATEGIES)}")
        self._strategy = strategy
        self._turns: dict[str, Turn] = {}

    def get(self, ticket: str) -> Turn | None:
        return self._turns.get(ticket)

    def select(self, which: Callable[[Turn], bool]) -> list[Turn]:
        """Return the turns that satisfy `which`, oldest first."""
        return [turn for turn in self._turns.values() if which(turn)]

    def of_step(self, step: int) -> list[Turn]:
        return self.select(lambda turn: turn.step == step)

    def ask(self, turn: Turn) -> None:
        """Queue up; the same ticket again changes nothing."""
        self._turns.setdefault(turn.ticket, turn)

    def release(self, ticket: str | None) -> bool:
        """End a turn, and return whether there was one. None ends the oldest granted turn of an anonymous writer."""
        if ticket is None:
            ticket = next((turn.ticket for turn in self.select(lambda turn: turn.anonymous and turn.granted)), None)
        return ticket is not None and self._turns.pop(ticket, None) is not None

    def grant(self, now: float) -> list[str]:
        """Grant all turns that the strategy allows now; return their tickets."""
        granted = []
        waiting = self.select(lambda turn: not turn.granted)
        for turn in sorted(waiting, key=lambda turn: not turn.collective):
            if not turn.collective and not self._may_join(turn):
                break
            turn.granted, turn.since = True, now
            granted.append(turn.ticket)
        return granted

    def dump(self, step: int) -> list[TurnDump]:
        turns = self.of_step(step)
        return [(turn.ticket, *turn.writer, turn.part, turn.collective, turn.granted) for turn in turns]

    def restore(self, step: int, dumped: Iterable[TurnDump], now: float) -> None:
        for ticket, node_id, job_id, life, part, collective, granted in dumped:
            self.ask(Turn(ticket, node_id, job_id, step, part, bool(collective), False, now, life, bool(granted)))

    def _may_join(self, turn: Turn) -> bool:
        others = self.select(lambda other: other.granted and not other.collective)
        if self._strategy == "unrestricted" or not others:
            return True
        if self._strategy == "single_node":
            return all(other.node_id == turn.node_id for other in others)
        if self._strategy == "single_process":
            return all(other.writer == turn.writer for other in others)
        return False
