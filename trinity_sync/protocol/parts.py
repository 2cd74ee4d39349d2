"""The parts of one checkpoint step, and the messages of the commit protocol. Used by `trinity_sync.protocol.commit`.

A part has a name, or is only counted; it is a weights part or a checkpoint part (optimizer, extra, an HF export). A
state-dict commit needs the weights parts, a full one needs all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypedDict

Kind: TypeAlias = Literal["full", "state_dict"]
FULL: Kind = "full"
STATE_DICT: Kind = "state_dict"
KINDS: tuple[Kind, ...] = (STATE_DICT, FULL)

#: The part with the version digest and no files. It is a weights part; a commit waits for it only where it is named.
DIGEST_PART = "digest"
#: Stands for the files that verl's trainer itself writes next to an engine's files. The part has no files and no
#: writer, so a step that waits only for it does not time out.
BESIDE_PART = "beside"

#: A file of a part: (path relative to the checkpoint folder, bytes, xxh3_128 hex).
FileTuple: TypeAlias = tuple[str, int, str]
#: The file of one rank, for one of the contents (model, optim, extra) that verl's FSDP engines save.
_RANK_FILE = re.compile(r"(.*_world_size_)([1-9]\d{0,5})_rank_(\d{1,6})\.pt", re.DOTALL)


def rank_file(content: str, ranks: int, rank: int) -> str:
    """Name the file in which verl's FSDP engines keep one content (``model``, ``optim``, ``extra_state``) of a rank."""
    return f"{content}_world_size_{ranks}_rank_{rank}.pt"


def missing_rank_files(paths: Iterable[str]) -> list[str]:
    """Return the first missing rank file of each content whose sets are all incomplete, judged by the file names.

    Every rank of an FSDP engine writes its own file of each content, replicas of a hybrid mesh too. With files of
    several world sizes, one complete set is enough.
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
    """Return whether a commit of the first kind contains all that one of the second kind would."""
    return committed == FULL or wanted == STATE_DICT


def describe_part(name: str | None) -> str:
    """Name a part in a sentence; the keys of counted parts begin with ``#``."""
    return f"part {name!r}" if name is not None and not name.startswith("#") else "a part without a name"


def beside_part(file: str | None) -> str:
    """Name the part that stands for this file of the trainer; None: for all files of rank 0."""
    return BESIDE_PART if file is None else f"{BESIDE_PART}-{file}"


def is_beside(part: str) -> bool:
    """Return whether a part, in any role's folder, stands for files that the trainer itself writes."""
    name = part.rpartition("/")[2]
    return name == BESIDE_PART or name.startswith(f"{BESIDE_PART}-")


def beside_file(part: str) -> str | None:
    """Return the file that a part stands for; see `beside_part`."""
    return part.rpartition("/")[2].removeprefix(BESIDE_PART).removeprefix("-") or None


@dataclass(slots=True)
class DonePart:
    """A part that is in: its files (None: unknown), and the ticket of its save."""

    weights: bool
    files: tuple[FileTuple, ...] | None
    ticket: str | None = None


class PartsDump(TypedDict):
    """`StepParts` as JSON values; JSON turns the tuples into lists."""

    expected: dict[str, bool]
    registered: tuple[int, int]
    registrations: list[str]
    announced: dict[str, bool | None]
    done: dict[str, tuple[bool, tuple[FileTuple, ...] | None, str | None]]
    again: tuple[list[str], list[str]]
    settled: tuple[int, int]


