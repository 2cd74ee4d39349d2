"""One run of the program in the simulated world: driver, monitor, synchronizer, ranks, explorers.

Monitor and synchronizer are the real actors' bodies, with all that they stand on; the pruner, the holds and the resume
are the real functions. What drives them is written down here as the trainer's loop, its saves and the explorers' loads
do it, without tensors: every file holds its path and the *mark* of the weights that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ray.exceptions import RayError

from tests.campaign.ledger import ROOT, Ledger
from tests.campaign.scheduler import CURRENT, Process
from tests.campaign.world import CALL_ID, Service, Violation, World
from trinity_sync.actors.calls import RayHost
from trinity_sync.checkpoint import disk, monitor
from trinity_sync.checkpoint.folder import catalog, resume_point
from trinity_sync.checkpoint.folder.contents import Manifest, file_entry, staging_dir
from trinity_sync.checkpoint.folder.lock import locked, writer_of
from trinity_sync.errors import TrinityError, WaitTimeout
from trinity_sync.host import durable
from trinity_sync.protocol.parts import FULL, STATE_DICT, Commit, FileEntry
from trinity_sync.protocol.retention import Policy
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.sync.synchronizer import SynchronizerActor

RUN = ROOT.parent

#: Limit of the actors' waits, and of anybody's for an answer: longer than all limits that can follow one another.
TIMEOUT_S = 30.0
PATIENCE_S = 600.0
LEASE_S = 20.0

#: What callers of the actors have to expect.
EXPECTED = (TrinityError, RayError, OSError)

#: Calls that Ray may repeat in one life of the actor, because it does not know of the first.
DOUBLED = frozenset(
    {"notify_started", "notify_finished", "notify_failed", "register_thread_count", "monitor_step", "fail_step"}
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a trial's runs are like."""

    mode: str
    ranks: int
    explorers: int
    counted: bool
    strategy: str
    sync_interval: int
    save_interval: int
    fsync: bool
    durable_sync: bool
    policies: tuple[Policy, ...]


@dataclass(eq=False)
class Member:
    """A rank or an explorer; when its process dies another one may take its place."""

    name: str
    process: Process
    life: int = 0


