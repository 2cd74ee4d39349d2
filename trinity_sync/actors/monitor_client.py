"""Client of the checkpoint monitor, and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.actors.client import Client
from trinity_sync.actors.pending import CallTransport, Pending
from trinity_sync.protocol.parts import FileEntry, Kind

if TYPE_CHECKING:
    from ray.actor import ActorHandle

MONITOR = "checkpoint_monitor"
"""Name of the actor in a run's Ray namespace."""

EventLine = dict[str, object]
"""Something that happened, as ``events.jsonl`` has it: `event`, `time`, `attempt`, and the fields of its kind."""


class PrunedStep(TypedDict):
    """A checkpoint that retention removed."""

    step: int
    reason: str
    freed_bytes: int


class Committed(TypedDict):
    """A commit.

    `written_s` (until all parts were in) and `total_s` count from when the save was first heard of; `path` is that
    of the folder, None without a checkpoint folder; `beside`: these weights lie beside the step's folder, whose place
    was taken; `pruned`: after it; `base`: digest of the base of an adapter, None where weights are whole.
    """

    step: int
    attempt: int
    kind: Kind
    digest: str | None
    bytes: int
    written_s: float
    total_s: float
    path: str | None
    beside: bool
    pruned: list[PrunedStep]
    base: str | None


class Facts(TypedDict):
    """What the monitor was made with."""

    root: str | None
    attempt: int
    fsync: bool
    save_strategy: str
    roles: list[str]
    pid: int


class StepReport(TypedDict):
    """Where a step stands; `missing` is for people, `awaited` the names of announced parts that are not in."""

    state: str
    committed: Kind | None
    error: str | None
    missing: list[str]
    awaited: list[str]


