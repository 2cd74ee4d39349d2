"""Synchronizer and checkpoint monitor together, through random interleavings with failures, as `sync=checkpoint` uses
them: the monitor commits a version's folder, the synchronizer hands it out, readers hold it, retention deletes.

The actors' own bodies on one event loop, on a real folder; what Ray would say of the actor is all that is made up.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity_sync.checkpoint.folder import catalog, contents
from trinity_sync.checkpoint.folder.contents import file_entry, read_manifest, read_tracker
from trinity_sync.checkpoint.folder.leases import CheckpointLease, lease_checkpoint
from trinity_sync.checkpoint.monitor import CheckpointMonitor, MonitorConfig
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import KeepLast
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Lease, Version, VersionError
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.sync.synchronizer import SynchronizerActor

RANKS = ("rank-0", "rank-1")
READERS = ("explorer-0", "explorer-1")
LEASE_S = 50.0
SLOTS = 3


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Publication:
    """What the driver knows of a version on its way."""

    version: Version
    staged: set[str] = field(default_factory=set)
    folder: Path | None = None
    saved: bool = False


@dataclass(frozen=True)
class Part:
    """What an agent tells of a part in its slot."""

    of: Version
    nbytes: int = 0


@dataclass
class Reading:
    lease: Lease
    expires: float
    hold: CheckpointLease | None = None
    hold_expires: float = 0.0


class Together(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.clock = Clock()
        calls = itertools.count()
        self.ray = SimpleNamespace(get_task_id=lambda: f"call {next(calls)}")
        self.patched = mock.patch("ray.get_runtime_context", return_value=self.ray)
        self.patched.start()
        self.loop = asyncio.new_event_loop()
        self.synchronizer = self.wait(self._make_synchronizer())
        self.monitor = self.wait(self._make_monitor(restarted=False))
        self.step = 0
        self.under_way: Publication | None = None
        self.published: list[Version] = []
        self.committed_steps: set[int] = set()
        self.reading: dict[str, Reading] = {}
        self.members = {reader: RoundMember.new(reader) for reader in READERS}
        self.dead: list[RoundMember] = []
        self.seen: dict[str, Version] = {}
        self.trackers = (-1, -1)

    async def _make_synchronizer(self) -> SynchronizerActor:
        return SynchronizerActor(SynchronizerConfig(slots=SLOTS, lease_s=LEASE_S), self.clock)

    async def _make_monitor(self, *, restarted: bool) -> CheckpointMonitor:
        self.ray.was_current_actor_reconstructed = restarted
        config = MonitorConfig(policies=(KeepLast(1),), keep_state_dicts=1, fsync=False)
        return CheckpointMonitor("unrestricted", str(self.root), None, config, self.clock)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def settle(self) -> None:
        """Until the monitor has carried out all that it decided."""

        async def settled() -> None:
            while not self.monitor._execution.idle:
                await asyncio.sleep(0)

        self.wait(settled())

    # ---- the trainer

    @precondition(lambda self: self.under_way is None)
    @rule()
    def open(self) -> None:
        version = Version(0, self.step + 1)
        try:
            slot = self.wait(self.synchronizer.begin(version, list(RANKS), 0.0))
        except WaitTimeout:
            held = {reading.lease.slot for reading in self.reading.values() if reading.expires > self.clock.now}
            assert len(held | {self._newest_slot()}) == SLOTS, "no slot though one is free"
            return
        for reading in self.reading.values():
            assert reading.expires <= self.clock.now or reading.lease.slot != slot, "a leased slot was handed out"
        self.step += 1
        self.under_way = Publication(version)

    def _newest_slot(self) -> int | None:
        if not self.published:
            return None
        lease = self.wait(self.synchronizer.lease("the test"))
        self.wait(self.synchronizer.release(lease.id))
        return lease.slot

    @precondition(lambda self: self.under_way is not None)
    @rule(rank=st.sampled_from(RANKS))
    def stage(self, rank: str) -> None:
        published = self.under_way
        self.wait(self.synchronizer.staged(published.version, {rank: Part(published.version)}))
        published.staged.add(rank)
        if published.staged == set(RANKS):
            self.wait(self.synchronizer.digested(published.version, f"digest of {published.version.step}"))

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def commit_unsealed(self) -> None:
        if self.under_way.staged != set(RANKS):
            with pytest.raises(VersionError):
                self.wait(self.synchronizer.commit(self.under_way.version, "nowhere"))

    @precondition(lambda self: self.under_way is not None and self.under_way.staged == set(RANKS))
    @rule(kind=st.sampled_from([STATE_DICT, FULL]))
    def begin_save(self, kind: str) -> None:
        published = self.under_way
        if published.folder is None:
            begun = self.monitor.begin(published.version.step, 0, kind, ["weights", "digest"])
            published.folder = Path(self.wait(begun))

    @precondition(lambda self: self.under_way is not None and self.under_way.folder is not None)
    @rule(torn=st.booleans())
    def save(self, torn: bool) -> None:
        published = self.under_way
        step, folder = published.version.step, published.folder
        if published.saved:
            return
        file = folder / "weights.bin"
        file.write_text(f"weights of {step}")
        entry = file_entry(folder, "weights.bin")
        if torn:
            file.write_text(f"weights o{step}")
            file.write_text("")
        self.wait(self.monitor.notify_finished(step, part="weights", files=[entry]))
        self.wait(self.monitor.notify_finished(step, part="digest", digest=f"digest of {step}"))
        if torn:
            with pytest.raises(RunError):
                self.wait(self.monitor.wait_committed(step, 0, 20.0))
            self._give_up("the save was torn")
            return
        self.wait(self.monitor.wait_committed(step, 0, 20.0))
        self.committed_steps.add(step)
        published.saved = True

    @precondition(lambda self: self.under_way is not None and self.under_way.saved)
    @rule()
    def publish(self) -> None:
        version = self.under_way.version
        location = str(contents.step_dir(self.root, version.step))
        self.wait(self.synchronizer.commit(version, location))
        self.published.append(version)
        self.under_way = None

    @rule(kind=st.sampled_from([STATE_DICT, FULL]))
    def a_version_goes_through(self, kind: str) -> None:
        """What mostly happens, so that readers have something to read."""
        if self.under_way is None:
            self.open()
        if self.under_way is None:
            return
        for rank in sorted(set(RANKS) - self.under_way.staged):
            self.stage(rank)
        self.begin_save(kind)
        self.save(False)
        self.publish()

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def die(self) -> None:
        """A rank or an agent is gone: nothing of the version comes any more."""
        published = self.under_way
        if published.folder is not None and not published.saved:
            self.wait(self.monitor.fail_step(published.version.step, "a rank died"))
            self.settle()
            assert not published.folder.exists(), "a failed save left its staging folder"
        self._give_up("a rank died")

    def _give_up(self, error: str) -> None:
        self.wait(self.synchronizer.failed(self.under_way.version, error))
        self.under_way = None

    # ---- the readers

    @precondition(lambda self: len(self.reading) < len(READERS))
    @rule()
    def lease(self) -> None:
        reader = next(reader for reader in READERS if reader not in self.reading)
        try:
            lease = self.wait(self.synchronizer.lease(self.members[reader]))
        except RunError:
            assert not self.published
            return
        assert lease.version == self.published[-1], "not the newest, or one that was not committed"
        assert lease.digest == f"digest of {lease.version.step}"
        assert lease.parts == dict.fromkeys(RANKS, Part(lease.version))
        assert lease.version >= self.seen.get(reader, lease.version), "a reader's version went back"
        self.seen[reader] = lease.version
        self.reading[reader] = Reading(lease, self.clock.now + LEASE_S)

    @precondition(lambda self: bool(self.reading))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        reading = self.reading[data.draw(st.sampled_from(sorted(self.reading)))]
        if reading.hold is not None:
            return
        version = reading.lease.version
        try:
            hold = lease_checkpoint(self.root, version.step, reader="test", seconds=LEASE_S, clock=self.clock)
        except RunError:
            assert version != self.published[-1], "the newest version's folder is gone"
            return
        assert (hold.path / "weights.bin").read_text() == f"weights of {version.step}"
        reading.hold, reading.hold_expires = hold, self.clock.now + LEASE_S

    @precondition(lambda self: bool(self.reading))
    @rule(data=st.data(), dies=st.booleans())
    def end(self, data: st.DataObject, dies: bool) -> None:
        reader = data.draw(st.sampled_from(sorted(self.reading)))
        reading = self.reading.pop(reader)
        if dies:
            dead, self.members[reader] = self.members[reader], RoundMember.new(reader)
            self.dead.append(dead)
            self.wait(self.synchronizer.drop_reader(dead))
            assert not self.wait(self.synchronizer.release(reading.lease.id)), "a lease outlived its holder"
        else:
            self.wait(self.synchronizer.release(reading.lease.id))
            if reading.hold is not None:
                reading.hold.release()

    @precondition(lambda self: bool(self.dead))
    @rule(data=st.data())
    def what_a_dead_one_said_comes_late(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.dead))
        with pytest.raises(RunError, match="given up for dead"):
            self.wait(self.synchronizer.lease(dead))
        self.wait(self.synchronizer.drop_reader(dead))

    # ---- time, restarts

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        for reader, reading in list(self.reading.items()):
            if reading.expires <= self.clock.now:
                del self.reading[reader]

    @rule()
    def the_monitor_is_killed(self) -> None:
        self._stop(self.monitor)
        self.monitor = self.wait(self._make_monitor(restarted=True))
        self.settle()

    @rule()
    def prune(self) -> None:
        self.wait(self.monitor.prune())

    def _stop(self, monitor: CheckpointMonitor) -> None:
        async def stop() -> None:
            monitor._clock_watch.cancel()
            await asyncio.gather(monitor._clock_watch, return_exceptions=True)
            await monitor._execution.stop()

        self.wait(stop())

    # ---- what must hold

    @invariant()
    def versions_and_trackers_never_go_back(self) -> None:
        newest = self.wait(self.synchronizer.newest())
        assert newest == (self.published[-1] if self.published else None)
        trackers = tuple(
            -1 if (found := read_tracker(self.root, kind).step) is None else found for kind in (FULL, STATE_DICT)
        )
        assert all(now >= before for now, before in zip(trackers, self.trackers, strict=True))
        self.trackers = trackers
        for step in trackers:
            assert step == -1 or step in self.committed_steps
            whole = step == -1 or catalog.verify(contents.step_dir(self.root, step)).ok
            assert whole, f"the tracker names torn step {step}"

    @invariant()
    def nothing_that_is_held_and_not_the_newest_is_deleted(self) -> None:
        newest = max(self.committed_steps, default=None)
        held = {
            reading.lease.version.step
            for reading in self.reading.values()
            if reading.hold is not None and reading.hold_expires > self.clock.now
        }
        for step in held | ({newest} if newest is not None else set()):
            assert read_manifest(contents.step_dir(self.root, step)).digest == f"digest of {step}"

    @invariant()
    def all_that_is_visible_is_whole(self) -> None:
        for info in catalog.scan(self.root):
            assert info.manifest is not None, f"{info.path} is visible without a manifest"
            assert info.step in self.committed_steps

    def teardown(self) -> None:
        try:
            if self.under_way is not None:
                self.die()
            for member in self.members.values():
                self.wait(self.synchronizer.drop_reader(member))
            # With nobody there, all but the newest's slot are free.
            for step in range(self.step + 1, self.step + SLOTS):
                self.wait(self.synchronizer.begin(Version(0, step), list(RANKS), 0.0))
        finally:
            self.patched.stop()
            self._stop(self.monitor)
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.root)


TestTogether = Together.TestCase
TestTogether.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