@dataclass(slots=True)
class StepParts:
    """Counts and names of one step. A weights flag is True for a weights part, False for others, None for unknown."""

    expected: dict[str, bool] = field(default_factory=dict)
    # The number of parts registered without a name, by weights flag, and the ids of these reports.
    registered: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    registrations: set[str] = field(default_factory=set)
    # Announced and not reported yet, by name or by ``#`` and the ticket of the save. They need no registration.
    announced: dict[str, bool | None] = field(default_factory=dict)
    # `registered` when the last commit began.
    settled: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    # By name, or by ``#`` and the id of the report.
    done: dict[str, DonePart] = field(default_factory=dict)
    # Tickets of repeated saves of committed parts; each stands for one registration that came with it.
    again: dict[bool, set[str]] = field(default_factory=lambda: {True: set(), False: set()})

    @property
    def any(self) -> bool:
        return bool(self.expected or self.announced or self.done or self.registered[True] or self.registered[False])

    @property
    def more_than_weights(self) -> bool:
        named = any(weights is False for named in (self.expected, self.announced) for weights in named.values())
        return named or self.registered[False] > 0 or any(not done.weights for done in self.done.values())

    def expect(self, name: str, weights: bool) -> None:
        """Wait for a part of this name. Its earlier announcement or class gives way."""
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
        """Wait for so many more parts; a repeated `report` id counts once."""
        if report is not None and report in self.registrations:
            return
        if report is not None:
            self.registrations.add(report)
        self.registered[True] += weights
        self.registered[False] += checkpoint

    def add(self, key: str, weights: bool, files: Sequence[FileTuple] | None, ticket: str | None = None) -> None:
        """Note that a part is in; a repeated call counts for nothing."""
        self.announced.pop(key, None)
        weights = self.expected.get(key, weights or key == DIGEST_PART)
        self.done.setdefault(key, DonePart(weights, None if files is None else tuple(files), ticket))

    def repeat(self, key: str, ticket: str | None) -> None:
        """Note that another save wrote a committed part again; a repeated report of the same save does not count."""
        if ticket is not None and ticket != self.done[key].ticket:
            self.again[self.done[key].weights].add(ticket)

    def clash(self, key: str, files: Sequence[FileTuple]) -> str | None:
        """Return an error if another part wrote one of these files with other contents."""
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
        """Return the files of these parts, sorted by path."""
        return tuple(sorted({file for key in keys for file in self.done[key].files or ()}))

    def has_unknown_files(self, keys: Iterable[str]) -> bool:
        """Return whether the files of one of these parts are unknown. Counted parts use the step's own folder and do
        not count.
        """
        return any(self.done[key].files is None for key in keys if key != DIGEST_PART and not key.startswith("#"))

    def missing(self, kind: Kind) -> list[str]:
        """Return what a commit of this kind still waits for, one phrase each."""
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
        listed = [self.done[key].files for key in self.keys(kind) if key != DIGEST_PART]
        if None in listed:
            return []  # the commit lists the folder
        return missing_rank_files(path for files in listed for path, *_ in files or ())

    def _counted(self, weights: bool) -> list[str]:
        return [
            key
            for key, done in self.done.items()
            if done.weights is weights and key not in self.expected and key != DIGEST_PART
        ]

    def dump(self) -> PartsDump:
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
        """Restore the parts from `dump`. Raises ValueError, KeyError, TypeError: it is not a result of `dump`."""
        parts = cls(
            expected={str(name): bool(weights) for name, weights in dumped["expected"].items()},
            registered={True: int(dumped["registered"][0]), False: int(dumped["registered"][1])},
            registrations={str(report) for report in dumped["registrations"]},
            announced=dict(dumped["announced"]),
            again={True: set(dumped["again"][0]), False: set(dumped["again"][1])},
            settled={True: int(dumped["settled"][0]), False: int(dumped["settled"][1])},
        )
        for key, (weights, files, ticket) in dumped["done"].items():
            listed = None if files is None else [(str(path), int(size), str(digest)) for path, size, digest in files]
            parts.add(key, bool(weights), listed, ticket)
        return parts


# The decisions of the commit book, and the metadata of a commit.


class Remainder(TypedDict):
    """Tensors of the model's folder that no version contains: draft heads, and a vision tower."""

    path: str  # the folder
    names: Sequence[str]
    digest: str  # hex, of all of them together, as they are stored
    tower: Sequence[str]  # the names of the vision tower's tensors, which full checkpoints contain


class Reference(TypedDict):
    """The reference model of the policy's KL term."""

    path: str  # absolute folder, or hub id
    digest: str  # hex, of its weights as they are stored


