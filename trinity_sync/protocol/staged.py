"""What readers need to know of a staged part. Apart from the agent, so that the synchronizer's process stays small."""

from __future__ import annotations

from dataclasses import dataclass


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
