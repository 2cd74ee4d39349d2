"""The parts of one checkpoint step: expected, in, missing. Used by `trinity_sync.protocol.commit`.

A part is known by its name, or only counted; it is a weights part or a checkpoint part (optimizer, extra, an HF
export). A state-dict commit needs the weights parts, a full one needs all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, TypeAlias, TypedDict

Kind: TypeAlias = Literal["full", "state_dict"]
FULL: Kind = "full"
STATE_DICT: Kind = "state_dict"
KINDS: tuple[Kind, ...] = (STATE_DICT, FULL)

#: The part that brings the version digest and no files. It is a weights part, waited for only where it is named.
DIGEST_PART = "digest"
#: What verl's trainer writes itself, beside the files of an engine, is there. It brings no files and nobody writes it;
#: so no silence is too long where it alone is missing.
BESIDE_PART = "beside"

#: A file of a part: (path relative to the checkpoint folder, bytes, xxh3_128 hex).
FileTuple: TypeAlias = tuple[str, int, str]
#: The file of one rank, of one of the contents that verl's FSDP engines save.
_RANK_FILE = re.compile(r"(.*_world_size_)([1-9]\d{0,5})_rank_(\d{1,6})\.pt", re.DOTALL)


def rank_file(content: str, ranks: int, rank: int) -> str:
    """Name the file in which verl's FSDP engines keep one content (``model``, ``optim``, ``extra_state``) of a rank."""
    return f"{content}_world_size_{ranks}_rank_{rank}.pt"


def missing_rank_files(paths: Iterable[str]) -> list[str]:
    """Return the files of other ranks that belong to these by their names, of each set the first that is missing.

    Every rank of an FSDP engine writes its own file of each content, replicas of a hybrid mesh too. Where sets of
    several world sizes lie side by side, one whole set is enough.
    """
    worlds: dict[str, dict[int, set[int]]] = {}
    for path in paths:
        if match := _RANK_FILE.fullmatch(path):
            worlds.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(int(match[3]))
    missing: list[str] = []
    for name, sets in sorted(worlds.items()):
        absent = [(size, next((rank for rank in range(size) if rank not in sets[size]), None)) for size in sets]
        if all(rank is not None for _, rank in absent):
            missing.append("{}{}_rank_{}.pt".format(name, *absent[0]))
    return missing


def covers(committed: Kind, wanted: Kind) -> bool:
    """Return whether a commit of the first kind has all that one of the second would."""
    return committed == FULL or wanted == STATE_DICT


def describe_part(name: str | None) -> str:
    """Name a part in a sentence; parts that are only counted have keys that begin with ``#``."""
    return f"part {name!r}" if name is not None and not name.startswith("#") else "a part without a name"


def beside_part(file: str | None) -> str:
    """Name the part that is in when the trainer has written this file beside an engine's; None: all of rank 0's."""
    return BESIDE_PART if file is None else f"{BESIDE_PART}-{file}"


def is_beside(part: str) -> bool:
    """Whether a part, in whatever role's folder, is of what the trainer writes itself."""
    name = part.rpartition("/")[2]
    return name == BESIDE_PART or name.startswith(f"{BESIDE_PART}-")


def beside_file(part: str) -> str | None:
    """The file that a part of this kind stands for; see `beside_part`."""
    return part.rpartition("/")[2].removeprefix(BESIDE_PART).removeprefix("-") or None


@dataclass(slots=True)
class DonePart:
    """A part that is in: the files it wrote, as far as it said (None: it did not), and the ticket of the save."""

    weights: bool
    files: tuple[FileTuple, ...] | None
    ticket: str | None = None


class PartsDump(TypedDict):
    """`StepParts` as JSON values; what is a tuple here comes back from JSON as a list."""

    expected: dict[str, bool]
    registered: tuple[int, int]
    registrations: list[str]
    announced: dict[str, bool | None]
    done: dict[str, tuple[bool, tuple[FileTuple, ...] | None, str | None]]
    again: tuple[list[str], list[str]]
    settled: tuple[int, int]


