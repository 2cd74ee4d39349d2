"""`CheckpointMonitor`: the named Ray actor that commits checkpoints, moves the trackers, runs retention. One per run.

A shell over `trinity_sync.protocol.commit.CommitBook`, which decides, and `trinity_sync.checkpoint.execution`, which
carries out what was decided. Control plane only: it sees paths, sizes and digests, never tensors, and loads neither
torch nor verl.

Who calls what, for one checkpoint of a run:

1. the driver: `begin` with the names of all parts; it gets the staging folder, which exists now;
2. every rank, per part, through its `CheckpointCoordinator`: `notify_started`, then `notify_finished` or
   `notify_failed`;
3. the driver: `notify_finished(step, part="digest", digest=...)` when the version digest is known, if it named it;
4. the driver: `wait_committed`, which returns after the trackers have moved and retention has run.

Programs written for the seed's monitor use counts in place of 1: `register_thread_count` and `monitor_step`. Every call
may be repeated (Ray does so after a restart of the actor) without counting twice. What is being saved is noted beside
the staging folder, so an actor that was killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from trinity_sync.checkpoint.changes import Changes
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.event_log import EventLog
from trinity_sync.checkpoint.execution import Execution
from trinity_sync.checkpoint.lock import holder
from trinity_sync.checkpoint.mirror.process import MirrorSettings
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.memory import peak_rss
from trinity_sync.host.process import own_log, small_actor
from trinity_sync.host.urls import absolute
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.files import FileEntry
from trinity_sync.protocol.parts import FULL, STATE_DICT, FileTuple, Kind
from trinity_sync.protocol.retention import KeepLast, Policy, make_policies
from trinity_sync.protocol.turns import SAVE_STRATEGIES

ACTOR_NAME = "checkpoint_monitor"

_TICK_S = 0.5
_MAX_EVENTS = 10_000
#: Waits of ranks and driver that the actor holds at a time.
_MAX_CALLS = 16_384
#: After a restart, a writer that does not show up again within this time died meanwhile.
_REATTACH_S = 10.0

# An actor that is not detached ends when the handle its creator holds is gone, so the handles are kept here.
_created: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Settings of the actor.

    Args:
        attempt: the run's attempt; reports for another one are refused.
        policies: retention, as policies, or as a map of name to fields for those of ours. Empty: keep all.
        keep_state_dicts: how many of the newest state-dict folders stay.
        timeout_s: a step of which nothing is heard for so long has failed; also the limit of waits that name none.
        fsync: whether commits are made durable.
        mirror: how checkpoints are copied to `default_hdfs_dir`.
        log_dir: where the actor's log goes; None: where Ray puts it.
        roles: places in a step's folder without which no full checkpoint is committed, for savers that are several
            engines (``actor``, ``critic``); those announce themselves. Empty: what is announced is all that there is.
        holder: of the checkpoint folder, filled in by `get_actor`; the actor does nothing for another one.
    """

    attempt: int = 0
    policies: Mapping[str, Mapping[str, Any] | None] | Sequence[Policy] = field(default_factory=dict)
    keep_state_dicts: int = 2
    timeout_s: float = 1800.0
    fsync: bool = True
    mirror: MirrorSettings = field(default_factory=MirrorSettings)
    log_dir: str | None = None
    holder: str | None = None
    roles: Sequence[str] = ()


