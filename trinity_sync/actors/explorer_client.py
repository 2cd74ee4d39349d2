"""Client of an explorer, and the messages of its calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod
from trinity_sync.actors.rank_client import receivers
from trinity_sync.errors import ProcessLoss, RunError
from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.explorer.actor import Explorer
    from trinity_sync.samples.batch import SampleBatch
else:
    Explorer = MethodNames()


Beside = tuple[tuple[float, "LoadReport"], ...]
"""Loads during the generation of samples: seconds from its start to the load, and the load."""


LOAD_TRIES = 3
"""Failed loads in a row after which the explorer, or the task of the load, is given up."""


class LoadError(RunError):
    """The explorer could not load the newest version, and holds none until a load succeeds.

    Args:
        why: the reason.
        load: the load before its current work, if there was one.
        beside: the loads during that work.
        lost: the cause is a `ProcessLoss`. An error's `__cause__` does not travel between processes.
    """

    def __init__(self, why: str, load: LoadReport | None = None, beside: Beside = (), lost: bool = False) -> None:
        super().__init__(why, load, beside, lost)
        self.load, self.beside, self.lost = load, beside, lost

    def __str__(self) -> str:
        return str(self.args[0])

    def after(self, load: LoadReport | None, beside: Iterable[tuple[float, LoadReport]]) -> LoadError:
        """Return the same error with the loads that had succeeded."""
        return LoadError(str(self), load, tuple(beside), self.lost)


class EngineDeathError(ProcessLoss):
    """A process of the explorer's engine has died. The explorer ends too, so that the run replaces it."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A load, as the explorer reports it."""

    explorer: str
    version: Version
    digest: str | None  # computed from the loaded weights; None unless `sync.verify` is full
    bytes_moved: int
    total_s: float  # from the call to the last check
    paused_s: float  # without a version, and so without generation
    peak_rss: int  # of its process, bytes
    apply_s: float = 0.0  # that deltas took to apply
    began: float | None = None  # time of the call by the caller's clock, Unix seconds
    base: str | None = None  # digest of an adapter's base; None: the version is whole
    fault: str | None = None  # errors on the way that were overcome, such as damaged bytes; None: there were none


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The times of a generation by the caller's clock."""

    explorer: str
    step: int  # of the prompts; the first of several
    version: int  # step of the version that it held
    began: float  # Unix seconds
    total_s: float


@dataclass(frozen=True)
class Production:
    """Samples of whole groups, and the loads of versions."""

    batch: SampleBatch
    load: LoadReport | None  # before the generation
    beside: Beside = ()  # during the generation
    failed: str | None = None  # error of a load that left the earlier version in place


class ExplorerProcess(TypedDict):
    """The process of an explorer."""

    pid: int
    node: str  # Ray's id
    base: str | None  # the engine's `base_digest`
    closes: bool  # the engine has resources to `close`


class ExplorerClient(RayClient):
    """Client of an explorer.

    Args:
        handle: Ray's handle of the explorer.
        name: the explorer's name, such as ``"explorer-0"``.
        processes: number of its processes that receive weights.

    Attributes:
        receivers: names of these processes.
    """

    def __init__(self, handle: ActorHandle, name: str, processes: int = 1) -> None:
        super().__init__(handle, name)
        self.receivers = receivers(name, processes)

    warm_up = RemoteMethod(Explorer.warm_up, "import its engine")
    start = RemoteMethod(Explorer.start, "start")
    leave = RemoteMethod(Explorer.leave, "leave the attempt")
    rejoin = RemoteMethod(Explorer.rejoin, "join the next attempt")
    attach = RemoteMethod(Explorer.attach, "attach to the node agents")
    load = RemoteMethod(Explorer.load, "load version {0}")
    generate = RemoteMethod(Explorer.generate, "generate for step {0}")
    produce = RemoteMethod(Explorer.produce, "generate")
    memory = RemoteMethod(Explorer.memory, "tell its memory")
    close = RemoteMethod(Explorer.close, "end its engine")