@dataclass(eq=False)
class Run:
    """One attempt.

    Attributes:
        slots: the nodes' shared memory, slot -> bytes.
    """

    world: World
    ledger: Ledger
    plan: Plan
    attempt: int
    driver: Process
    monitor: Service
    synchronizer: Service
    ranks: list[Member] = field(default_factory=list)
    explorers: list[Member] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)
    step: int = 0
    ended: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    _saves: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    _writer: str | None = None
    _lives: int = 0

    @classmethod
    def make(cls, world: World, ledger: Ledger, plan: Plan, attempt: int) -> Run:
        """A run that has not begun."""
        driver = world.process(f"driver-{attempt}")
        monitor_ = Service(world, f"monitor-{attempt}", doubled=DOUBLED)
        run = cls(world, ledger, plan, attempt, driver, monitor_, Service(world, f"synchronizer-{attempt}"))
        driver.on_death.append(run.end)
        return run

    # ---- its life

    async def main(self) -> None:
        """What the driver does."""
        world = self.world
        try:
            with contextlib.ExitStack() as stack:
                self.step = await world.blocking(lambda: self._take_over(stack), waits=True)
                await self._live()
        except EXPECTED as error:
            self.error = f"{type(error).__name__}: {error}"
            world.note(f"     attempt {self.attempt} ends: {self.error[:200]}")
        except Exception as error:
            world.broken(error)
        finally:
            self.end()

    def _take_over(self, stack: contextlib.ExitStack) -> int:
        """Take the folder over and put it in order, as a run or a resume does before anything is started."""
        stack.enter_context(locked(ROOT, RUN, timeout_s=60.0))
        self._writer = writer_of(ROOT)
        self.ledger.check()
        with self.ledger.taking_over():
            found = catalog.newest_good(ROOT)
            start = found.step if found is not None else 0
            resume_point.set_start(ROOT, start, self.attempt)
        lineage = self.ledger.lineage
        known = lineage[found.attempt or 0, start] if found is not None else "initial"
        lineage[self.attempt, start] = known
        self.ledger.resumed(start, self.attempt)
        self.world.step(f"attempt {self.attempt} begins after step {start}")
        return start

    async def _live(self) -> None:
        world, plan = self.world, self.plan
        self.start_monitor(restarted=False)
        process = world.process(f"synchronizer-{self.attempt}")
        process.on_death.append(self.synchronizer.end)
        config = SynchronizerConfig(slots=2, lease_s=LEASE_S, timeout_s=TIMEOUT_S)
        self.synchronizer.serve(SynchronizerActor(config, world.clock), process)
        self.ranks = [self._member(f"rank{rank}") for rank in range(plan.ranks)]
        self.explorers = [self._member(f"explorer{number}") for number in range(plan.explorers)]
        for explorer in self.explorers:
            self.explore(explorer)
        if plan.mode == "checkpoint" or world.rng.random() < 0.5:
            await self.publish(self.step)
        while not world.over:
            await asyncio.sleep(world.rng.random() * 2.0)
            await self._train()
        await self._finish()

    async def _train(self) -> None:
        world, plan = self.world, self.plan
        self.step += 1
        step = self.step
        self.ledger.lineage[self.attempt, step] = f"{self.attempt}.{step}"
        world.step(f"driver trains step {step}")
        publishes = plan.mode != "none" and step % plan.sync_interval == 0
        saves = step % plan.save_interval == 0
        if saves and publishes and world.rng.random() < 0.5:
            self._behind(self.save(step))
            await self.publish(step)
        else:
            if publishes:
                await self.publish(step)
            if saves:
                self._behind(self.save(step))
        while len(self._saves) > 2:
            await asyncio.wait(list(self._saves), return_when=asyncio.FIRST_COMPLETED)

    async def _finish(self) -> None:
        """The end of a run: what is being saved is waited for."""
        while self._saves:
            await asyncio.wait(list(self._saves))
        await self.ask(self.monitor, "wait_idle", PATIENCE_S / 2)
        if not self.world.faults_met:
            self.ledger.check_idle()

    def _behind(self, work: Any) -> None:
        task = self.world.start(self.driver, work)
        self._saves[task] = None
        task.add_done_callback(lambda task: self._saves.pop(task, None))

    def end(self) -> None:
        """Everything of the run ends; the monitor a little later than the rest."""
        if self.ended:
            return
        self.ended = True
        world = self.world
        world.step(f"attempt {self.attempt} is over")
        members = [member.process for member in (*self.ranks, *self.explorers)]
        for process in (self.driver, *members, *([self.synchronizer.process] if self.synchronizer.process else [])):
            world.kill(process)
        self.synchronizer.end()
        if self.monitor.process is not None:
            world.later(world.rng.choice((0.0, 0.5, 3.0)) * world.rng.random(), world.kill, self.monitor.process)
        self.monitor.end()
        self.done.set()

    def _member(self, name: str) -> Member:
        return Member(name, self.world.process(f"{name}-{self.attempt}"))

    # ---- the monitor

    def start_monitor(self, *, restarted: bool) -> None:
        """Start the actor, or start it again as Ray does."""
        if self.ended:
            return
        self._lives += 1
        process = self.world.process(f"monitor-{self.attempt}.{self._lives}")
        process.on_death.append(lambda: self.world.later(1.0, lambda: self.start_monitor(restarted=True)))
        self.monitor.process = process
        self.world.step(f"monitor-{self.attempt} starts{' again' if restarted else ''}")
        self.world.start(process, self._make_monitor(process), call="restarted" if restarted else "")

    async def _make_monitor(self, process: Process) -> None:
        config = monitor.MonitorConfig(
            attempt=self.attempt,
            policies=self.plan.policies,
            timeout_s=TIMEOUT_S,
            fsync=self.plan.fsync,
            writer=self._writer,
        )
        try:
            body = monitor.CheckpointMonitor(self.plan.strategy, str(ROOT), None, config, self.world.clock, _Host())
        except Exception as error:
            self.world.note(f"     the monitor cannot start: {error}")
            process.on_death.clear()
            self.world.kill(process)
            self.monitor.end()
            return
        self.monitor.serve(body, process)

    # ---- asking

    async def ask(self, service: Service, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call an actor and wait for its answer.

        Raises:
            Violation: it never comes.
        """
        try:
            return await asyncio.wait_for(self.world.call(service, method, *args, **kwargs), PATIENCE_S)
        except WaitTimeout:
            raise
        except TimeoutError:
            text = f"{CURRENT.get()} got no answer to {service.name}.{method}{args!r} within {PATIENCE_S:g} s"
            raise self.world.broken(Violation(text)) from None

    # ---- full saves

    async def save(self, step: int) -> None:
        """A full checkpoint of the state after a step, as `trainer.full_saves.FullSaves` does it."""
        world, attempt = self.world, self.attempt
        world.step(f"driver saves step {step}")
        parts = [member.name for member in self.ranks]
        try:
            if self.plan.counted:
                folder = staging_dir(ROOT, step, attempt)
                await self.ask(self.monitor, "register_thread_count", step, state_dict_thread_count=len(parts),
                               checkpoint_thread_count=len(parts) + 1, attempt=attempt)  # fmt: skip
                await self.ask(self.monitor, "monitor_step", step, False, attempt=attempt)
            else:
                meta = {"backend": "fsdp", "world_size": len(parts), "metrics": {"reward/mean": world.rng.random()}}
                folder = Path(await self.ask(self.monitor, "begin", step, attempt, FULL, [*parts, "driver"], meta))
            for member in self.ranks:
                self._write_state(member, step, folder)
            await self._write(None, step, "driver", ["trainer_state.json"], folder, weights=False)
            result = await self.ask(self.monitor, "wait_committed", step, attempt, TIMEOUT_S * 2, kind=FULL)
            self._check_told(result, step)
        except EXPECTED as error:
            world.note(f"     save of step {step} failed: {str(error)[:150]}")
            with contextlib.suppress(*EXPECTED):
                await self.ask(self.monitor, "fail_step", step, str(error), attempt=attempt)

    def _write_state(self, member: Member, step: int, folder: Path) -> None:
        names = [f"actor/model_{member.name}.pt", f"actor/optim_{member.name}.pt"]
        if not self.plan.counted:
            work = self._write(member, step, member.name, names, folder, weights=False)
            self.world.start(member.process, work)
            return
        for name, weights in zip(names, (True, False), strict=True):
            self.world.start(member.process, self._write(member, step, None, [name], folder, weights=weights))

    def _check_told(self, result: dict[str, Any], step: int) -> None:
        """A save that was told as committed is promised."""
        promise = self.ledger.promises.get(step)
        if promise is None and step not in self.ledger.promises:
            newer = max(self.ledger.promises, default=-1)
            if newer <= step:
                raise Violation(f"step {step} was told as committed ({result['kind']}), but nothing of it is there")

    async def _write(
        self, member: Member | None, step: int, part: str | None, names: list[str], folder: Path, *, weights: bool
    ) -> None:
        """One part of a save, as `CheckpointCoordinator` does it; the driver's own needs no turn."""
        world, attempt = self.world, self.attempt
        ticket = world.rng.randbytes(8).hex()
        mark = self.ledger.lineage[attempt, step]
        try:
            if member is not None:
                await self._ask_for_turn(member, step, part, ticket)
            await asyncio.sleep(world.rng.random() * world.rng.choice((0.01, 1.0, 8.0)))
            files = await world.blocking(lambda: self._write_files(folder, names, mark))
        except EXPECTED as error:
            if member is None:
                raise
            with contextlib.suppress(*EXPECTED):
                await self.ask(self.monitor, "notify_failed", step, part, str(error), attempt=attempt, ticket=ticket)
            return
        with contextlib.suppress(*(EXPECTED if member is not None else ())):
            await self.ask(self.monitor, "notify_finished", step, weights, part=part,
                           attempt=attempt, files=files, ticket=ticket)  # fmt: skip

    async def _ask_for_turn(self, member: Member, step: int, part: str | None, ticket: str) -> None:
        process = member.process
        life = f"{process.pid}"
        if not process.watched:
            process.watched.append(self.world.loop.create_future())
            # Never answered while the process lives.
            self.world.call(self.monitor, "watch", "node", member.name, life, [_Reference(process.watched[0])])
        await self.ask(self.monitor, "notify_started", "node", member.name, step=step, part=part, attempt=self.attempt,
                       ticket=ticket, life=life, timeout_s=TIMEOUT_S * 2)  # fmt: skip

    def _write_files(self, folder: Path, names: list[str], mark: str) -> list[FileEntry]:
        entries = []
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(f"{name}|{mark}|".encode() * 2)
                file.flush()
                if self.plan.fsync:
                    os.fsync(file.fileno())
            entries.append(file_entry(folder, name))
        return entries

    # ---- versions

    async def publish(self, step: int) -> None:
        """Stage the weights of a step and let the explorers have them, in the trial's mode."""
        world, version = self.world, Version(self.attempt, step)
        world.step(f"driver publishes version {version}")
        mark = self.ledger.lineage[version.attempt, step]
        try:
            slot = await self.ask(self.synchronizer, "begin", version, ["part"], TIMEOUT_S)
        except WaitTimeout:
            return  # readers are slow; the version is skipped
        self.slots[slot] = "torn"
        await asyncio.sleep(world.rng.random() * 0.1)
        self.slots[slot] = mark
        await self.ask(self.synchronizer, "staged", version, {"part": slot})
        await self.ask(self.synchronizer, "digested", version, mark)
        sealed = await self.ask(self.synchronizer, "wait_sealed", version, TIMEOUT_S)
        location = None
        if self.plan.mode == "checkpoint":
            try:
                location = await self._commit_weights(version, sealed.digest)
            except EXPECTED as error:
                with contextlib.suppress(*EXPECTED):
                    await self.ask(self.monitor, "fail_step", step, str(error), attempt=self.attempt)
                if world.rng.random() < 0.5:
                    raise
                await self.ask(self.synchronizer, "failed", version, str(error))
                return
        await self.ask(self.synchronizer, "commit", version, location)

    async def _commit_weights(self, version: Version, digest: str) -> str:
        """As `sync.checkpoint.CheckpointPublisher` and `trainer.full_saves.WeightSaves` do it."""
        parts, step = ["weights-node", "digest"], version.step
        folder = Path(
            await self.ask(
                self.monitor, "begin", step, self.attempt, STATE_DICT, parts, {}, durable=self.plan.durable_sync
            )
        )
        mark = self.ledger.lineage[version.attempt, step]
        files = await self.world.blocking(
            lambda: self._write_files(folder, [f"actor/weights-{self.attempt}.safetensors"], mark)
        )
        await self.ask(self.monitor, "notify_finished", step, True, part=parts[0], attempt=self.attempt, files=files)
        await self.ask(
            self.monitor, "notify_finished", step, True, part="digest", attempt=self.attempt, files=[], digest=digest
        )
        result = await self.ask(self.monitor, "wait_committed", step, self.attempt, TIMEOUT_S, kind=STATE_DICT)
        return str(result["path"])

    # ---- explorers

    def explore(self, member: Member) -> None:
        """Start an explorer."""
        self.world.start(member.process, self._explore(member))

    async def _explore(self, member: Member) -> None:
        held: Version | None = None
        name = f"{member.name}.{member.life}"
        while not self.ended:
            with contextlib.suppress(*EXPECTED):
                newer = await self.ask(self.synchronizer, "wait_newer", held, TIMEOUT_S)
                lease = await self.ask(self.synchronizer, "lease", name, newer)
                try:
                    mark = await self._load(member, lease)
                finally:
                    in_time = await self.ask(self.synchronizer, "release", lease.id)
                wanted = self.ledger.lineage[lease.version.attempt, lease.version.step]
                if mark != wanted and (in_time or self.plan.mode == "checkpoint"):
                    text = f"{name} holds {mark} under the label {lease.version}, which is {wanted}"
                    raise self.world.broken(Violation(text))
                held = lease.version if mark == wanted else held
                self.world.step(f"{name} holds version {held}")
            await asyncio.sleep(0.1 + self.world.rng.random())

    async def _load(self, member: Member, lease: Any) -> str:
        slow = self.world.rng.random() < 0.1
        pause = self.world.rng.random() * (1.5 * LEASE_S if slow else 0.2)
        if lease.location is None:
            before = self.slots[lease.slot]
            await asyncio.sleep(pause)
            return before if self.slots[lease.slot] == before else "torn"
        from tests.campaign.operations import read_held

        folder = Path(lease.location)
        names = [f"actor/weights-{lease.version.attempt}.safetensors"]
        read = await self.world.blocking(
            lambda: read_held(self.world, self.ledger, lease.version.step, member.name, pause, names, folder.parent),
            waits=True,
        )
        return str(read)


@dataclass(frozen=True)
class _Reference:
    """A future that outlives those who wait for it."""

    future: asyncio.Future[Any]

    def __await__(self) -> Any:
        return asyncio.shield(self.future).__await__()


class _Host(RayHost):
    """Ray, as it is to the simulated actors."""

    @property
    def restarted(self) -> bool:
        return CALL_ID.get() == "restarted"

    def call_id(self) -> str:
        return CALL_ID.get()


@contextlib.contextmanager
def observed(ledger: Ledger) -> Iterator[None]:
    """The monitor's commits are told to the ledger."""
    commit = disk.CheckpointDisk.commit

    def told(self: disk.CheckpointDisk, decision: Commit) -> Manifest:
        if getattr(decision, "beside", False):
            return commit(self, decision)
        durable = self.fsync if decision.kind == FULL else bool(decision.durable)
        ledger.committing(decision.step, decision.attempt, durable=durable)
        manifest = commit(self, decision)
        ledger.committed(manifest, durable=durable)
        return manifest

    with (
        mock.patch.object(disk.CheckpointDisk, "commit", told),
        mock.patch.object(monitor, "_TICK_S", 2.0),  # half a second would only take longer,
        mock.patch.object(durable, "PIECE_BYTES", 1 << 12),  # and so would buffers of 4 MB for files of 50 bytes
    ):
        yield
