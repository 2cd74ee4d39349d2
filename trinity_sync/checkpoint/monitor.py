"""`CheckpointMonitor`: the actor that commits checkpoints, moves the trackers and runs retention.

One per run: a named actor of Ray's, or a local process for a program without Ray or one whose Ray ends before the last
commit. `trinity_sync.protocol.commit.CommitBook` decides, and `trinity_sync.checkpoint.execution` carries out the
decisions. The monitor sees paths, sizes and digests, never tensors, and loads neither torch nor verl.

The calls for one checkpoint of a run:

1. the driver: `begin` with the names of all parts; it returns the staging folder, which exists now;
2. every rank, per part, through its `CheckpointCoordinator`: `notify_started`, then `notify_finished` or
   `notify_failed`;
3. the driver: `notify_finished(step, part="digest", digest=...)` when the version digest is known, if it named that
   part;
4. the driver: `wait_committed`, which returns after the trackers have moved and retention has run.

Programs for the seed's monitor use counts instead of step 1: `register_thread_count` and `monitor_step`. Every call may
be repeated, as Ray does after a restart of the actor, and counts once. Open steps are noted next to their staging
folders, so a restarted actor continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.actors.monitor_client import MONITOR, CommitReport, EventLine, Facts, PrunedStep, StepReport
from trinity_sync.actors.pending import ANSWER_S, Changes, Host, failures_logged
from trinity_sync.checkpoint.disk import CheckpointDisk
from trinity_sync.checkpoint.execution import EventLog, Execution
from trinity_sync.checkpoint.folder.catalog import has_written
from trinity_sync.checkpoint.folder.contents import step_dir
from trinity_sync.checkpoint.folder.lock import writer_of
from trinity_sync.checkpoint.folder.owner import Owner
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.hardware import peak_memory
from trinity_sync.host.logs import own_log, story
from trinity_sync.host.process import small_actor
from trinity_sync.host.urls import absolute
from trinity_sync.protocol.choices import plain, trinity_field
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.parts import FULL, STATE_DICT, CommitMeta, FileEntry, FileTuple, Kind, beside_file, is_beside
from trinity_sync.protocol.retention import Policy, make_policies
from trinity_sync.protocol.step import SAVE_STRATEGIES
from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    from ray.actor import ActorHandle


_TICK_S = 0.5
# After a restart, a writer that has not called again within this time has died meanwhile, seconds.
_REATTACH_S = 10.0


ACTOR_NAME = MONITOR

_WHO = "the checkpoint monitor"

_ENDING = ("the checkpoint monitor", "carry out what was decided")

# Interval of the checks of the trainer's own files, seconds.
_LOOK_S = 0.1

# The largest number of waits of ranks and driver at a time.
_MAX_CALLS = 16_384

# An actor that is not detached ends with the last handle of its creator, so the handles are kept here.
_created: dict[str, ActorHandle] = {}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Settings of the actor."""

    attempt: int = 0  # the run's attempt; reports of another attempt are refused
    # Retention, as policies, or as a map of name to fields for ours. Empty: keep all.
    policies: Mapping[str, Mapping[str, object] | None] | Sequence[Policy] = field(default_factory=dict)
    keep_state_dicts: int = 2  # number of the newest state-dict folders that stay
    timeout_s: float = 1800.0  # a step without any report for so many seconds fails; also the default limit of waits
    fsync: bool = True  # whether commits are durable
    mirror: MirrorSettings = field(default_factory=MirrorSettings)  # of the copies to `default_hdfs_dir`
    log_dir: str | None = None  # folder of the actor's log; None: Ray's own logs
    log_name: str = ACTOR_NAME
    # Places in a step's folder that a full checkpoint has to have, for savers with several engines (``actor``,
    # ``critic``), which announce themselves. Empty: the announced parts are enough.
    roles: Sequence[str] = ()
    owner: Owner | None = None  # the run; None: that of the checkpoint folder's mark, which is made if it is missing
    # Filled in by `get_actor`: the run's Ray namespace, where a synchronizer hears of each commit; and the run that may
    # write in the checkpoint folder: the actor fails if another run writes there.
    namespace: str | None = None
    writer: str | None = None


