"""What a sender and its receivers say to each other over their link."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_sync.weights.layout import PartLayout

Source = tuple[int, int, int] | str | None
"""Where a bucket's bytes are: in memory (pid, descriptor, inode), in a file (path), or on their way over the group."""


@dataclass(frozen=True)
class Hello:
    """A receiver connects.

    Attributes:
        index: which.
    """

    index: int


@dataclass(frozen=True)
class Bucket:
    """A bucket is there, or on its way.

    Attributes:
        number: counted from 0.
        layout: what lies where in it.
        digest: xxh3_128 of its bytes (16 bytes).
        source: where they are.
    """

    number: int
    layout: PartLayout
    digest: bytes
    source: Source


@dataclass(frozen=True)
class Working:
    """The sender goes on with something that takes its time; there is nothing to read yet."""


@dataclass(frozen=True)
class End:
    """All buckets were sent.

    Attributes:
        step: the trainer's global step, of which the weights are; None: verl did not say.
        buckets: how many.
        tensors: how many are in them.
        digest: of the version; None: it was not computed, or the sender does not hold all of it.
    """

    step: int | None
    buckets: int
    tensors: int
    digest: str | None


@dataclass(frozen=True)
class Taken:
    """A receiver has a bucket, and all before it, in memory of its own.

    Attributes:
        number: of the bucket.
    """

    number: int


@dataclass(frozen=True)
class Done:
    """A receiver has handed on the whole version.

    Attributes:
        digest: of what it has received; None: it was not computed.
        nbytes: of all buckets that it has received, from all senders.
    """

    digest: str | None
    nbytes: int


@dataclass(frozen=True)
class Failed:
    """Who says this gives the version up.

    Attributes:
        why: in words.
    """

    why: str


FromSender = Bucket | Working | End | Failed
FromReceiver = Taken | Done | Failed
