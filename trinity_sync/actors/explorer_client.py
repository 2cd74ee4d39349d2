"""Client of an explorer, and what travels between it and its callers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod
from trinity_sync.actors.rank_client import receivers
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.explorer.actor import Explorer
    from trinity_sync.samples.batch import SampleBatch
else:
    Explorer = MethodNames()


Beside = tuple[tuple[float, "LoadReport"], ...]
"""Loads while samples were made: seconds after that began, and the load."""


LOAD_TRIES = 3
"""Loads in a row that may fail before an explorer, or what a version was to be loaded for, is taken for lost."""


class LoadFailed(RunError):  # noqa: N818 - it says what happened
    """The explorer could not take the newest version, and holds none until a load succeeds.

    Args:
        why: in words.
        load: the load that came before what it was doing, where one did.
        beside: those that came while it did that.
    """

    def __init__(self, why: str, load: LoadReport | None = None, beside: Beside = ()) -> None:
        super().__init__(why, load, beside)
        self.load, self.beside = load, beside

    def __str__(self) -> str:
        return str(self.args[0])

    def after(self, load: LoadReport | None, beside: Iterable[tuple[float, LoadReport]]) -> LoadFailed:
        """The same, with the loads that had gone well."""
        return LoadFailed(str(self), load, tuple(beside))


class EngineDied(RunError):  # noqa: N818 - it says what happened
    """A process of the explorer's engine is gone. The explorer can do nothing any more and ends with it, as a run knows
    what to do about explorers that died.
    """


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What an explorer tells of a load.

    Attributes:
        explorer: the explorer's name.
        version: the version that it holds now.
        digest: the digest of what it holds, computed from that; None where `sync.verify` is not ``full``.
        bytes_moved: payload that was applied.
        total_s: seconds from the call to the last check.
        paused_s: seconds in which it held no version and refused to generate.
        peak_rss: peak resident bytes of its process.
        began: when it was asked, in Unix seconds by the clock of who asked; None where nobody says.
        base: digest of the base that the version, an adapter, is held upon; None: the version is whole.
    """

    explorer: str
    version: Version
    digest: str | None
    bytes_moved: int
    total_s: float
    paused_s: float
    peak_rss: int
    began: float | None = None
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class Generated:
    """When an explorer made samples, by the clock of who asked.

    Attributes:
        explorer: the explorer's name.
        step: the step for whose prompts it was asked; the first of several.
        version: the step of the version that it held.
        began: Unix seconds.
        total_s: seconds until the samples were there.
    """

    explorer: str
    step: int
    version: int
    began: float
    total_s: float


@dataclass(frozen=True)
class Produced:
    """Samples of whole groups, and how versions came in.

    Attributes:
        batch: the samples.
        load: what came before them, where a load did.
        beside: loads while they were made.
        failed: why a version could not be taken meanwhile, where the one before it was held still.
    """

    batch: SampleBatch
    load: LoadReport | None
    beside: Beside = ()
    failed: str | None = None


class ExplorerProcess(TypedDict):
    """Which process an explorer is: its pid, Ray's id of its node, its engine's `base_digest`, and whether that has
    something to `close`.
    """

    pid: int
    node: str
    base: str | None
    closes: bool


class ExplorerClient(RayClient):
    """Client of an explorer.

    Args:
        handle: Ray's handle of the explorer.
        name: the explorer's name, such as ``"explorer-0"``.
        processes: how many of its processes receive weights.

    Attributes:
        receivers: names of these processes.
    """

    def __init__(self, handle: ActorHandle, name: str, processes: int = 1) -> None:
        super().__init__(handle, name)
        self.receivers = receivers(name, processes)

    warm_up = RemoteMethod(Explorer.warm_up, "import its engine")
    start = RemoteMethod(Explorer.start, "start")
    attach = RemoteMethod(Explorer.attach, "attach to the node agents")
    load = RemoteMethod(Explorer.load, "load version {0}")
    generate = RemoteMethod(Explorer.generate, "generate for step {0}")
    produce = RemoteMethod(Explorer.produce, "generate")
    memory = RemoteMethod(Explorer.memory, "tell its memory")
    close = RemoteMethod(Explorer.close, "end its engine")