class CommitMeta(TypedDict, total=False):
    """Fields of a checkpoint's manifest that the book does not know itself, and `keep_last` for retention."""

    backend: str
    world_size: int
    config_digest: str | None
    metrics: Mapping[str, float | None] | None
    base: Mapping[str, object] | None  # for an adapter: `contents.Base.to_json` of its model; None: whole weights
    wire: Mapping[str, object] | None  # `WireFormat.to_json`: the dtypes of the version digest
    left_out: Remainder | None  # tensors that an export copies from the model's folder
    reference: Reference | None  # None also where the reference is the base of the adapter
    # Keep at least this many of the newest full checkpoints (at least 1), in addition to the policies; not in the
    # manifest.
    keep_last: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The writer with this ticket may write now."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the step as `kind`."""

    step: int
    attempt: int
    kind: Kind
    files: tuple[FileTuple, ...]  # the files that the parts named
    digest: str | None  # the version digest of the weights, where it was reported
    meta: CommitMeta
    opened: float  # when this save of the step was first heard of, in seconds of the book's clock
    # Other parts of the step are still being written: only `files` may go into the commit, and the staging folder has
    # to stay. Weights whose files are unknown are never committed in part.
    partial: bool
    durable: bool | None = None  # has to survive a power cut; None: as all commits do
    beside: bool = False  # a full checkpoint, or a commit of another attempt, has the place; these weights go beside it


@dataclass(frozen=True, slots=True)
class Abort:
    """The step failed: report it (once) and delete its staged files."""

    step: int
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class Cleanup:
    """A writer of a failed step ended late: delete its staged files again."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class MoveTracker:
    """Let the tracker of this kind name the step."""

    kind: Kind
    step: int


Decision: TypeAlias = Grant | Commit | Abort | Cleanup | MoveTracker


MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file of a checkpoint: its path relative to the checkpoint folder, with ``/``, its size, and the digest in
    hex.
    """

    path: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if {"", "."}.issuperset(parts) or self.path.startswith("/") or ".." in parts or self.path == MANIFEST:
            raise ValueError(
                f"{self.path!r} cannot be the path of a checkpoint's file: it has to lie inside its folder"
            )

    def as_tuple(self) -> FileTuple:
        return (self.path, self.bytes, self.xxh3_128)


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """Describes a staged part to its readers. Not in the agent's module, so that the synchronizer's process stays
    small.
    """

    part: str  # such as ``"rank-00000"``
    node: str  # Ray node id of its agent
    path: str  # the slot's file, which readers on that node map
    nbytes: int
    layout: str  # digest of its layout, by which a reader finds a known layout
    # Transfer digests where `sync.verify` is ``bucket``. With ``full`` the digest of the version detects damage, with
    # ``off`` nothing does.
    buckets: list[bytes] | None
    blocked_s: float = 0.0  # how long the rank's copy of the part blocked training
    digest_s: float = 0.0  # how long the agent took to digest all parts of its node


class VersionBytes(NamedTuple):
    """Bytes of a version: all, those of the node with the most, and those of the largest part."""

    whole: int = 0
    node: int = 0
    part: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[str, int]]) -> VersionBytes:
        """Add up the parts: (node, bytes) of each."""
        parts, nodes = list(parts), Counter[str]()
        for node, nbytes in parts:
            nodes[node] += nbytes
        return cls(nodes.total(), max(nodes.values(), default=0), max((nbytes for _, nbytes in parts), default=0))


def part_name(rank: int) -> str:
    """Name the part that a trainer rank stages."""
    return f"rank-{rank:05d}"


def shard_file(part: str) -> str:
    """Return the path of a part's file in a checkpoint folder."""
    return f"actor/weights_{part}.safetensors"


INDEX = "index.json"
"""In a version's folder: what readers in the run need. Missing once none needs the version."""

HISTORY = "history.json"
"""Likewise of a version of a history: what leads to it for good, and its digest."""


def version_folder(root: Path, version: tuple[int, int]) -> Path:
    """Return the folder of a version below that of all deltas."""
    return root / f"{version[0]}-{version[1]}"


def delta_file(part: str, start: tuple[int, int]) -> str:
    """Return the name of a part's delta, in the folder of the version that it leads to from `start`."""
    return f"{part}-from-{start[0]}-{start[1]}.delta"