class CheckpointMonitor:
    """The actor's class; make it through `get_actor`. All other methods are called with ``.remote``.

    Args:
        save_strategy: one of `trinity_sync.protocol.step.SAVE_STRATEGIES`.
        default_local_dir: the checkpoint folder, shared by all nodes. None: parts are counted, nothing is written.
        default_hdfs_dir: where committed full checkpoints are copied to: a path, or a URL that fsspec knows; None:
            nowhere. A failed copy is a ``fault`` event and never fails a save.
        config: the other settings.
        clock: Unix seconds.
        host: hosts the actor; None: Ray.
    """

    @classmethod
    def get_actor(
        cls,
        namespace: object,
        save_strategy: object = None,
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
        *,
        config: MonitorConfig | None = None,
        own: Mapping[str, object] | None = None,
    ) -> ActorHandle:
        """Return the handle of the run's monitor, which is created if there is none. In this process the handle's
        methods can also be called without ``.remote``, and then wait for the answer.

        The actor lives as long as the process that created it, so let the driver call first.

        Args:
            namespace: the run's Ray namespace, or the `Config` of a Trinity-RFT program, which has all other settings.
                The other arguments matter to the first call only; see the class.
            save_strategy: also as an enum's member, or its name.
            own: further keyword arguments of a subclass's constructor.

        Raises:
            ConfigError: an unknown save strategy or retention policy.
        """
        import ray  # not needed in a local process, and takes a second

        from trinity_sync.actors.handles import plainly

        if not isinstance(namespace, str):
            save_strategy = save_strategy or trinity_field(namespace, "trainer.save_strategy")
            default_local_dir = default_local_dir or trinity_field(namespace, "checkpoint_job_dir")
            namespace = str(trinity_field(namespace, "ray_namespace"))
        name, limit = namespace or None, (config or MonitorConfig()).timeout_s
        try:
            return plainly(ray.get_actor(ACTOR_NAME, namespace=name), cls, _WHO, limit)
        except ValueError:
            pass
        strategy = str(plain(save_strategy or "unrestricted")).lower()
        if strategy not in SAVE_STRATEGIES:
            raise ConfigError(f"checkpoint.save_strategy is {strategy!r}; it has to be {' or '.join(SAVE_STRATEGIES)}")
        config = replace(config or MonitorConfig(), namespace=name or ray.get_runtime_context().namespace)
        if isinstance(config.policies, Mapping):
            config = replace(config, policies=make_policies(config.policies))
        options = {
            "name": ACTOR_NAME,
            "namespace": name,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": _MAX_CALLS,
        }
        folder = str(default_local_dir) if default_local_dir is not None else None
        if folder is not None:
            config = replace(config, writer=writer_of(Path(folder)))
        remote = absolute(str(default_hdfs_dir)) if default_hdfs_dir is not None else None

        body = failures_logged(small_actor(cls, strategy, folder, remote, config, **(own or {})))
        _created[namespace] = plainly(ray.remote(body).options(**options).remote(), cls, _WHO, limit)
        return _created[namespace]

    def __init__(
        self,
        save_strategy: str = "unrestricted",
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
        config: MonitorConfig | None = None,
        clock: Callable[[], float] = time.time,
        host: Host | None = None,
    ) -> None:
        host = host or _ray_host()
        self._config = config = config or MonitorConfig()
        own_log(config.log_dir, config.log_name)
        self._clock = clock
        self._strategy = save_strategy
        self._host = host
        self._timeout_s = config.timeout_s
        self._watched: dict[tuple[str, str, str], asyncio.Event] = {}
        self._disk = CheckpointDisk(
            root=Path(default_local_dir).absolute() if default_local_dir is not None else None,
            attempt=config.attempt,
            policies=make_policies(config.policies) if isinstance(config.policies, Mapping) else config.policies,
            keep_state_dicts=config.keep_state_dicts,
            fsync=config.fsync,
            clock=clock,
            writer=config.writer,
            of_run=config.owner.run if config.owner is not None else None,
        )
        self._events = EventLog(config.attempt, clock)
        restarted = host.restarted
        rebuilt = self._disk.rebuild(self._make_book, restarted=restarted)
        self._writer_lock = rebuilt.lock
        for problem in rebuilt.problems:
            self._events.fault("checkpoint folder", problem)
        self._book = rebuilt.book
        self._changes = Changes()
        self._execution = execution = Execution(self._disk, rebuilt.book, self._events, self._changes, clock)
        if config.namespace is not None:
            execution.announce = partial(_announce, config.namespace)
            if restarted:
                execution.announce_newest()
        if default_hdfs_dir is not None and self._disk.root is not None:
            resumed = not restarted and config.attempt > 0
            execution.start_mirror(default_hdfs_dir, config.mirror, config.owner, resumed=resumed)
        execution.apply(rebuilt.decisions)
        text = f"attempt {config.attempt}{', started again' if restarted else ''}"
        story.info("up for %s, %s", default_local_dir, text)
        self._clock_watch = asyncio.ensure_future(self._watch_clock())

    def _make_book(self, committed: list[tuple[int, int, Kind]]) -> CommitBook:
        return CommitBook(
            clock=self._clock,
            strategy=self._strategy,
            attempt=self._config.attempt,
            step_timeout_s=self._config.timeout_s,
            committed=committed,
        )

    # ---- calls of the seed's monitor, with additions

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
                report=self._host.call_id(),
                attempt=attempt,
            )
        )
        await self._execution.note(step)

    async def announce(self, step: int, parts: Sequence[str], *, weights: bool, attempt: int | None = None) -> None:
        """Wait for parts of these names before the step is committed; see `CommitBook.announce`."""
        await self._after_commit(step)
        self._book.announce(step, parts, weights=weights, attempt=attempt)
        await self._execution.note(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False, *, attempt: int | None = None) -> None:
        """Commit the step, as weights only or as a full checkpoint, as soon as its parts are in."""
        self._execution.apply(self._book.mark(step, STATE_DICT if is_state_dict else FULL, attempt=attempt))
        await self._execution.note(step)

    async def has_part(self, step: int, part: str, *, attempt: int | None = None) -> bool:
        """Return whether the part is in, so that it need not be written."""
        return attempt in (None, self._book.attempt) and self._book.has(step, part)

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        part: str | None = None,
        weights: bool | None = None,
        attempt: int | None = None,
        ticket: str | None = None,
        life: str = "",
        collective: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Register a save of a writer (its node and process); return when the save strategy lets it write. `step` and
        the arguments after it come from a `CheckpointCoordinator`, which also calls `watch`.

        Args:
            collective: the save has barriers with its peers and does not queue.

        Raises:
            RunError: the step has failed, or was committed without the part.
            WaitTimeout: its turn did not come.
        """
        if step is not None and part not in self._book.awaited(step):
            await self._after_commit(step)
        name = ticket or self._host.call_id()
        self._execution.apply(
            self._book.started(
                name,
                node_id,
                job_id,
                step=step,
                part=part,
                weights=weights,
                life=life,
                collective=collective,
                anonymous=ticket is None,
                attempt=attempt,
            )
        )
        if step is not None and not self._book.turn(name):
            await self._execution.note(step)
        try:
            await self._changes.wait(
                lambda: self._book.turn(name) is not False,
                lambda: ("the checkpoint monitor", f"give the writer {job_id} its turn ({self._strategy})"),
                self._timeout_s if timeout_s is None else timeout_s,
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
        """Report that a part is written.

        Args:
            is_state_dict: it is a weights part (`begin` decides for a part that it named).
            part: the part's name; None: it is only counted.
            files: the files that were written; None: the files in the step's folder at the commit, which then takes all
                that is saved of the step.
            digest: the version digest of the weights.
            ticket: the ticket of its `notify_started`.

        Raises:
            RunError: the step was committed without the part.
        """
        entries = None
        if files is not None:
            entries = [(entry if isinstance(entry, FileEntry) else FileEntry(*entry)).as_tuple() for entry in files]
        try:
            decisions = self._book.finished(
                step,
                weights=is_state_dict,
                part=part,
                report=self._host.call_id() if ticket is None else ticket,
                files=entries,
                digest=digest,
                ticket=ticket,
                attempt=attempt,
            )
        except RunError:
            self._execution.apply(self._book.cancel(ticket))
            raise
        self._execution.apply(decisions)
        await self._execution.note(step)

    async def notify_beside(self, step: int, *, attempt: int | None = None) -> None:
        """Report that verl's trainer has written its own files, for every engine that has announced its parts of the
        step. The files of the trainer's other processes are checked.
        """
        for part in filter(is_beside, self._book.awaited(step)):
            if self._disk.root is None or has_written(step_dir(self._disk.root, step), beside_file(part)):
                self._execution.apply(self._book.finished(step, part=part, files=[], attempt=attempt))
        await self._execution.note(step)

    async def notify_failed(
        self, step: int, part: str | None, error: str, *, attempt: int | None = None, ticket: str | None = None
    ) -> None:
        """Report that a part could not be written; the step fails."""
        self._execution.apply(self._book.failed(step, part, error, ticket=ticket, attempt=attempt))
        await self._execution.note(step)

    async def notify_handed_over(self, ticket: str, step: int) -> None:
        """Report that another writer, which has its turn, answers for the part from now on."""
        self._execution.apply(self._book.cancel(ticket))
        await self._execution.note(step)

    async def writer_lost(self, node_id: str, job_id: str | None = None, error: str = "its process died") -> None:
        """Treat a writer's process as dead; without a `job_id`, every one of the node."""
        self._execution.apply(self._book.writer_lost(node_id, job_id, error=error))

    async def _after_commit(self, step: int) -> None:
        """Wait until no commit of the step is running: a commit moves the staging folder away."""
        await self._changes.wait(
            lambda: self._book.status(step).state != "committing" and not self._execution.finishing(step),
            lambda: ("the checkpoint monitor", f"commit step {step}"),
            self._timeout_s,
        )

    # ---- watching the writers

    async def lifeline(self, node_id: str, job_id: str, life: str) -> None:
        """Block while the writer lives: its death ends the call, which the writer owns; see `watch`."""
        await self._watched.setdefault((node_id, job_id, life), asyncio.Event()).wait()

    async def watch(self, node_id: str, job_id: str, life: str, owned: Sequence[object]) -> None:
        """Notice the writer's death through its call of `lifeline`, see `Host.outlived`."""
        writer = (node_id, job_id, life)
        released = self._watched.setdefault(writer, asyncio.Event())
        try:
            if await self._host.outlived(owned):
                self._execution.apply(self._book.writer_lost(node_id, job_id, life))
        finally:
            released.set()
            self._watched.pop(writer, None)

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

    def _reason(self, step: int | None) -> str:
        error = self._book.status(step).error if step is not None else None
        return error or "its writer was given up"

    # ---- the driver's calls

    async def begin(
        self,
        step: int,
        attempt: int | None,
        kind: Kind,
        parts: Sequence[str],
        meta: CommitMeta | None = None,
        *,
        weights_parts: Collection[str] = (),
        durable: bool | None = None,
    ) -> str:
        """Announce a checkpoint: all its parts by name, and the kind of its commit.

        Args:
            step: the step.
            attempt: the run's attempt.
            kind: ``full`` or ``state_dict``.
            parts: names; ``"digest"`` among them makes the commit wait for the version digest.
            meta: fields of the manifest: `backend`, `world_size`, `config_digest`, `metrics`, `wire`; and `keep_last`,
                for programs that pass their limit with each save.
            weights_parts: the parts that are weights; for a ``state_dict`` commit all are.
            durable: overrides `MonitorConfig.fsync` for the commit of this kind.

        Returns:
            The staging folder, into which the parts are written. It exists.

        Raises:
            RunError: the step has failed before, or all these parts are committed, or there is no checkpoint folder.
        """
        # A commit of the step's weights moves its staging folder away; the new parts get a new one afterwards.
        await self._after_commit(step)
        decisions = self._book.begin(
            step, kind, parts, weights_parts=weights_parts, meta=meta, durable=durable, attempt=attempt
        )
        story.info("checkpoint of step %d begun (%s): awaits %s", step, kind, ", ".join(sorted(parts)))
        self._execution.apply(decisions)
        folder = await asyncio.to_thread(self._disk.prepare, step)
        await self._execution.note(step)
        return str(folder)

    async def wait_committed(
        self, step: int, attempt: int | None = None, timeout_s: float | None = None, *, kind: Kind | None = None
    ) -> CommitReport:
        """Wait until the step is committed, its trackers have moved and retention has run.

        Args:
            step: the step.
            attempt: the run's attempt.
            timeout_s: limit in seconds.
            kind: wait for the commit of this kind; None: for all kinds that were asked for.

        Returns:
            step, kind, attempt, digest, bytes, written_s (until all parts were in) and total_s (both in seconds since
            the first report of the save), path of the folder, beside (True: the weights are next to the step's folder,
            whose place was taken), and pruned: [{step, reason, freed_bytes}], the deletions of retention after it.

        Raises:
            RunError: the step failed; the message says why.
            WaitTimeout: names what is missing.
        """
        if attempt is not None and attempt != self._book.attempt:
            raise RunError(f"attempt {attempt} was asked for, but attempt {self._book.attempt} is running")
        if self._book.status(step, kind).state == "unknown":
            # It may have been committed, or committed and deleted, by an earlier process of the monitor.
            deleted = await asyncio.to_thread(self._disk.describe_deleted, step, kind)
            if deleted is not None and self._book.status(step, kind).state == "unknown":
                return deleted
        seconds = self._timeout_s if timeout_s is None else timeout_s
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
            WaitTimeout: names the open steps.
        """
        await self._changes.wait(
            lambda: self._execution.idle and not self._book.open_steps(),
            lambda: ("the checkpoint monitor", f"finish; still open: {self._book.open_steps() or 'background work'}"),
            self._timeout_s if timeout_s is None else timeout_s,
        )

    async def finish_saves(self, timeout_s: float, trainer_s: float = math.inf) -> None:
        """Wait until the steps that are being saved now are committed; for a program that ends. The trainer's own files
        count as in under the same rule as in `end`, since its report would come too late.

        Args:
            trainer_s: limit for the trainer's own files once all else of a step is in, seconds.

        Raises:
            RunError: a step failed; says why.
            WaitTimeout: a step is not committed; names what is missing.
        """
        deadline, steps = time.monotonic() + timeout_s, self._book.open_steps()
        for step in steps:
            complete = time.monotonic()  # but for the trainer's own files
            while not self._settled(step, None):
                now, awaited = time.monotonic(), self._book.awaited(step)
                if not awaited or not all(map(is_beside, awaited)):
                    complete = now
                if now > deadline or now > complete + trainer_s:
                    raise WaitTimeout(*self._missing(step, None), timeout_s if now > deadline else trainer_s)
                if await asyncio.to_thread(self._disk.named_by_verl) == step:
                    await self.notify_beside(step)
                await asyncio.sleep(_LOOK_S)
        left = max(0.0, deadline - time.monotonic())
        await self._changes.wait(lambda: self._execution.idle, lambda: _ENDING, left)
        for step in steps:
            await self.wait_committed(step, timeout_s=0.0)

    async def end(self, why: str, timeout_s: float) -> None:
        """End the work when no writer is left: steps whose parts are all in are committed, the others fail and their
        staged files are removed. The own files of verl's trainer count as in if its tracker, which its rank 0 writes
        last, names the step, and the files of its other ranks are whole.

        Args:
            why: why no part can come any more.

        Raises:
            WaitTimeout: names the steps that are still open.
        """
        deadline = time.monotonic() + timeout_s
        await self._changes.wait(lambda: self._execution.idle, lambda: _ENDING, timeout_s)
        named = await asyncio.to_thread(self._disk.named_by_verl)
        if named is not None and named in self._book.open_steps():
            await self.notify_beside(named)
        await self._changes.wait(lambda: self._execution.idle, lambda: _ENDING, max(0.0, deadline - time.monotonic()))
        for step in self._book.open_steps():
            missing = ", ".join(self._book.status(step).missing)
            await self.fail_step(step, f"{why}; missing: {missing}" if missing else why)
        await self.wait_idle(max(0.0, deadline - time.monotonic()))
        await asyncio.to_thread(self._disk.forget_failures)

    async def prune(self, keep_last: int | None = None) -> list[PrunedStep]:
        """Run retention now. `keep_last`: keep so many of the newest full checkpoints in addition to those that the
        configured policies keep; for programs that pass their limit with each save. None: the configured policies
        alone. Returns the deletions: [{step, reason, freed_bytes}].
        """
        return await self._execution.prune_and_record(keep_last)

    async def wait_mirrored(self, timeout_s: float) -> dict[int, str]:
        """Wait until nothing is being copied to the mirror, or until the timeout. Returns the steps that are not there,
        and why. Empty without a mirror.
        """
        return await self._execution.wait_mirrored(timeout_s)

    async def drain_events(self) -> list[EventLine]:
        """Return the events since the last call, oldest first: ``mirror``, ``fault``, and ``prune`` of late deletions.
        Results of saves are not among them; `wait_committed` returns those. Events of a killed actor are lost.
        """
        return self._events.drain()

    async def fail_step(self, step: int, error: str, attempt: int | None = None) -> None:
        """Fail a step."""
        self._execution.apply(self._book.failed(step, None, error, attempt=attempt))
        await self._execution.note(step)

    # ---- about itself

    async def describe(self) -> Facts:
        """Return the actor's settings."""
        root = self._disk.root
        return {
            "root": str(root) if root is not None else None,
            "attempt": self._book.attempt,
            "fsync": self._config.fsync,
            "save_strategy": self._strategy,
            "roles": list(self._config.roles),
            "pid": os.getpid(),
        }

    async def status(self, step: int) -> StepReport:
        """Return the state of a step."""
        status = self._book.status(step)
        return {
            "state": status.state,
            "committed": status.committed,
            "own": self._book.own(step),
            "error": status.error,
            "missing": list(status.missing),
            "awaited": self._book.awaited(step),
        }

    async def memory(self) -> dict[str, int]:
        """Return the peak resident bytes of this process."""
        return {"peak_rss": peak_memory()}

    # ---- waiting

    def _settled(self, step: int, kind: Kind | None) -> bool:
        return self._book.status(step, kind).state in ("committed", "failed") and not self._execution.finishing(step)

    def _missing(self, step: int, kind: Kind | None) -> tuple[str, str]:
        status = self._book.status(step, kind)
        missing = ", ".join(status.missing) or ("its commit" if status.state == "committing" else "word of it")
        return f"checkpoint step {step} (missing: {missing})", f"commit as {kind or status.wanted or 'asked for'}"


def _announce(namespace: str, committed: CommitReport) -> None:
    """Send a commit to the run's synchronizer, if there is one. Does not wait for an answer."""
    import ray  # as in `CheckpointMonitor.get_actor`
    from ray.exceptions import RayError

    from trinity_sync.actors.synchronizer_client import SYNCHRONIZER, SynchronizerClient

    with contextlib.suppress(
        ValueError, RayError, AttributeError
    ):  # there is none, it cannot be reached, or it is not ours
        client = SynchronizerClient(ray.get_actor(SYNCHRONIZER, namespace=namespace), ANSWER_S)
        client.follow(Version(committed["attempt"], committed["step"]), str(committed["path"]))


def _ray_host() -> Host:
    from trinity_sync.actors.calls import RayHost  # see `CheckpointMonitor.get_actor`

    return RayHost()
