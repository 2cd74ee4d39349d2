"""`CheckpointMonitor`: the actor that commits checkpoints, moves the trackers, runs retention. One per run: a named
actor of Ray's, or in a local process where there is no Ray, or Ray ends before the last commit.

A shell over `trinity_sync.protocol.commit.CommitBook`, which decides, and `trinity_sync.checkpoint.execution`, which
carries out what was decided. What the writers of parts call stands in `trinity_sync.checkpoint.monitor`. Control plane
only: it sees paths, sizes and digests, never tensors, and loads neither torch nor verl.

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
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.actors.monitor_client import MONITOR, Committed, EventLine, Facts, PrunedStep, StepReport
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
from trinity_sync.tracking.events import PruneEvent

if TYPE_CHECKING:
    from ray.actor import ActorHandle


# The monitor's calls for those who write parts, and how it notices their deaths; base of `CheckpointMonitor`.


_TICK_S = 0.5
#: After a restart, a writer that does not show up again within this time died meanwhile.
_REATTACH_S = 10.0


class Writers:
    """What the writers of parts call. Made on the actor's event loop.

    Args:
        book: decides.
        execution: carries out what it decides.
        changes: announced when something was done.
        host: what hosts the actor.
        root: the checkpoint folder; None: nothing is written.
        strategy: one of `trinity_sync.protocol.step.SAVE_STRATEGIES`.
        timeout_s: limit of the wait for a turn, where the writer names none.
    """

    def __init__(
        self,
        book: CommitBook,
        execution: Execution,
        changes: Changes,
        host: Host,
        *,
        root: Path | None,
        strategy: str,
        timeout_s: float,
    ) -> None:
        self._book = book
        self._execution = execution
        self._changes = changes
        self._host = host
        self._root = root
        self._strategy = strategy
        self._timeout_s = timeout_s
        self._watched: dict[tuple[str, str, str], asyncio.Event] = {}
        self._clock_watch = asyncio.ensure_future(self._watch_clock())

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
        """Have the step committed, as weights only or as a full checkpoint, as soon as its parts are in."""
        self._execution.apply(self._book.mark(step, STATE_DICT if is_state_dict else FULL, attempt=attempt))
        await self._execution.note(step)

    async def has_part(self, step: int, part: str, *, attempt: int | None = None) -> bool:
        """Tell whether the part is in, so that there is nothing to write for it."""
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
        """Take note that a save is about to write; return when the save strategy lets it.

        Args:
            node_id, job_id: the writer's node and process.
            step, part, weights, ticket, life: given by a `CheckpointCoordinator`, which also lets itself be watched.
            collective: the save holds barriers with its peers and does not queue.

        Raises:
            RunError: the step has failed meanwhile, or was committed without the part.
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
        """Take note that a part is written.

        Args:
            is_state_dict: it is a weights part (for a part that `begin` named, what `begin` said holds).
            part: the part's name; None: it is only counted.
            files: the files that were written; None: what is found in the step's folder at the commit, which then is
                one of all that is saved of the step.
            digest: the version digest of the weights.
            ticket: the ticket of its `notify_started`.

        Raises:
            RunError: the step was committed without the part.
        """
        told = None
        if files is not None:
            told = [(entry if isinstance(entry, FileEntry) else FileEntry(*entry)).as_tuple() for entry in files]
        try:
            decisions = self._book.finished(
                step,
                weights=is_state_dict,
                part=part,
                report=self._host.call_id() if ticket is None else ticket,
                files=told,
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
        """Take note that what verl's trainer writes itself, beside the files of its engines, is there: for every engine
        that has announced its parts of the step. Files that other processes of the trainer write are looked at.
        """
        for part in filter(is_beside, self._book.awaited(step)):
            if self._root is None or has_written(step_dir(self._root, step), beside_file(part)):
                self._execution.apply(self._book.finished(step, part=part, files=[], attempt=attempt))
        await self._execution.note(step)

    async def notify_failed(
        self, step: int, part: str | None, error: str, *, attempt: int | None = None, ticket: str | None = None
    ) -> None:
        """Take note that a part could not be written: nothing of the step is committed any more."""
        self._execution.apply(self._book.failed(step, part, error, ticket=ticket, attempt=attempt))
        await self._execution.note(step)

    async def notify_handed_over(self, ticket: str, step: int) -> None:
        """Take note that another writer answers for the part from now on; it has its turn already."""
        self._execution.apply(self._book.cancel(ticket))
        await self._execution.note(step)

    async def writer_lost(self, node_id: str, job_id: str | None = None, error: str = "its process died") -> None:
        """Take somebody's word that a writer's process (without a `job_id`: every one of the node) is gone."""
        self._execution.apply(self._book.writer_lost(node_id, job_id, error=error))

    async def _after_commit(self, step: int) -> None:
        """Wait until no commit of the step is under way: it takes the staging folder away."""
        await self._changes.wait(
            lambda: self._book.status(step).state != "committing" and not self._execution.finishing(step),
            lambda: ("the checkpoint monitor", f"commit what is there of step {step}"),
            self._timeout_s,
        )

    # ---- watching the writers

    async def lifeline(self, node_id: str, job_id: str, life: str) -> None:
        """Never returns while the writer lives: what it would return belongs to the writer; see `watch`."""
        await self._watched.setdefault((node_id, job_id, life), asyncio.Event()).wait()

    async def watch(self, node_id: str, job_id: str, life: str, owned: Sequence[object]) -> None:
        """Notice the writer's death by what it owns: its call of `lifeline`, see `Host.outlived`."""
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


ACTOR_NAME = MONITOR

_WHO = "the checkpoint monitor"

_ENDING = ("the checkpoint monitor", "carry out what was decided")

#: The files of verl's trainer are looked at so often, seconds.
_LOOK_S = 0.1

#: Waits of ranks and driver that the actor holds at a time.
_MAX_CALLS = 16_384

# An actor that is not detached ends when the handle its creator holds is gone, so the handles are kept here.
_created: dict[str, ActorHandle] = {}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Settings of the actor.

    Args:
        attempt: the run's attempt; reports for another one are refused.
        policies: retention, as policies, or as a map of name to fields for those of ours. Empty: keep all.
        keep_state_dicts: number of the newest state-dict folders that stay.
        timeout_s: a step of which nothing is heard for so long has failed; also the limit of waits that name none.
        fsync: whether commits are made durable.
        mirror: settings of the copies to `default_hdfs_dir`.
        log_dir: folder of the actor's log; None: Ray's own logs.
        roles: places in a step's folder without which no full checkpoint is committed, for savers that are several
            engines (``actor``, ``critic``); those announce themselves. Empty: what is announced is all that there is.
        owner: the run; None: that of the mark of the checkpoint folder, which gets one if it has none.
        namespace: Ray namespace of the run, filled in by `get_actor`: a synchronizer in it is told of each commit.
        writer: the run that may write in the checkpoint folder, filled in by `get_actor`: the actor fails where
            that is another one by now.
    """

    attempt: int = 0
    policies: Mapping[str, Mapping[str, object] | None] | Sequence[Policy] = field(default_factory=dict)
    keep_state_dicts: int = 2
    timeout_s: float = 1800.0
    fsync: bool = True
    mirror: MirrorSettings = field(default_factory=MirrorSettings)
    log_dir: str | None = None
    writer: str | None = None
    roles: Sequence[str] = ()
    owner: Owner | None = None
    namespace: str | None = None


class CheckpointMonitor(Writers):
    """The actor's body; `get_actor` is the way to it. All methods but that one are called with ``.remote``.

    Args:
        save_strategy: one of `trinity_sync.protocol.step.SAVE_STRATEGIES`.
        default_local_dir: the checkpoint folder, shared by all nodes. None: parts are counted, nothing is written.
        default_hdfs_dir: where committed full checkpoints are copied to: a path, or a URL that fsspec knows; None:
            nowhere. A copy that fails is a ``fault`` event, never a reason for a save to fail.
        config: the rest.
        clock: Unix seconds.
        host: what hosts the actor; None: Ray.
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
        """Return the handle of the run's monitor, which is created if it is not there. It is Ray's; in this process its
        methods can be called plainly, too, and wait for the answer.

        It lives as long as the process that created it, so let the driver be the first to call.

        Args:
            namespace: the run's Ray namespace, or the `Config` of a Trinity-RFT program, which says all the rest. The
                other arguments matter to the first caller only; see the class.
            save_strategy: also as an enum's member, or its name.
            own: further keyword arguments of a subclass's constructor.

        Raises:
            ConfigError: an unknown save strategy or retention policy.
        """
        import ray  # a local process has no use for it, and a second to wait for it

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
            writer=config.writer,
            of_run=config.owner.run if config.owner is not None else None,
        )
        self._events = EventLog(config.attempt, clock)
        restarted = host.restarted
        rebuilt = self._disk.rebuild(self._make_book, restarted=restarted)
        self._writer_lock = rebuilt.lock
        for problem in rebuilt.problems:
            self._events.fault("checkpoint folder", problem)
        changes = Changes()
        execution = Execution(self._disk, rebuilt.book, self._events, changes, clock)
        if config.namespace is not None:
            execution.announce = partial(_announce, config.namespace)
            if restarted:
                execution.announce_newest()
        if default_hdfs_dir is not None and self._disk.root is not None:
            resumed = not restarted and config.attempt > 0
            execution.start_mirror(default_hdfs_dir, config.mirror, config.owner, resumed=resumed)
        execution.apply(rebuilt.decisions)
        told = f"attempt {config.attempt}{', started again' if restarted else ''}"
        story.info("up for %s, %s", default_local_dir, told)
        super().__init__(
            rebuilt.book,
            execution,
            changes,
            host,
            root=self._disk.root,
            strategy=save_strategy,
            timeout_s=config.timeout_s,
        )

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
        meta: CommitMeta | None = None,
        *,
        weights_parts: Collection[str] = (),
        durable: bool | None = None,
    ) -> str:
        """Announce a checkpoint: all its parts by name, and that it is to be committed as `kind`.

        Args:
            parts: names; ``"digest"`` among them makes the commit wait for the version digest.
            meta: fields of the manifest: `backend`, `world_size`, `config_digest`, `metrics`, `wire`; and `keep_last`,
                for programs that give their limit with each save.
            weights_parts: those that are weights; for a ``state_dict`` commit all are.
            durable: overrides `MonitorConfig.fsync` for the commit as this kind.

        Returns:
            The staging folder, into which the parts are written. It exists.

        Raises:
            RunError: the step has failed before, or all these parts are committed, or there is no checkpoint folder.
        """
        # A commit of the step's weights takes its staging folder away; the new parts get a new one afterwards.
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
    ) -> Committed:
        """Wait until the step is committed, its trackers have moved and retention has run.

        Args:
            kind: wait for the commit as this kind; None: as all that was asked for.

        Returns:
            step, kind, attempt, digest, bytes, written_s (until all parts were in) and total_s (both since the save was
            first heard of), path of the folder, beside (these weights lie beside the step's folder, whose place was
            taken), and pruned:
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
            WaitTimeout: it names the steps that are open.
        """
        await self._changes.wait(
            lambda: self._execution.idle and not self._book.open_steps(),
            lambda: ("the checkpoint monitor", f"finish; still open: {self._book.open_steps() or 'background work'}"),
            self._timeout_s if timeout_s is None else timeout_s,
        )

    async def finish_saves(self, timeout_s: float) -> None:
        """Wait until the steps that are being saved now are committed; for a program that a signal ends. What verl's
        trainer writes beside a step's files is in as soon as `end` would take it as in: the trainer says so too late.

        Raises:
            RunError: a step failed; says why.
            WaitTimeout: a step is not committed; names what is missing.
        """
        deadline, steps = time.monotonic() + timeout_s, self._book.open_steps()
        for step in steps:
            while not self._settled(step, None):
                if time.monotonic() > deadline:
                    raise WaitTimeout(*self._missing(step, None), timeout_s)
                if await asyncio.to_thread(self._disk.named_by_verl) == step:
                    await self.notify_beside(step)
                await asyncio.sleep(_LOOK_S)
        left = max(0.0, deadline - time.monotonic())
        await self._changes.wait(lambda: self._execution.idle, lambda: _ENDING, left)
        for step in steps:
            await self.wait_committed(step, timeout_s=0.0)

    async def end(self, why: str, timeout_s: float) -> None:
        """Come to an end, as nobody is left who could write: the steps whose parts are all in are committed, the others
        fail, and what is staged of them goes. What verl's trainer writes beside a step's files is in where its tracker
        names the step, which its rank 0 writes last, and the files of its other ranks are whole.

        Args:
            why: why no part can come any more.

        Raises:
            WaitTimeout: it names the steps that are open still.
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
        """Run retention now.

        Args:
            keep_last: keep the newest so many full checkpoints, and what the configured policies keep; for programs
                that give their limit with each save. None: the configured policies alone.

        Returns:
            What was deleted: [{step, reason, freed_bytes}].
        """
        pruned: list[PrunedStep] = [
            {"step": gone.step, "reason": gone.reason, "freed_bytes": gone.freed_bytes}
            for gone in await self._execution.prune(keep_last)
        ]
        for gone in pruned:
            self._events.add(PruneEvent(**gone))
        return pruned

    async def wait_mirrored(self, timeout_s: float) -> dict[int, str]:
        """Wait until nothing is on its way to the mirror, or the time is over.

        Returns:
            The steps that are not there, and why. Empty without a mirror.
        """
        return await self._execution.wait_mirrored(timeout_s)

    async def drain_events(self) -> list[EventLine]:
        """Return what happened since the last call and nobody waits for, oldest first: ``mirror``, ``fault``, and
        ``prune`` of what was deleted late. What became of a step is the answer of `wait_committed` alone.

        Those of an actor that was killed before they were drained are lost with it.
        """
        return self._events.drain()

    async def fail_step(self, step: int, error: str, attempt: int | None = None) -> None:
        """Give a step up, whatever its parts say."""
        self._execution.apply(self._book.failed(step, None, error, attempt=attempt))
        await self._execution.note(step)

    # ---- about itself

    async def describe(self) -> Facts:
        """Return what it was made with."""
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
        """Return where a step stands."""
        status = self._book.status(step)
        return {
            "state": status.state,
            "committed": status.committed,
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


def _announce(namespace: str, committed: Committed) -> None:
    """Tell the run's synchronizer, where there is one, of a commit. Waits for no answer."""
    import ray  # as in `CheckpointMonitor.get_actor`
    from ray.exceptions import RayError

    from trinity_sync.actors.synchronizer_client import SYNCHRONIZER, SynchronizerClient

    with contextlib.suppress(ValueError, RayError, AttributeError):  # none, none that can be reached, or none of ours
        client = SynchronizerClient(ray.get_actor(SYNCHRONIZER, namespace=namespace), ANSWER_S)
        client.follow(Version(committed["attempt"], committed["step"]), str(committed["path"]))


def _ray_host() -> Host:
    from trinity_sync.actors.calls import RayHost  # see `CheckpointMonitor.get_actor`

    return RayHost()
