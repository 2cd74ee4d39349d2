"""Client of the checkpoint monitor, and the types of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.client import Client, MethodNames, RemoteMethod
from trinity_sync.actors.pending import CallChannel
from trinity_sync.protocol.parts import Kind
from trinity_sync.tracking.events import CommitEvent, Event, PruneEvent

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.checkpoint.monitor import CheckpointMonitor
else:
    CheckpointMonitor = MethodNames()

MONITOR = "checkpoint_monitor"
"""Name of the actor in a run's Ray namespace."""

EventLine = Mapping[str, object]
"""Something that happened, as ``events.jsonl`` has it: `event`, `time`, `attempt`, and the fields of its kind."""


class PrunedStep(TypedDict):
    """A checkpoint that retention removed."""

    step: int
    reason: str
    freed_bytes: int


class CommitReport(TypedDict):
    """A commit. Times count from the first call about the save."""

    step: int
    attempt: int
    kind: Kind
    digest: str | None
    bytes: int
    written_s: float  # until all parts were complete
    total_s: float
    path: str | None  # the folder; None without a checkpoint folder
    beside: bool  # the step's folder existed, and these weights are next to it
    pruned: list[PrunedStep]  # deleted after the commit
    base: str | None  # digest of an adapter's base; None: the weights are whole


def commit_events(commit: CommitReport, blocked_s: float | None = None, began: float | None = None) -> list[Event]:
    """Return the events of a commit and of the deletions after it. Weights beside the step's folder are not a
    checkpoint of the run, and have no event.

    Args:
        blocked_s: seconds in which training was blocked.
        began: begin of the save, in Unix seconds.
    """
    pruned: list[Event] = [  # a user's monitor may say more of each
        PruneEvent(step=one["step"], reason=one["reason"], freed_bytes=one["freed_bytes"]) for one in commit["pruned"]
    ]
    if commit["beside"]:
        return pruned
    committed = CommitEvent(
        step=commit["step"],
        kind=commit["kind"],
        digest=commit["digest"],
        bytes=commit["bytes"],
        blocked_s=blocked_s,
        written_s=commit["written_s"],
        total_s=commit["total_s"],
        began=began,
        base=commit["base"],
    )
    return [committed, *pruned]


class Facts(TypedDict):
    """The monitor's settings and process."""

    root: str | None
    attempt: int
    fsync: bool
    save_strategy: str
    roles: list[str]
    pid: int


class StepReport(TypedDict):
    """The state of a step."""

    state: str
    committed: Kind | None  # by any attempt
    own: Kind | None  # by the monitor's attempt
    error: str | None
    missing: list[str]  # in words
    awaited: list[str]  # announced parts that are not complete


class MonitorClient(Client):
    """Client of the checkpoint monitor.

    Args:
        handle: Ray's handle of the monitor, or that of a monitor in a local process.
    """

    def __init__(self, handle: ActorHandle | CallChannel) -> None:
        super().__init__(handle, "the checkpoint monitor")

    begin = RemoteMethod(CheckpointMonitor.begin, "begin step {0}")
    monitor_step = RemoteMethod(CheckpointMonitor.monitor_step, "take step {0} as one to commit")
    register_thread_count = RemoteMethod(CheckpointMonitor.register_thread_count, "register the parts of step {0}")
    announce = RemoteMethod(CheckpointMonitor.announce, "wait for parts of step {0}")
    wait_committed = RemoteMethod(CheckpointMonitor.wait_committed, "commit step {0}")
    finish_saves = RemoteMethod(CheckpointMonitor.finish_saves, "commit what is being saved")
    fail_step = RemoteMethod(CheckpointMonitor.fail_step, "give step {0} up")
    status = RemoteMethod(CheckpointMonitor.status, "say how step {0} went")
    has_part = RemoteMethod(CheckpointMonitor.has_part, "say whether {1} of step {0} is saved")
    prune = RemoteMethod(CheckpointMonitor.prune, "delete what is not kept")

    notify_started = RemoteMethod(CheckpointMonitor.notify_started, "give a save of step {step} its turn")
    notify_finished = RemoteMethod(CheckpointMonitor.notify_finished, "take part {part!r} of step {0}")
    notify_failed = RemoteMethod(CheckpointMonitor.notify_failed, "take note of a failed part of step {0}")
    notify_beside = RemoteMethod(
        CheckpointMonitor.notify_beside, "take what lies beside the engines' files of step {0}"
    )
    notify_handed_over = RemoteMethod(CheckpointMonitor.notify_handed_over, "let a part of step {1} go")

    lifeline = RemoteMethod(CheckpointMonitor.lifeline, "let the writer {1} be watched")
    watch = RemoteMethod(CheckpointMonitor.watch, "watch the writer {1}")

    drain_events = RemoteMethod(CheckpointMonitor.drain_events, "tell its events")
    wait_mirrored = RemoteMethod(CheckpointMonitor.wait_mirrored, "copy what is on its way to the mirror")
    describe = RemoteMethod(CheckpointMonitor.describe, "say where checkpoints go")
    memory = RemoteMethod(CheckpointMonitor.memory, "tell its memory")
