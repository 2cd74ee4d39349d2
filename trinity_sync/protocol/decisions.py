"""What the book of commits decides; whoever feeds it carries that out. See `trinity_sync.protocol.commit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from trinity_sync.protocol.parts import FileTuple, Kind


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