@dataclass(slots=True)
class StepParts:
    """Counts and names of one step.

    Args:
        expected: named parts, and whether each is a weights part.
        announced: parts that a writer has announced and not reported yet, by name or by ``#`` and the ticket of the
            save, and whether each is a weights part; None: not known. They need no registration.
        registered: how many parts were announced without a name, for weights (True) and others (False).
        registrations: ids of the announcements, so that a doubled one is recognised.
        done: the parts that are in, by name or by ``#`` and the id of the report.
        settled: how many parts were registered when the last commit began.
        again: tickets of saves whose part was committed before; they stand for announcements that came with them.
    """

    expected: dict[str, bool] = field(default_factory=dict)
    registered: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    registrations: set[str] = field(default_factory=set)
    announced: dict[str, bool | None] = field(default_factory=dict)
    settled: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    done: dict[str, DonePart] = field(default_factory=dict)
    again: dict[bool, set[str]] = field(default_factory=lambda: {True: set(), False: set()})

    @property
    def any(self) -> bool:
        """Whether anything of this step was announced or written."""
        return bool(self.expected or self.announced or self.done or self.registered[True] or self.registered[False])

    @property
    def more_than_weights(self) -> bool:
        """Whether there are checkpoint parts."""
        named = any(weights is False for named in (self.expected, self.announced) for weights in named.values())
        return named or self.registered[False] > 0 or any(not done.weights for done in self.done.values())

    def expect(self, name: str, weights: bool) -> None:
        """Wait for a part of this name. What it was reported as before gives way."""
        self.expected[name] = weights
        self.announced.pop(name, None)
        if name in self.done:
            self.done[name].weights = weights

    def announce(self, key: str, weights: bool | None) -> None:
        """Wait for a part that a writer is about to write."""
        if key not in self.expected and key not in self.done:
            self.announced.setdefault(key, weights)

    def awaits(self, key: str, weights: bool | None) -> bool:
        """Return whether the part is known, or parts of its class were registered since the last commit."""
        known = key in self.expected or key in self.announced or key in self.done
        return known or any(self.registered[of] > self.settled[of] for of in (True, False) if weights in (None, of))

    def register(self, weights: int, checkpoint: int, report: str | None) -> None:
        """Wait for so many more parts; a doubled `report` id counts once."""
        if report is not None and report in self.registrations:
            return
        if report is not None:
            self.registrations.add(report)
        self.registered[True] += weights
        self.registered[False] += checkpoint

    def add(self, key: str, weights: bool, files: Sequence[FileTuple] | None, ticket: str | None = None) -> None:
        """Note that a part is in; the second time counts for nothing."""
        self.announced.pop(key, None)
        weights = self.expected.get(key, weights or key == DIGEST_PART)
        self.done.setdefault(key, DonePart(weights, None if files is None else tuple(files), ticket))

    def repeat(self, key: str, ticket: str | None) -> None:
        """Note that a part that was committed came once more, of another save; the same one doubled is not."""
        if ticket is not None and ticket != self.done[key].ticket:
            self.again[self.done[key].weights].add(ticket)

    def clash(self, key: str, files: Sequence[FileTuple]) -> str | None:
        """Return a sentence if another part wrote one of these files with other contents, else None."""
        known = {file[0]: (other, file) for other, done in self.done.items() for file in done.files or ()}
        for file in files:
            if file[0] in known and known[file[0]][1] != file:
                other = describe_part(known[file[0]][0])
                return f"{describe_part(key)} and {other} both wrote {file[0]}, with different contents"
        return None

    def keys(self, kind: Kind) -> frozenset[str]:
        """Return the keys of the parts that are in and belong to a commit of this kind."""
        return frozenset(key for key, done in self.done.items() if kind == FULL or done.weights)

    def files(self, keys: Iterable[str]) -> tuple[FileTuple, ...]:
        """Return what these parts wrote, sorted by path."""
        return tuple(sorted({file for key in keys for file in self.done[key].files or ()}))

    def untold(self, keys: Iterable[str]) -> bool:
        """Return whether one of these parts said nothing of its files.

        Parts that are only counted never do: their writers use the step's own folder.
        """
        return any(self.done[key].files is None for key in keys if key != DIGEST_PART and not key.startswith("#"))

    def missing(self, kind: Kind) -> list[str]:
        """Say what a commit of this kind still waits for, one phrase each; empty: nothing."""
        classes = (True, False) if kind == FULL else (True,)
        wanted = {name: weights for name, weights in self.expected.items() if weights in classes}
        missing = [f"part {name!r}" for name in wanted if name not in self.done]
        missing += [
            describe_part(key) for key, weights in self.announced.items() if weights is None or weights in classes
        ]
        for weights in classes:
            label = "weights" if weights else "checkpoint"
            count, counted = self.registered[weights], self._counted(weights)
            left = count - len(counted) - len(self.again[weights])
            # A named part needs no registration of its own where the step has one.
            unregistered = counted if not count else [key for key in counted if key.startswith("#")][count:]
            if left > 0:
                missing.append(f"{left} of {count} counted {label} parts")
            elif unregistered:
                missing.append(f"the registration of {len(unregistered)} {label} part(s) that were reported")
        counts = any(self.registered[weights] for weights in classes)
        if not missing and not (wanted.keys() - {DIGEST_PART}) and not counts:
            missing.append("the registration of its parts")
        if not missing and counts:  # the count may be too small; where all parts are named the commit checks the files
            missing += self._missing_rank_files(kind)
        return missing

    def _missing_rank_files(self, kind: Kind) -> list[str]:
        told = [self.done[key].files for key in self.keys(kind) if key != DIGEST_PART]
        if None in told:
            return []  # the commit looks at the folder
        return missing_rank_files(path for files in told for path, *_ in files or ())

    def _counted(self, weights: bool) -> list[str]:
        return [
            key
            for key, done in self.done.items()
            if done.weights is weights and key not in self.expected and key != DIGEST_PART
        ]

    def dump(self) -> PartsDump:
        """Return all of it as JSON values."""
        return {
            "expected": self.expected,
            "registered": (self.registered[True], self.registered[False]),
            "registrations": sorted(self.registrations),
            "announced": self.announced,
            "done": {key: (done.weights, done.files, done.ticket) for key, done in self.done.items()},
            "again": (sorted(self.again[True]), sorted(self.again[False])),
            "settled": (self.settled[True], self.settled[False]),
        }

    @classmethod
    def load(cls, dumped: PartsDump) -> StepParts:
        """Make the parts from what `dump` returned.

        Raises:
            ValueError, KeyError, TypeError: it is not what `dump` returns.
        """
        parts = cls(
            expected={str(name): bool(weights) for name, weights in dumped["expected"].items()},
            registered={True: int(dumped["registered"][0]), False: int(dumped["registered"][1])},
            registrations={str(report) for report in dumped["registrations"]},
            announced=dict(dumped["announced"]),
            again={True: set(dumped["again"][0]), False: set(dumped["again"][1])},
            settled={True: int(dumped["settled"][0]), False: int(dumped["settled"][1])},
        )
        for key, (weights, files, ticket) in dumped["done"].items():
            told = None if files is None else [(str(path), int(size), str(digest)) for path, size, digest in files]
            parts.add(key, bool(weights), told, ticket)
        return parts


