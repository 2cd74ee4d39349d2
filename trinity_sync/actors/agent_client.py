"""Client of the node agent, and the messages of its calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod
from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

    from trinity_sync.sync.node_agent import NodeAgent
    from trinity_sync.weights.shard_file import Extent
else:
    NodeAgent = MethodNames()


class Coordinator(Protocol):
    """The part of `CheckpointCoordinator` that an agent uses to save."""

    def save_sync(
        self, save_fn: Callable[[], object], global_step: int, *, part: str | None = None, queues: bool = False
    ) -> None:
        """Take a turn, run `save_fn`, report."""
        ...


C = TypeVar("C", bound=Coordinator, covariant=True)


@dataclass(frozen=True)
class FolderCoordinators(Generic[C]):
    """The coordinators of one process: of the checkpoint folder, and of the states in memory, which lie in a folder of
    their own.
    """

    checkpoints: C
    memory: C | None = None
    memory_root: str = ""

    def of(self, folder: str | os.PathLike[str]) -> C:
        """Return the coordinator of a staging folder."""
        return self.memory if self.memory is not None and self.is_memory(folder) else self.checkpoints

    def is_memory(self, folder: str | os.PathLike[str]) -> bool:
        """Return whether a staging folder is in memory."""
        return self.memory is not None and Path(folder).is_relative_to(self.memory_root)

    def all(self) -> list[C]:
        return [self.checkpoints, *([] if self.memory is None else [self.memory])]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of a node."""

    paths: Mapping[int, Mapping[str, str]]  # slot -> part -> file
    notes: Sequence[str]  # sentences for the user, such as a fallback from shared memory


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A rank's part of a full checkpoint, handed over to the agent."""

    part: str  # such as "rank-00000"
    step: int
    folder: str  # the step's staging folder
    files: Sequence[tuple[str, Sequence[Extent]]]  # path below `folder`, sources of the holes; no holes: complete


class WrittenDelta(NamedTuple):
    """A part's delta that an agent has written, or keeps."""

    part: str
    start: Version  # that it leads from
    nbytes: int
    codec: str
    changed: Mapping[str, int]  # of its elements, by `layer_group`
    elements: Mapping[str, int]


class SharedDelta(NamedTuple):
    """A delta of a part that an agent keeps in Ray's object store."""

    start: Version
    nbytes: int
    reference: ray.ObjectRef | None  # None: told to members that receive it from others


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
    reserve = RemoteMethod(NodeAgent.reserve, "make slots for the parts of other nodes")
    bring = RemoteMethod(NodeAgent.bring, "bring {0}")
    source = RemoteMethod(NodeAgent.source, "name a source of {2} of version {0}")
    write = RemoteMethod(NodeAgent.write, "write slot {0} into {1}")

    encode_deltas = RemoteMethod(NodeAgent.encode_deltas, "make the deltas of version {0}")
    encode_from_base = RemoteMethod(NodeAgent.encode_from_base, "make the deltas from version {1}")
    forget_deltas = RemoteMethod(NodeAgent.forget_deltas, "free what it keeps for deltas")
    share_deltas = RemoteMethod(NodeAgent.share_deltas, "hand out the deltas of version {0}")

    save_published = RemoteMethod(NodeAgent.save_published, "write the explorers' version of step {0}")
    restore_published = RemoteMethod(NodeAgent.restore_published, "restore version {0}")
    reserve_state = RemoteMethod(NodeAgent.reserve_state, "make room for the training state")
    take_state = RemoteMethod(NodeAgent.take_state, "take over the state of step {0.step}")
    wait_state_written = RemoteMethod(NodeAgent.wait_state_written, "write the state of {0}")

    memory = RemoteMethod(NodeAgent.memory, "tell its memory")
    close = RemoteMethod(NodeAgent.close, "give its memory back")
