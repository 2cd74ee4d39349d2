"""Client of the node agent, and what travels between it and its callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trinity_sync.actors.calls import Call
from trinity_sync.actors.client import RayClient
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.protocol.versions import Lease, Version

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from trinity_sync.weights.digests import RowDigests
    from trinity_sync.weights.layout import PartLayout
    from trinity_sync.weights.shard_file import Extent


class Coordinator(Protocol):
    """Through whom an agent saves: `CheckpointCoordinator`."""

    def save_sync(
        self, save_fn: Callable[[], object], global_step: int, *, part: str | None = None, queues: bool = False
    ) -> None:
        """Take a turn, run `save_fn`, report."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What an agent has made.

    Attributes:
        paths: slot -> part -> file.
        notes: sentences that the user should read, such as a fallback from shared memory.
    """

    paths: Mapping[int, Mapping[str, str]]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A rank's part of a full checkpoint, as it hands it over.

    Attributes:
        part: the part's name, such as ``"rank-00000"``.
        step: the checkpoint's step.
        folder: the step's staging folder.
        files: of each file its path below `folder`, and where its holes are filled from; one without holes is complete.
    """

    part: str
    step: int
    folder: str
    files: Sequence[tuple[str, Sequence[Extent]]]


class AgentClient(RayClient):
    """See `trinity_sync.sync.node_agent.NodeAgent`, of which each method here has one.

    Args:
        handle: Ray's handle of the agent.
        node: Ray's id of its node.
    """

    def __init__(self, handle: ActorHandle, node: str) -> None:
        super().__init__(handle, f"the agent of node {node}")
        self.node = node

    # -- slots

    def register(
        self, layouts: Mapping[str, PartLayout], make_coordinator: Callable[[], Coordinator] | None = None
    ) -> Call[Slots]:
        """Have it make the slots for the node's parts."""
        return self._call("make its slots", "register", dict(layouts), make_coordinator)

    def part_staged(self, version: Version, slot: int, part: str, blocked_s: float = 0.0) -> Call[None]:
        """Say that a rank has filled its segment of a slot, for which it stood still so long."""
        return self._call(f"take {part} of version {version}", "part_staged", version, slot, part, blocked_s)

    def part_failed(self, version: Version, part: str, error: str) -> None:
        """Say that a rank could not fill its segment."""
        self._tell("part_failed", version, part, error)

    # -- versions

    def contribute(self, version: Version, node: str, rows: RowDigests | None) -> Call[None]:
        """Give the lead agent the row digests of a node."""
        return self._call(f"digest version {version}", "contribute", version, node, rows)

    def tensor_digests(self, version: Version) -> Call[dict[str, bytes]]:
        """Ask the lead agent for the digests (tensor name -> 16 bytes) of a version that is in a slot."""
        return self._call(f"tell the digests of version {version}", "tensor_digests", version)

    def layout(self, part: str) -> Call[PartLayout]:
        """Ask how a part is laid out."""
        return self._call(f"describe {part}", "layout", part)

    def share(self, version: Version, slot: int, part: str) -> Call[list[ObjectRef[np.ndarray]]]:
        """Ask for a copy of a staged part in Ray's object store, for readers on other nodes: [reference to it]."""
        return self._call(f"hand out {part}", "share", version, slot, part)

    def write(
        self, version: Version, slot: int, folder: str, metadata: Mapping[str, str], *, fsync: bool
    ) -> Call[list[FileTuple]]:
        """Have it write the node's parts of a slot as shard files below a folder; the answer is (path in it, bytes,
        xxh3_128 hex) of each.
        """
        return self._call(f"write version {version}", "write", slot, folder, dict(metadata), fsync)

    # -- full checkpoints

    def save_published(self, step: int, folder: str, part: str, lease: Lease) -> None:
        """Have it write the node's parts of a leased version into a checkpoint's staging folder, and report `part`."""
        self._tell("save_published", step, folder, part, lease)

    def restore_published(self, version: Version, slot: int, folder: str) -> Call[None]:
        """Have it fill a slot with what `save_published` wrote."""
        return self._call(f"restore version {version}", "restore_published", version, slot, folder)

    def reserve_state(self, part: str, nbytes: int) -> Call[tuple[str, list[str]]]:
        """Ask for the file into which a rank copies its training state, and for what the user should know of it."""
        return self._call("make room for the training state", "reserve_state", part, nbytes)

    def take_state(self, given: StatePart) -> Call[None]:
        """Make it the writer of a rank's part; answered when the rank need not live any more."""
        return self._call(f"take over the state of step {given.step}", "take_state", given)

    def wait_state_written(self, part: str, timeout_s: float, *, hurry: bool = False) -> Call[None]:
        """Wait until a part's segment may be used again; `hurry` where training waits, too."""
        return self._call(f"write the state of {part}", "wait_state_written", part, timeout_s, hurry)

    # -- about itself

    def memory(self) -> Call[dict[str, int]]:
        """Ask for the peak resident bytes of its process, shared slots included."""
        return self._call("tell its memory", "memory")

    def close(self) -> Call[None]:
        """Have it give the shared memory back."""
        return self._call("give its memory back", "close")
