"""What happens to the runs of a trial: users at the command line, readers, deaths, a disk that fails, resumes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.cluster import EXPECTED, LEASE_S, PATIENCE_S, Plan, Run
from tests.campaign.ledger import ROOT, Ledger
from tests.campaign.scheduler import CURRENT, Process
from tests.campaign.world import READS, WRITES, DiskFault, Violation, World
from trinity_sync.checkpoint.folder import catalog, contents, leases
from trinity_sync.checkpoint.folder.contents import ManifestError, step_dir
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.errors import RunError
from trinity_sync.protocol.retention import KeepEvery, KeepLast, Policy
from trinity_sync.protocol.step import SAVE_STRATEGIES


def draw_plan(rng: random.Random) -> Plan:
    """What the runs of a trial are like."""
    policies: list[Policy] = [KeepLast(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.3:
        policies.append(KeepEvery(rng.choice((4, 6))))
    return Plan(
        mode=rng.choice(("checkpoint", "checkpoint", "memory", "none")),
        ranks=rng.choice((1, 2, 2, 3)),
        explorers=rng.choice((0, 1, 2)),
        counted=rng.random() < 0.2,
        strategy=rng.choice(SAVE_STRATEGIES),
        sync_interval=rng.choice((1, 2)),
        save_interval=rng.choice((1, 2, 3)),
        fsync=True,
        durable_sync=rng.random() < 0.5,
        policies=tuple(policies),
    )


def read_held(
    world: World,
    ledger: Ledger,
    step: int,
    who: str,
    pause: float,
    names: list[str] | None = None,
    root: Path = ROOT,
) -> str:
    """Read files of a checkpoint under a lease, as explorers, exports and copies do; the mark that they bear.

    Raises:
        RunError: there is no such checkpoint, or it went before the lease was there.
        Violation: a file cannot be had though it is leased.
    """
    import time

    ends = world.clock() + LEASE_S  # at the earliest: the reader may be stopped for a while before it has the lease
    lease = leases.lease_checkpoint(root, step, reader=who, seconds=LEASE_S, clock=world.clock)
    if root == ROOT:
        ledger.leased(lease, (step, lease.attempt))
        world.later(max(0.0, ends - world.clock()), ledger.released, lease)
        CURRENT.get().on_death.append(lambda: ledger.released(lease))
    marks = set()
    try:
        if names is None:
            names = [entry.path for entry in contents.read_manifest(lease.path).files]
        for name in names:
            try:
                text = (lease.path / name).read_text()
            except FileNotFoundError as error:
                if (step, lease.attempt) in ledger.doubtful:
                    raise RunError("a power cut took it, which it was not to survive") from None
                if world.clock() < ends and (root != ROOT or ledger.holds(lease)):
                    text = f"{who} holds a lease on step {step} and cannot read {name}: {error}"
                    raise world.broken(Violation(text)) from None
                raise RunError("the lease has expired") from None
            marks.add(text.split("|")[1] if "|" in text else text)
            if pause:
                time.sleep(pause / len(names))
    finally:
        ledger.released(lease)
        lease.release()
    return " and ".join(sorted(marks))


class Trial:
    """One random program.

    Args:
        world: where it runs.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.plan = draw_plan(self.rng)
        keeps = min([policy.n for policy in self.plan.policies if isinstance(policy, KeepLast)])
        every = [policy.steps for policy in self.plan.policies if isinstance(policy, KeepEvery)]
        self.ledger = Ledger(world.disk, world.clock, keeps=keeps, spares=every[0] if every else 0)
        self.attempts = 0
        self.run: Run | None = None
        self.troubles = self.rng.choice((0.0, 0.5, 1.0, 2.0))
        self.unpins: Counter[int] = Counter()
        self.unpinning: list[int] = []
        self.crowd = self.rng.choice((1, 2, 4))
        self.pause = self.rng.choice((3.0, 1.0, 0.2))
        world.after_step = self._check

    def _check(self) -> None:
        if self.world.scheduler.quiet:
            self.ledger.check()

    async def main(self) -> None:
        """All of it: runs one after another, users and troubles beside them, then rest."""
        world = self.world
        beside = [
            world.start(world.outside, work) for work in (self._troubles(), *(self._users() for _ in range(self.crowd)))
        ]
        while not world.over:
            await self._one_run()
        world.calm = world.scheduler.calm = True
        world.heal()
        await asyncio.wait(beside)
        for task in beside:
            task.result()
        await self._rest()

    async def _one_run(self) -> None:
        world = self.world
        run = self.run = Run.make(world, self.ledger, self.plan, self.attempts)
        world.start(run.driver, run.main())
        await run.done.wait()
        self.attempts += 1
        await asyncio.sleep(world.rng.choice((0.0, 1.0, 5.0)))

    async def _rest(self) -> None:
        """Without troubles everything comes to its end, and nothing is left."""
        world, ledger = self.world, self.ledger
        await asyncio.sleep(60.0)
        world.limit += 40
        await self._one_run()
        assert self.run is not None
        if self.run.error is not None:
            raise Violation(f"without any trouble attempt {self.run.attempt} failed: {self.run.error}")
        await asyncio.sleep(3600.0)
        world.step("prune at the end")
        await world.start(world.process("prune"), self._use(lambda step: self._prune(self.plan.policies), 0))
        ledger.check(settled=True)
        ledger.check_tidy(self.run.attempt)

    # ---- users

    async def _users(self) -> None:
        rng, world = self.rng, self.world
        tools: tuple[tuple[str, Callable[[int], Any]], ...] = (
            ("prune", lambda step: self._prune(self.plan.policies)),
            ("prune", lambda step: self._prune(self.plan.policies)),
            ("pin", self._pin),
            ("unpin", self._unpin),
            ("export", lambda step: read_held(world, self.ledger, step, "export", rng.random() * 3.0)),
            ("verify", lambda step: catalog.verify(step_dir(ROOT, step))),
        )
        while not world.over:
            await asyncio.sleep(rng.expovariate(1 / self.pause))
            name, tool = rng.choice(tools)
            steps = self._steps()
            if not steps:
                continue
            # The oldest go next, so that is where a pin or a lease may come too late.
            step = rng.choice((rng.choice(steps), min(steps), sorted(steps)[len(steps) // 2]))
            process = world.process(f"{name}-{step}")
            if self.troubles and rng.random() < 0.1 * self.troubles:
                self._doom(process, 25)
            world.step(f"{name}({step})")
            work = world.start(process, self._use(tool, step))
            await asyncio.wait({work}, timeout=rng.choice((0.0, 0.0, 60.0)))

    async def _use(self, tool: Callable[[int], Any], step: int) -> None:
        try:
            await self.world.blocking(lambda: tool(step), waits=True)
        except EXPECTED as error:
            self.world.note(f"     {CURRENT.get()}: {error}")
        except Exception as error:
            self.world.broken(error)
        self.world.later(0.0, lambda process: self.world.kill(process, told=False), CURRENT.get())

    def _steps(self) -> list[int]:
        root = self.world.disk.find(str(ROOT))
        assert root is not None
        names = list(root.names)  # type: ignore[union-attr]
        return [step for name in names if (step := contents.step_of(name)) is not None]

    def _prune(self, policies: tuple[Policy, ...]) -> None:
        now = self.world.clock()
        prune(ROOT, prune_plan(ROOT, policies, now=now), now=now)

    def _pin(self, step: int) -> None:
        before = None if step in self.unpinning or self.ledger.resuming else (self.unpins[step], self.ledger.resumes)
        leases.pin(ROOT, step, clock=self.world.clock)
        # Else somebody may have taken it away meanwhile, or a resume may have set the checkpoint aside.
        if before == (self.unpins[step], self.ledger.resumes) and not self.ledger.resuming:
            self.ledger.pinned(step)

    def _unpin(self, step: int) -> None:
        self.unpins[step] += 1
        self.unpinning.append(step)
        self.ledger.unpinning(step)
        CURRENT.get().on_death.append(lambda: self.unpinning.remove(step))
        with contextlib.suppress(ManifestError):
            leases.unpin(ROOT, step)

    # ---- troubles

    async def _troubles(self) -> None:
        rng, world = self.rng, self.world
        while not world.over and self.troubles:
            await asyncio.sleep(rng.expovariate(self.troubles / 8.0))
            run = self.run
            if run is None or world.over:
                continue
            rng.choices((self._hurt_monitor, self._hurt_rank, self._hurt_explorer, self._hurt_driver, self._hurt_disk,
                         self._power_fails), (8, 3, 3, 2, 4, 2))[0](run)  # fmt: skip

    def _hurt_monitor(self, run: Run) -> None:
        process = run.monitor.process
        if process is not None and process.alive:
            self._doom(process, 150)
            self.world.step(f"monitor is to die after {process.dies_after or process.dies_at}")

    def _doom(self, process: Process, most: int) -> None:
        """Let it die some operations from now, or soon after the next one of some kind."""
        kinds = (None, "exchange", "rename", "link", "unlink", "mkdir", "rmdir", "fsync")
        process.dies_after = self.rng.choice(kinds)
        if process.dies_after is None:
            process.dies_at = self.rng.randrange(most)

    def _hurt_rank(self, run: Run) -> None:
        if run.ranks:
            member = self.rng.choice(run.ranks)
            self.world.step(f"{member.name} dies")
            self.world.kill(member.process)
            if self.rng.random() < 0.5:
                member.process = self.world.process(f"{member.name}-{run.attempt}")
            else:
                self.world.later(self.rng.random(), run.end)

    def _hurt_explorer(self, run: Run) -> None:
        if run.explorers and not run.ended:
            member = self.rng.choice(run.explorers)
            self.world.step(f"{member.name} dies")
            self.world.kill(member.process)
            member.life += 1
            member.process = self.world.process(f"{member.name}-{run.attempt}")
            run.explore(member)

    def _hurt_driver(self, run: Run) -> None:
        self.world.step("driver dies")
        run.driver.dies_at = self.rng.choice((None, self.rng.randrange(60)))
        if run.driver.dies_at is None:
            self.world.kill(run.driver)

    def _hurt_disk(self, run: Run) -> None:
        rng = self.rng
        code, operations = rng.choice(
            ((errno.ENOSPC, WRITES - {"rename", "exchange", "fsync"}), (errno.EIO, WRITES), (errno.EIO, READS),
             (errno.ESTALE, READS | WRITES), (errno.EINTR, frozenset({"exchange"})))
        )  # fmt: skip
        within = rng.choice((str(ROOT), str(ROOT), ".staging", "global_step", ".leases", "latest"))
        until = self.world.clock() + rng.choice((0.3, 2.0, 10.0)) * rng.random()
        self.world.step(f"disk fails with {errno.errorcode[code]} in {within} at {len(operations)} kinds of operations")
        self.world.faults = [fault for fault in self.world.faults if fault.until > self.world.clock()]
        self.world.faults_met = True
        self.world.faults.append(DiskFault(code, operations, within, until, rng.choice((0.1, 0.5, 1.0))))

    def _power_fails(self, run: Run) -> None:
        """At once, or while the monitor has done one thing and is about to do the next."""
        process = run.monitor.process
        if process is None or not process.alive or self.rng.random() < 0.3:
            self._cut_power(run)
            return
        self._doom(process, 150)
        process.on_death.append(lambda: None if run.ended else self._cut_power(run))
        self.world.step(f"power is to fail after {process.dies_after or process.dies_at}")

    def _cut_power(self, run: Run) -> None:
        self.world.step("power is cut")
        self.world.cut_power()
        self.ledger.power_was_cut()
        run.end()
        self.ledger.check()


__all__ = ["PATIENCE_S", "Trial", "draw_plan", "read_held"]