class CheckpointMonitor:
    """The actor's body; `get_actor` is the way to it. All methods but that one are called with ``.remote``.

    Args:
        save_strategy: one of `trinity_sync.protocol.turns.SAVE_STRATEGIES`.
        default_local_dir: the checkpoint folder, shared by all nodes. None: parts are counted, nothing is written.
        default_hdfs_dir: where committed full checkpoints are copied to: a path, or a URL that fsspec knows; None:
            nowhere. A copy that fails is a ``fault`` event, never a reason for a save to fail.
        config: the rest.
        clock: Unix seconds.
    """

    @classmethod
    def get_actor(
        cls,
        namespace: str,
        save_strategy: str | None = None,
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
        *,
        config: MonitorConfig | None = None,
    ) -> Any:
        """The handle of the run's monitor, which is created if it is not there.

        It lives as long as the process that created it, so let the driver be the first to call.

        Args:
            namespace: the run's Ray namespace. The other arguments matter to the first caller only; see the class.

        Raises:
            ConfigError: an unknown save strategy or retention policy.
        """
        try:
            return ray.get_actor(ACTOR_NAME, namespace=namespace)
        except ValueError:
            pass
        strategy = save_strategy or "unrestricted"
        if strategy not in SAVE_STRATEGIES:
            raise ConfigError(f"checkpoint.save_strategy is {strategy!r}; it has to be {' or '.join(SAVE_STRATEGIES)}")
        config = config or MonitorConfig()
        if isinstance(config.policies, Mapping):
            config = replace(config, policies=make_policies(config.policies))
        options = {
            "name": ACTOR_NAME,
            "namespace": namespace,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": _MAX_CALLS,
        }
        folder = str(default_local_dir) if default_local_dir is not None else None
        if folder is not None:
            config = replace(config, holder=holder(Path(folder)))
        remote = absolute(str(default_hdfs_dir)) if default_hdfs_dir is not None else None

        body = small_actor(cls, strategy, folder, remote, config)
        _created[namespace] = ray.remote(body).options(**options).remote()
        return _created[namespace]

    def __init__(
        self,
        save_strategy: str = "unrestricted",
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
        config: MonitorConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config = config or MonitorConfig()
        own_log(config.log_dir, ACTOR_NAME)
        self._clock = clock
        self._strategy = save_strategy
        self._disk = CheckpointDisk(
            root=Path(default_local_dir).absolute() if default_local_dir is not None else None,
            attempt=config.attempt,
            policies=make_policies(config.policies) if isinstance(config.policies, Mapping) else config.policies,
            keep_state_dicts=config.keep_state_dicts,
            fsync=config.fsync,
            clock=clock,
            holder=config.holder,
        )
        self._events = EventLog(config.attempt, clock)
        self._changes = Changes()
        self._watched: dict[tuple[str, str, str], asyncio.Event] = {}
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        rebuilt = self._disk.rebuild(self._make_book, restarted=restarted)
        self._book = rebuilt.book
        self._held = rebuilt.held
        for problem in rebuilt.problems:
            self._events.fault("checkpoint folder", problem)
        self._execution = Execution(self._disk, self._book, self._events, self._changes, clock)
        if default_hdfs_dir is not None and self._disk.root is not None:
            self._execution.start_mirror(default_hdfs_dir, config.mirror, resumed=not restarted and config.attempt > 0)
        self._execution.apply(rebuilt.decisions)
        self._clock_watch = asyncio.ensure_future(self._watch_clock())

    def _make_book(self, committed: list[tuple[int, int, Kind]]) -> CommitBook:
        return CommitBook(
            clock=self._clock,
            strategy=self._strategy,
            attempt=self._config.attempt,
            step_timeout_s=self._config.timeout_s,
            committed=committed,
        )

    # ---- the driver's calls

    async def begin(
        self,
        step: int,
        attempt: int | None,
        kind: Kind,
        parts: Sequence[str],
        meta: Mapping[str, Any] | None = None,
        *,
        weights_parts: Collection[str] = (),
        durable: bool | None = None,
    ) -> str:
        """Announce a checkpoint: all its parts by name, and that it is to be committed as `kind`.

        Args:
            parts: names; ``"digest"`` among them makes the commit wait for the version digest.
            meta: fields of the manifest: `backend`, `world_size`, `config_digest`, `metrics`.
            weights_parts: those that are weights; for a ``state_dict`` commit all are.
            durable: overrides `MonitorConfig.fsync` for the commit as this kind.

        Returns:
            The staging folder, into which the parts are written. It exists.

        Raises:
            RunError: the step has failed before, or all these parts are committed, or there is no checkpoint folder.
        """
        # A commit of the step's weights takes its staging folder away; the new parts get a new one afterwards.
        await self._changes.wait(
            lambda: self._book.status(step).state != "committing" and not self._execution.finishing(step),
            lambda: ("the checkpoint monitor", f"commit what is there of step {step}"),
            self._config.timeout_s,
        )
        decisions = self._book.begin(
            step, kind, parts, weights_parts=weights_parts, meta=meta, durable=durable, attempt=attempt
        )
        self._execution.apply(decisions)
        folder = await asyncio.to_thread(self._disk.prepare, step)
        await self._execution.note(step)
        return str(folder)

    async def wait_committed(
        self, step: int, attempt: int | None = None, timeout_s: float | None = None, *, kind: Kind | None = None
    ) -> dict[str, Any]:
        """Wait until the step is committed, its trackers have moved and retention has run.

        Args:
            kind: wait for the commit as this kind; None: as all that was asked for.

        Returns:
            step, kind, attempt, digest, bytes, total_s (since the step was first heard of), path of the folder, beside
            (these weights lie beside the step's folder, whose place was taken), and pruned:
            [{step, reason, freed_bytes}], what retention deleted after it.

        Raises:
            RunError: the step failed; the message says why.
            WaitTimeout: it names what is missing.
        """
        if attempt is not None and attempt != self._book.attempt:
            raise RunError(f"attempt {attempt} was asked for, but attempt {self._book.attempt} is running")
        if self._book.status(step, kind).state == "unknown":
            # It may have been committed and deleted long ago, or in an earlier life of the monitor.
            deleted = await asyncio.to_thread(self._disk.describe_deleted, step, kind)
            if deleted is not None and self._book.status(step, kind).state == "unknown":
                return deleted
        seconds = self._config.timeout_s if timeout_s is None else timeout_s
        await self._changes.wait(
            lambda: self._settled(step, kind),
            lambda: self._missing(step, kind),
            seconds,
        )
        status = self._book.status(step, kind)
        if status.state == "failed":
            raise RunError(f"the checkpoint of step {step} failed: {status.error}")
        result = self._execution.result(step, kind, status.committed, FULL)
        if result is not None:
            return result
        return await asyncio.to_thread(self._disk.describe_committed, step, kind)

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being saved, committed, copied or deleted; for the end of a run.

        Raises:
            WaitTimeout: it names the steps that are open.
        """
        await self._changes.wait(
            lambda: self._execution.idle and not self._book.open_steps(),
            lambda: ("the checkpoint monitor", f"finish; still open: {self._book.open_steps() or 'background work'}"),
            self._config.timeout_s if timeout_s is None else timeout_s,
        )

    async def retain(self, keep_last: int | None = None) -> list[dict[str, Any]]:
        """Run retention now.

        Args:
            keep_last: keep the newest so many full checkpoints, and what the configured policies keep; for programs
                that give their limit with each save. None: the configured policies alone.

        Returns:
            What was deleted: [{step, reason, freed_bytes}].
        """
        extra = () if keep_last is None else (KeepLast(keep_last),)
        pruned: list[dict[str, Any]] = [
            {"step": gone.step, "reason": gone.reason, "freed_bytes": gone.freed_bytes}
            for gone in await self._execution.retain(extra)
        ]
        for gone in pruned:
            self._events.add("prune", **gone)
        return pruned

    async def wait_mirrored(self, timeout_s: float) -> dict[int, str]:
        """Wait until nothing is on its way to the mirror, or the time is over.

        Returns:
            The steps that are not there, and why. Empty without a mirror.
        """
        return await self._execution.wait_mirrored(timeout_s)

    async def drain_events(self, *, untold: bool = False) -> list[dict[str, Any]]:
        """The events ``commit``, ``prune``, ``mirror`` and ``fault`` since the last call, oldest first.

        Those of an actor that was killed before they were drained are lost with it.

        Args:
            untold: leave out those that the caller of `wait_committed` gets anyway.
        """
        return self._events.drain(untold=untold)

    async def fail_step(self, step: int, error: str, attempt: int | None = None) -> None:
        """Give a step up, whatever its parts say."""
        self._execution.apply(self._book.failed(step, None, error, attempt=attempt))
        await self._execution.note(step)

    # ---- the seed's calls, with our additions

    async def register_thread_count(
        self,
        step: int,
        *,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        attempt: int | None = None,
    ) -> None:
        """Add to the numbers of parts that the step waits for."""
        self._execution.apply(
            self._book.register(
                step,
                weights=state_dict_thread_count,
                checkpoint=checkpoint_thread_count,
                report=_call_id(),
                attempt=attempt,
            )
        )
        await self._execution.note(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False, *, attempt: int | None = None) -> None:
        """The step is to be committed, as weights only or as a full checkpoint, as soon as its parts are in."""
        self._execution.apply(self._book.mark(step, STATE_DICT if is_state_dict else FULL, attempt=attempt))
        await self._execution.note(step)

    async def has_part(self, step: int, part: str, *, attempt: int | None = None) -> bool:
        """Whether a commit of this attempt holds the part, so that there is nothing to write for it."""
        return attempt in (None, self._book.attempt) and self._book.has(step, part)

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        part: str | None = None,
        attempt: int | None = None,
        ticket: str | None = None,
        life: str = "",
        collective: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """A save is about to write; returns when the save strategy lets it.

        Args:
            node_id, job_id: the writer's node and process.
            step, part, ticket, life: given by a `CheckpointCoordinator`, which also lets itself be watched.
            collective: it holds barriers with its peers and does not queue.

        Raises:
            RunError: the step has failed meanwhile.
            WaitTimeout: its turn did not come.
        """
        name = ticket or _call_id()
        self._execution.apply(
            self._book.started(
                name,
                node_id,
                job_id,
                step=step,
                part=part,
                life=life,
                collective=collective,
                anonymous=ticket is None,
                attempt=attempt,
            )
        )
        try:
            await self._changes.wait(
                lambda: self._book.turn(name) is not False,
                lambda: ("the checkpoint monitor", f"give the writer {job_id} its turn ({self._strategy})"),
                self._config.timeout_s if timeout_s is None else timeout_s,
            )
        except WaitTimeout:
            self._execution.apply(self._book.cancel(name))
            raise
        if self._book.turn(name) is None:
            raise RunError(f"step {step} failed before the writer {job_id} had its turn: {self._reason(step)}")
        if step is not None:
            await self._execution.note(step)

    async def notify_finished(
        self,
        step: int,
        is_state_dict: bool = False,
        *,
        part: str | None = None,
        attempt: int | None = None,
        files: Iterable[FileEntry | FileTuple] | None = None,
        digest: str | None = None,
        ticket: str | None = None,
    ) -> None:
        """A part is written.

        Args:
            is_state_dict: it is a weights part (for a part that `begin` named, what `begin` said holds).
            part: its name; None: it is only counted.
            files: what was written; None: whatever is found in the step's folder at the commit, which then is one of
                all that is saved of the step.
            digest: version digest of the weights.
            ticket: of its `notify_started`.
        """
        told = None
        if files is not None:
            told = [(entry if isinstance(entry, FileEntry) else FileEntry(*entry)).as_tuple() for entry in files]
        self._execution.apply(
            self._book.finished(
                step,
                weights=is_state_dict,
                part=part,
                report=_call_id() if ticket is None else ticket,
                files=told,
                digest=digest,
                ticket=ticket,
                attempt=attempt,
            )
        )
        await self._execution.note(step)

    async def notify_failed(
        self, step: int, part: str | None, error: str, *, attempt: int | None = None, ticket: str | None = None
    ) -> None:
        """A part could not be written: nothing of the step is committed any more."""
        self._execution.apply(self._book.failed(step, part, error, ticket=ticket, attempt=attempt))
        await self._execution.note(step)

    async def notify_handed_over(self, ticket: str, step: int) -> None:
        """Another writer answers for the part from now on; it has its turn already."""
        self._execution.apply(self._book.cancel(ticket))
        await self._execution.note(step)

    async def writer_lost(self, node_id: str, job_id: str | None = None, error: str = "its process died") -> None:
        """A writer's process (without a `job_id`: every one of the node) is gone, says somebody who knows."""
        self._execution.apply(self._book.writer_lost(node_id, job_id, error=error))

    # ---- watching the writers

    async def hold(self, node_id: str, job_id: str, life: str) -> None:
        """Never returns while the writer lives: what it would return belongs to the writer; see `watch`."""
        await self._watched.setdefault((node_id, job_id, life), asyncio.Event()).wait()

    async def watch(self, node_id: str, job_id: str, life: str, owned: list[Any]) -> None:
        """Notice the writer's death: `owned` holds the reference to its `hold` call, which fails with its owner."""
        writer = (node_id, job_id, life)
        released = self._watched.setdefault(writer, asyncio.Event())
        try:
            await owned[0]
        except RayError:
            self._execution.apply(self._book.writer_lost(node_id, job_id, life))
        finally:
            released.set()
            self._watched.pop(writer, None)

    # ---- about itself

    async def describe(self) -> dict[str, Any]:
        """root, attempt, fsync, save_strategy, roles, pid."""
        root = self._disk.root
        return {
            "root": str(root) if root is not None else None,
            "attempt": self._book.attempt,
            "fsync": self._config.fsync,
            "save_strategy": self._strategy,
            "roles": list(self._config.roles),
            "pid": os.getpid(),
        }

    async def status(self, step: int) -> dict[str, Any]:
        """Where a step stands: state, committed, error, missing."""
        status = self._book.status(step)
        return {
            "state": status.state,
            "committed": status.committed,
            "error": status.error,
            "missing": list(status.missing),
        }

    async def memory(self) -> dict[str, int]:
        """Peak resident bytes."""
        return {"peak_rss": peak_rss()}

    # ---- waiting

    async def _watch_clock(self) -> None:
        started = time.monotonic()
        restored = self._book.writers()
        while True:
            await asyncio.sleep(_TICK_S)
            self._execution.apply(self._book.tick())
            if restored and time.monotonic() - started > _REATTACH_S:
                for writer in restored - self._watched.keys():
                    self._execution.apply(
                        self._book.writer_lost(*writer, error="it died while the checkpoint monitor was away")
                    )
                restored = set()

    def _settled(self, step: int, kind: Kind | None) -> bool:
        return self._book.status(step, kind).state in ("committed", "failed") and not self._execution.finishing(step)

    def _missing(self, step: int, kind: Kind | None) -> tuple[str, str]:
        status = self._book.status(step, kind)
        missing = ", ".join(status.missing) or ("its commit" if status.state == "committing" else "word of it")
        return f"checkpoint step {step} (missing: {missing})", f"commit as {kind or status.wanted or 'asked for'}"

    def _reason(self, step: int | None) -> str:
        error = self._book.status(step).error if step is not None else None
        return error or "its writer was given up"


def _call_id() -> str:
    """The id of the current call; Ray keeps it when it repeats the call after a restart."""
    return str(ray.get_runtime_context().get_task_id())
