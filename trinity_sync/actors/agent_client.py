"""Client of the node agent, and what travels between it and its callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.sync.node_agent import NodeAgent
    from trinity_sync.weights.shard_file import Extent
else:
    NodeAgent = MethodNames()


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
    """Client of a node agent.

    Args:
        handle: Ray's handle of the agent.
        node: Ray's id of its node.
    """

    def __init__(self, handle: ActorHandle, node: str) -> None:
        super().__init__(handle, f"the agent of node {node}")
        self.node = node

    register = RemoteMethod(NodeAgent.register, "make its slots")
    part_staged = RemoteMethod(NodeAgent.part_staged, "take {2} of version {0}")
    part_failed = RemoteMethod(NodeAgent.part_failed, "give up {1} of version {0}")

    contribute = RemoteMethod(NodeAgent.contribute, "digest version {0}")
    tensor_digests = RemoteMethod(NodeAgent.tensor_digests, "tell the digests of version {0}")
    layout = RemoteMethod(NodeAgent.layout, "describe {0}")
    share = RemoteMethod(NodeAgent.share, "hand out {2}")
    write = RemoteMethod(NodeAgent.write, "write slot {0} into {1}")

    save_published = RemoteMethod(NodeAgent.save_published, "write the explorers' version of step {0}")
    restore_published = RemoteMethod(NodeAgent.restore_published, "restore version {0}")
    reserve_state = RemoteMethod(NodeAgent.reserve_state, "make room for the training state")
    take_state = RemoteMethod(NodeAgent.take_state, "take over the state of step {0.step}")
    wait_state_written = RemoteMethod(NodeAgent.wait_state_written, "write the state of {0}")

    memory = RemoteMethod(NodeAgent.memory, "tell its memory")
    close = RemoteMethod(NodeAgent.close, "give its memory back")
