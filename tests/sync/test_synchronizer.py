"""The synchronizer: its waits on a loop of the test's own, and as the actor that a run's processes meet at."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests import local_ray
from trinity_sync.actors.calls import DeathError
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.statuses import STATUSES
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.settings import SynchronizerConfig
from trinity_sync.sync.synchronizer import SynchronizerActor
from trinity_sync.sync.synchronizer_handle import Synchronizer

PARTS = ["rank-00000"]
HERE = PartInfo(part=PARTS[0], node="here", path="", nbytes=1000, layout="", buckets=None)
LONG = 60.0


def body(**config: Any) -> SynchronizerActor:
    return SynchronizerActor(SynchronizerConfig(**{"slots": 2, "lease_s": 600.0, "timeout_s": LONG, **config}))


async def commit(actor: SynchronizerActor, step: int, location: str | None = None) -> Version:
    version = Version(0, step)
    await actor.begin(version, PARTS, LONG)
    await actor.staged(version, dict.fromkeys(PARTS, HERE))
    await actor.digested(version, f"digest {step}")
    await actor.commit(version, location)
    return version


async def waiting(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A call that was begun and could not be answered at once."""
    task = asyncio.ensure_future(call)
    await turns()
    assert not task.done()
    return task


async def turns() -> None:
    """Let everything run that is ready to run. No time passes, so nothing that polls would notice a change."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


# ---- waiting


def test_a_trainer_that_waits_for_a_slot_has_it_as_soon_as_a_reader_lets_go() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        lease = await actor.lease("explorer-0", Version(0, 0))
        await commit(actor, 1)
        slot = await waiting(actor.begin(Version(0, 2), PARTS, LONG))
        await actor.release(lease.id)
        await turns()
        assert slot.result() == lease.slot

    run(story())


@pytest.mark.parametrize("how", ["failed", "discard", "commit"])
def test_a_slot_of_a_version_that_is_over_is_free_at_once(how: str) -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        on_its_way = Version(0, 1)
        await actor.begin(on_its_way, PARTS, LONG)
        slot = await waiting(actor.begin(Version(0, 2), PARTS, LONG))
        if how == "failed":
            await actor.failed(on_its_way, "the disk is full")
        elif how == "discard":
            await actor.discard(on_its_way)
        else:
            await actor.staged(on_its_way, dict.fromkeys(PARTS))
            await actor.digested(on_its_way, None)
            await actor.commit(on_its_way)
        await turns()
        assert slot.done()

    run(story())


def test_leases_of_a_dead_reader_end_and_those_of_others_stay() -> None:
    async def story() -> None:
        actor = body(slots=3)
        await commit(actor, 0)
        dead = [await actor.lease("explorer-0", Version(0, 0)) for _ in range(2)]
        await commit(actor, 1)
        await actor.lease("explorer-1", Version(0, 1))
        await commit(actor, 2)
        slot = await waiting(actor.begin(Version(0, 3), PARTS, LONG))
        await actor.drop_reader("explorer-0")
        await turns()
        assert slot.result() == dead[0].slot
        (await waiting(actor.begin(Version(0, 4), PARTS, LONG))).cancel()

    run(story())


def test_a_lease_that_nobody_releases_ends_by_itself() -> None:
    async def story() -> None:
        actor = body(lease_s=0.01)
        await commit(actor, 0)
        lease = await actor.lease("explorer-0", Version(0, 0))
        await commit(actor, 1)
        assert await actor.begin(Version(0, 2), PARTS, LONG) == lease.slot

    run(story())


def test_a_lease_lasts_as_long_as_a_load_of_its_bytes_at_the_slowest_rate() -> None:
    async def story() -> None:
        now = [0.0]
        config = SynchronizerConfig(lease_s=30.0, min_rate_mbps=0.00016)  # 100 s for the version twice
        actor = SynchronizerActor(config, lambda: now[0])
        await commit(actor, 0)
        lease = await actor.lease("explorer-0", Version(0, 0))
        await commit(actor, 1)
        now[0] = 129.0
        assert await actor.begin_if_free(Version(0, 2), PARTS) is None
        now[0] = 131.0
        assert await actor.begin_if_free(Version(0, 2), PARTS) == lease.slot

    run(story())


def test_no_free_slot_in_time_is_told_with_who_what_and_how_long() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        await actor.lease("explorer-0")
        await commit(actor, 1)
        expected = r"^the readers of older versions did not free one of 2 slots for version 2 within 0.05 s$"
        with pytest.raises(WaitTimeout, match=expected):
            await actor.begin(Version(0, 2), PARTS, 0.05)
        assert await actor.newest() == Version(0, 1)

    run(story())


def test_a_trainer_that_does_not_wait_for_a_slot_is_told_that_there_is_none() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        lease = await actor.lease("explorer-0")
        await commit(actor, 1)
        assert await actor.begin_if_free(Version(0, 2), PARTS) is None
        await actor.release(lease.id)
        assert await actor.begin_if_free(Version(0, 3), PARTS) == lease.slot

    run(story())


def test_a_version_is_sealed_for_the_waiting_driver_by_its_last_report() -> None:
    async def story() -> None:
        actor = body()
        version = Version(0, 0)
        slot = await actor.begin(version, ["a", "b"], LONG)
        sealed = await waiting(actor.wait_sealed(version, LONG))
        await actor.staged(version, {"a": "at a"})
        await actor.digested(version, "d0")
        await turns()
        assert not sealed.done()
        await actor.staged(version, {"b": "at b"})
        await turns()
        found = sealed.result()
        assert (found.version, found.slot, found.digest) == (version, slot, "d0")
        assert found.parts == {"a": "at a", "b": "at b"}

    run(story())


def test_a_version_that_cannot_be_staged_is_told_to_the_waiting_driver() -> None:
    async def story() -> None:
        actor = body()
        version = Version(0, 0)
        await actor.begin(version, PARTS, LONG)
        sealed = await waiting(actor.wait_sealed(version, LONG))
        await actor.failed(version, "the segment is gone")
        await turns()
        with pytest.raises(RunError, match=r"^version 0 could not be staged: the segment is gone$"):
            sealed.result()

    run(story())


def test_agents_that_are_late_are_told_with_the_version_and_how_long() -> None:
    async def story() -> None:
        actor = body()
        await actor.begin(Version(0, 0), PARTS, LONG)
        with pytest.raises(WaitTimeout, match=r"^the node agents did not seal version 0 within 0.05 s$"):
            await actor.wait_sealed(Version(0, 0), 0.05)

    run(story())


def test_whoever_waits_for_a_newer_version_is_woken_by_the_commit() -> None:
    async def story() -> None:
        actor = body()
        first = await waiting(actor.wait_newer(None, LONG))
        await commit(actor, 0)
        await turns()
        assert first.result() == Version(0, 0)
        second = await waiting(actor.wait_newer(Version(0, 0), LONG))
        third = await waiting(actor.wait_newer(Version(0, 1), LONG))
        await commit(actor, 1)
        await turns()
        assert second.result() == Version(0, 1)
        assert not third.done()
        third.cancel()

    run(story())


def test_nobody_waits_for_a_version_after_the_trainer_has_stopped() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        pending = await waiting(actor.wait_newer(Version(0, 0), LONG))
        await actor.set_trainer_status("stopped")
        await turns()
        assert pending.result() is None
        assert await actor.wait_newer(Version(0, 0), LONG) is None
        assert await actor.wait_newer(None, LONG) == Version(0, 0)
        await actor.set_trainer_status("running")
        (await waiting(actor.wait_newer(Version(0, 0), LONG))).cancel()

    run(story())


def test_word_that_no_version_comes_now_wakes_those_who_wait_and_nobody_later() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        pending = [await waiting(actor.wait_newer(Version(0, 0), LONG)) for _ in range(2)]
        await actor.notify_no_new_model_state_dict()
        await turns()
        assert [task.result() for task in pending] == [None, None]
        (await waiting(actor.wait_newer(Version(0, 0), LONG))).cancel()

    run(story())


def test_a_version_that_never_comes_is_told_with_what_was_held() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 7)
        with pytest.raises(WaitTimeout, match=r"^the trainer did not publish a version after 7 within 0.05 s$"):
            await actor.wait_newer(Version(0, 7), 0.05)

    run(story())


def test_a_wait_that_was_given_up_leaves_nothing_behind() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0)
        lease = await actor.lease("explorer-0")
        await commit(actor, 1)
        with pytest.raises(WaitTimeout):
            await actor.begin(Version(0, 2), PARTS, 0.01)
        with pytest.raises(WaitTimeout):
            await actor.wait_newer(Version(0, 1), 0.01)
        await actor.release(lease.id)
        await commit(actor, 2)
        assert await actor.wait_newer(Version(0, 1), LONG) == Version(0, 2)

    run(story())


# ---- reading


def test_a_lease_gives_label_place_and_digest_of_one_version_together() -> None:
    async def story() -> None:
        actor = body()
        await commit(actor, 0, "/run/global_step_0")
        lease = await actor.lease("explorer-0")
        assert (lease.version, lease.digest, lease.location) == (Version(0, 0), "digest 0", "/run/global_step_0")
        assert lease.parts == dict.fromkeys(PARTS, HERE)

    run(story())


def test_a_version_that_is_gone_or_not_there_yet_is_refused_with_what_is_there() -> None:
    async def story() -> None:
        actor = body()
        with pytest.raises(RunError, match=r"^explorer-0 cannot load: no version is committed yet$"):
            await actor.lease("explorer-0")
        for step in range(3):
            await commit(actor, step)
        for step in (0, 9):
            expected = rf"^explorer-0 cannot load: version {step} is not available \(newest: 2\)$"
            with pytest.raises(RunError, match=expected):
                await actor.lease("explorer-0", Version(0, step))

    run(story())


def test_the_place_of_the_newest_version_is_none_where_it_has_no_folder() -> None:
    async def story() -> None:
        actor = body()
        assert await actor.get_latest_model_path() is None
        await commit(actor, 0)
        assert await actor.get_latest_model_path() is None
        await commit(actor, 1, "/run/global_step_1")
        assert await actor.get_latest_model_path() == "/run/global_step_1/actor"

    run(story())


def test_explorers_are_counted_by_status() -> None:
    async def story() -> None:
        actor, process = body(), RoundMember.new("process 1")
        await actor.set_explorer_status(process, "running")
        await actor.set_explorer_status(process, "running")
        await actor.set_explorer_status(process, "requires_sync", old_status="running")
        assert await actor.get_explorer_status_counts() == {"running": 1, "requires_sync": 1, "stopped": 0}
        with pytest.raises(ValueError, match="no explorer of process 1 is stopped"):
            await actor.set_explorer_status(process, "running", old_status="stopped")
        with pytest.raises(ValueError, match=f"unknown status 'asleep'; one of {', '.join(STATUSES)}"):
            await actor.set_explorer_status(process, "asleep", old_status="running")
        assert await actor.get_explorer_status_counts() == {"running": 1, "requires_sync": 1, "stopped": 0}

    run(story())


def test_a_dead_explorer_is_not_counted_whatever_it_said_last() -> None:
    async def story() -> None:
        actor, dead, successor = body(), RoundMember.new("process 1"), RoundMember.new("process 1")
        await actor.set_explorer_status(dead, "requires_sync")
        await actor.set_explorer_status(successor, "running")
        actor._served.add(RoundMember.new("the driver"))
        await actor.attach(dead, [gone()])
        assert await actor.get_explorer_status_counts() == {"running": 1, "requires_sync": 0, "stopped": 0}
        with pytest.raises(RunError, match="process 1 is dead"):
            await actor.set_explorer_status(dead, "requires_sync")
        assert await actor.get_explorer_status_counts() == {"running": 1, "requires_sync": 0, "stopped": 0}

    run(story())


def test_what_a_process_says_after_its_successor_spoke_does_not_count_though_it_is_its_first_word() -> None:
    """It hangs, so nobody says that it is dead; both had themselves heard of when they began."""

    async def story() -> None:
        actor, hangs, successor = body(), RoundMember.new("process 1"), RoundMember.new("process 1")
        lives = asyncio.get_running_loop().create_future()
        attached = [asyncio.ensure_future(actor.attach(one, [lives])) for one in (hangs, successor)]
        await turns()
        await actor.set_explorer_status(successor, "running")
        with pytest.raises(RunError, match="process 1 is dead"):
            await actor.set_explorer_status(hangs, "running")
        await actor.set_explorer_status(successor, "stopped", old_status="running")
        for task in attached:
            task.cancel()

    run(story())


# ---- agents and ranks


def gone() -> asyncio.Future[None]:
    """What is left of the call by which a process was watched."""
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call.set_exception(RayActorError())
    return call


@pytest.mark.parametrize("told", ["before", "after"])
def test_an_agent_that_is_started_again_is_not_taken_for_the_dead_one(told: str) -> None:
    async def story() -> None:
        actor, dead, successor = body(), RoundMember.new("the agent of node 1"), RoundMember.new("the agent of node 1")
        lives = asyncio.get_running_loop().create_future()
        first = asyncio.get_running_loop().create_future()
        watches = [asyncio.ensure_future(actor.watch(dead, [first]))]
        await turns()
        if told == "before":
            first.set_exception(RayActorError())
            await turns()
            with pytest.raises(DeathError, match="the agent of node 1 died before it could take version 0"):
                await actor.begin(Version(0, 0), PARTS, LONG)
        watches.append(asyncio.ensure_future(actor.watch(successor, [lives])))
        await turns()
        if told == "after":
            first.set_exception(RayActorError())
            await turns()
        await actor.watch(dead, [gone()])  # once more, and late
        await commit(actor, 0)
        lives.set_exception(RayActorError())
        await turns()
        with pytest.raises(DeathError, match="the agent of node 1 died"):
            await actor.begin(Version(0, 1), PARTS, LONG)
        await asyncio.gather(*watches)

    run(story())


def test_the_trainer_says_what_it_does() -> None:
    async def story() -> None:
        actor = body()
        assert await actor.get_trainer_status() == "running"
        await actor.set_trainer_status("requires_sync")
        assert await actor.get_trainer_status() == "requires_sync"
        with pytest.raises(ValueError, match="unknown status"):
            await actor.set_trainer_status("asleep")

    run(story())


# ---- as an actor


_steps = itertools.count()


def publish(synchronizer: Synchronizer, location: str | None = None) -> int:
    version = Version(0, next(_steps))
    synchronizer.client.begin(version, PARTS, LONG).result(LONG)
    synchronizer.client.staged(version, dict.fromkeys(PARTS, HERE)).result(LONG)
    synchronizer.client.digested(version, None).result(LONG)
    synchronizer.client.commit(version, location).result(LONG)
    return version.step


def test_it_is_made_by_who_brings_a_config_and_found_by_the_others(synchronizer: Synchronizer) -> None:
    with pytest.raises(RunError, match="no 'synchronizer' in Ray namespace 'nobody-is-here': pass a config"):
        Synchronizer.get_actor(namespace="nobody-is-here")
    namespace = ray.get_runtime_context().namespace
    config = SynchronizerConfig(slots=2, lease_s=60.0, timeout_s=1.0)
    made = Synchronizer.get_actor(config, namespace)
    made.client.set_trainer_status("requires_sync").result(LONG)
    for found in (Synchronizer.get_actor(config, namespace), Synchronizer.get_actor(namespace=namespace)):
        assert found.get_trainer_status() == "requires_sync"
    with pytest.raises(WaitTimeout, match="within 1 s"):
        found.wait_new_model_state_dict(0)
    ray.kill(made.actor)


def test_its_process_is_small_and_has_no_torch(make_synchronizer: Callable[..., Synchronizer]) -> None:
    with local_ray.alone():
        synchronizer = make_synchronizer()
    publish(synchronizer)
    memory = synchronizer.client.memory().result(LONG)
    assert memory["torch"] is False
    assert memory["peak_rss"] < 120 * 2**20


def test_the_seed_calls_go_by_steps(make_synchronizer: Callable[..., Synchronizer]) -> None:
    synchronizer = make_synchronizer()
    assert synchronizer.get_latest_model_version() == -1
    assert synchronizer.get_latest_model_path() is None
    step = publish(synchronizer, "/run/global_step_0")
    assert synchronizer.get_latest_model_version() == step
    assert synchronizer.get_latest_model_path() == "/run/global_step_0/actor"
    assert synchronizer.get_latest_model_path(use_huggingface=True) == "/run/global_step_0/actor/huggingface"
    assert synchronizer.wait_new_model_state_dict(step - 1) == step
    synchronizer.set_trainer_status("stopped")
    assert synchronizer.wait_new_model_state_dict(step) == step
    synchronizer.set_explorer_status("running")
    assert synchronizer.get_explorer_status_counts()["running"] == 1


def test_its_own_errors_reach_the_caller_as_they_are(synchronizer: Synchronizer) -> None:
    with pytest.raises(RunError, match=r"^explorer-9 cannot load: version 1 \(attempt 4\) is not available"):
        synchronizer.client.lease("explorer-9", Version(4, 1)).result(LONG)
    with pytest.raises(RunError, match=r"^the synchronizer could not .*: unknown status 'asleep'; one of running, "):
        synchronizer.set_trainer_status("asleep")