class MonitorClient(Client):
    """See `trinity_sync.checkpoint.CheckpointMonitor`, of which each method here has one; `attempt` is the run's, None
    stands for the monitor's.

    Args:
        handle: of the monitor: Ray's, or that of one in a local process.
    """

    def __init__(self, handle: ActorHandle | CallTransport) -> None:
        super().__init__(handle, "the checkpoint monitor")

    # -- a checkpoint

    def begin(
        self,
        step: int,
        attempt: int | None,
        kind: Kind,
        parts: Sequence[str],
        meta: Mapping[str, object] | None = None,
        *,
        weights_parts: Collection[str] = (),
        durable: bool | None = None,
    ) -> Pending[str]:
        """Announce a checkpoint; the answer is its staging folder, which exists."""
        return self._call(
            f"begin step {step}",
            "begin",
            step,
            attempt,
            kind,
            list(parts),
            meta,
            weights_parts=tuple(weights_parts),
            durable=durable,
        )

    def monitor_step(self, step: int, *, weights: bool, attempt: int | None) -> Pending[None]:
        """Have the step committed, as weights only or in full, as soon as its parts are in."""
        return self._call(f"take step {step} as one to commit", "monitor_step", step, weights, attempt=attempt)

    def register_thread_count(
        self, step: int, *, state_dict_thread_count: int, checkpoint_thread_count: int, attempt: int | None
    ) -> Pending[None]:
        """Add to the numbers of parts that the step waits for."""
        counts = {
            "state_dict_thread_count": state_dict_thread_count,
            "checkpoint_thread_count": checkpoint_thread_count,
        }
        return self._call(
            f"register the parts of step {step}", "register_thread_count", step, attempt=attempt, **counts
        )

    def announce(self, step: int, parts: Sequence[str], *, weights: bool, attempt: int | None) -> Pending[None]:
        """Name parts that are going to be saved; the step is not committed without them."""
        what = f"wait for {len(parts)} parts of step {step}"
        return self._call(what, "announce", step, list(parts), weights=weights, attempt=attempt)

    def wait_committed(
        self, step: int, attempt: int | None, timeout_s: float, *, kind: Kind | None
    ) -> Pending[Committed]:
        """Wait until the step is committed, its trackers have moved and retention has run."""
        return self._call(f"commit step {step}", "wait_committed", step, attempt, timeout_s, kind=kind)

    def finish_saves(self, timeout_s: float) -> Pending[None]:
        """Wait until what is being saved now is committed; for a program that a signal ends."""
        return self._call("commit what is being saved", "finish_saves", timeout_s)

    def fail_step(self, step: int, error: str, *, attempt: int | None) -> Pending[None]:
        """Give a step up, whatever its parts say."""
        return self._call(f"give step {step} up", "fail_step", step, error, attempt)

    def status(self, step: int) -> Pending[StepReport]:
        """Ask where a step stands."""
        return self._call(f"say how step {step} went", "status", step)

    def has_part(self, step: int, part: str, *, attempt: int | None) -> Pending[bool]:
        """Ask whether the part is in."""
        what = f"say whether {part} of step {step} is saved"
        return self._call(what, "has_part", step, part, attempt=attempt)

    def prune(self, keep_last: int | None = None) -> Pending[list[PrunedStep]]:
        """Run retention now; the answer is what was deleted."""
        return self._call("delete what is not kept", "prune", keep_last)

    # -- a part

    def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int,
        part: str | None,
        weights: bool,
        attempt: int | None,
        ticket: str,
        life: str,
        collective: bool,
        timeout_s: float,
    ) -> Pending[None]:
        """Say that a save is about to write, and wait until the save strategy lets it."""
        return self._call(
            f"give a save of step {step} its turn",
            "notify_started",
            node_id,
            job_id,
            step=step,
            part=part,
            weights=weights,
            attempt=attempt,
            ticket=ticket,
            life=life,
            collective=collective,
            timeout_s=timeout_s,
        )

    def notify_finished(
        self,
        step: int,
        *,
        weights: bool = False,
        part: str | None,
        attempt: int | None,
        files: Sequence[FileEntry] | None,
        digest: str | None = None,
        ticket: str | None = None,
    ) -> Pending[None]:
        """Say that a part is written.

        Args:
            files: the files that make the part; None: not said, the monitor takes what it finds.
            digest: the digest of the version, with the part that brings it.
        """
        return self._call(
            f"take {'a part' if part is None else f'part {part!r}'} of step {step}",
            "notify_finished",
            step,
            weights,
            part=part,
            attempt=attempt,
            files=files,
            digest=digest,
            ticket=ticket,
        )

    def notify_failed(
        self, step: int, part: str | None, error: str, *, attempt: int | None, ticket: str
    ) -> Pending[None]:
        """Say that a part could not be written: nothing of the step is committed any more."""
        what = f"take note of a failed part of step {step}"
        return self._call(what, "notify_failed", step, part, error, attempt=attempt, ticket=ticket)

    def notify_beside(self, step: int, *, attempt: int | None) -> Pending[None]:
        """Say that what verl's trainer writes itself, beside the files of its engines, is there."""
        what = f"take what lies beside the engines' files of step {step}"
        return self._call(what, "notify_beside", step, attempt=attempt)

    def notify_handed_over(self, ticket: str, step: int) -> Pending[None]:
        """Say that another writer answers for the part from now on."""
        return self._call(f"let a part of step {step} go", "notify_handed_over", ticket, step)

    # -- a writer

    def lifeline(self, node_id: str, job_id: str, life: str) -> Pending[None]:
        """Make a call that is not answered while the writer lives; see `watch`."""
        return self._call(f"let the writer {job_id} be watched", "lifeline", node_id, job_id, life)

    def watch(self, node_id: str, job_id: str, life: str, owned: Sequence[object]) -> Pending[None]:
        """Have the writer's death noticed; `owned`: of its call of `lifeline`."""
        return self._call(f"watch the writer {job_id}", "watch", node_id, job_id, life, list(owned))

    # -- the run

    def drain_events(self) -> Pending[list[EventLine]]:
        """Fetch what happened since the last call, but for commits: those are the answers of `wait_committed`."""
        return self._call("tell its events", "drain_events")

    def wait_mirrored(self, timeout_s: float) -> Pending[dict[int, str]]:
        """Wait until nothing is on its way to the mirror, or the time is over; answers what is not there, and why."""
        return self._call("copy what is on its way to the mirror", "wait_mirrored", timeout_s)

    def describe(self) -> Pending[Facts]:
        """Ask what it was made with."""
        return self._call("say where checkpoints go", "describe")

    def memory(self) -> Pending[dict[str, int]]:
        """Ask for the peak resident bytes of its process."""
        return self._call("tell its memory", "memory")