# What the book of commits decides; whoever feeds it carries that out. See `trinity_sync.protocol.commit`.


class LeftOut(TypedDict):
    """Tensors of the model's folder that are in no version: draft heads, and a vision tower.

    Args:
        path: the folder.
        names: of the tensors.
        digest: of all of them together, as they are stored, hex.
        tower: of the names those of a vision tower, which full checkpoints hold as well.
    """

    path: str
    names: Sequence[str]
    digest: str
    tower: Sequence[str]


class Compared(TypedDict):
    """The reference that a policy is held near to.

    Args:
        path: its folder, absolute, or its hub id.
        digest: of its weights as they are stored, hex.
    """

    path: str
    digest: str


class CommitMeta(TypedDict, total=False):
    """What a checkpoint's manifest says beside what the book knows, and what retention goes by.

    Args:
        backend: the training engine.
        world_size: how many ranks it has.
        config_digest: the digest of the run's configuration.
        metrics: name to value, as of the step.
        base: of an adapter: the model it belongs to, as `layout.Base.to_json` gives it; None: the weights are whole.
        wire: the dtypes of the version digest, as `Wire.to_json` gives them.
        left_out: what an export takes from the model's folder; None: nothing.
        reference: what the policy is held near to; None: nothing, or the base of the adapter.
        keep_last: so many of the newest full checkpoints stay after this commit, beside what the configured policies
            keep; at least 1. Not in the manifest. Left out: the policies alone decide.
    """

    backend: str
    world_size: int
    config_digest: str | None
    metrics: Mapping[str, float | None] | None
    base: Mapping[str, object] | None
    wire: Mapping[str, object] | None
    left_out: LeftOut | None
    reference: Compared | None
    keep_last: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The writer with this ticket may write now."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the step as `kind`.

    Args:
        files: what the parts said they wrote; parts that named no files are not in it.
        digest: the version digest of the weights, where it was reported.
        meta: what `CommitBook.begin` was given.
        opened: when this save of the step was first heard of, in seconds of the book's clock.
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
    meta: CommitMeta
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


# A file of a checkpoint, as it is known from who wrote it to the manifest.


MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: relative to the checkpoint folder, with ``/``.
        bytes: its size.
        xxh3_128: hex digest of its contents.
    """

    path: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or self.path == MANIFEST:
            raise ValueError(
                f"{self.path!r} cannot be the path of a checkpoint's file: it has to lie inside its folder"
            )

    def as_tuple(self) -> FileTuple:
        """Return the entry as the protocol carries it."""
        return (self.path, self.bytes, self.xxh3_128)


# What readers need to know of a staged part. Apart from the agent, so that the synchronizer's process stays small.


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """What a reader needs to take a staged part.

    Attributes:
        part: its name, such as ``"rank-00000"``.
        node: Ray node id of the agent that holds it.
        path: the slot's file, to be mapped by readers on that node.
        nbytes: size of the part.
        layout: digest of its layout, by which a reader finds the layout it has seen before.
        buckets: transfer digests where `sync.verify` is ``bucket``. With ``full`` the digest of the version is what
            tells damage, of whatever a reader then holds; with ``off`` nothing does.
        blocked_s: seconds in which the rank stood still while it copied the part.
        digest_s: seconds in which the agent digested all parts of its node.
    """

    part: str
    node: str
    path: str
    nbytes: int
    layout: str
    buckets: list[bytes] | None
    blocked_s: float = 0.0
    digest_s: float = 0.0


def part_name(rank: int) -> str:
    """Name the part that a trainer rank stages."""
    return f"rank-{rank:05d}"


def shard_file(part: str) -> str:
    """Return where a part stands in a checkpoint folder."""
    return f"actor/weights_{part}.safetensors"
