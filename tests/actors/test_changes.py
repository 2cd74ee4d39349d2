"""Waiting until something holds: woken by changes, ended by limits."""

from __future__ import annotations

import asyncio
import time

import pytest

from trinity_sync.actors.pending import Changes
from trinity_sync.errors import WaitTimeout


def who() -> tuple[str, str]:
    return "the trainer", "come"


def test_who_waits_is_woken_by_the_change_after_which_it_holds() -> None:
    async def wait() -> list[str]:
        changes, there, happened = Changes(), False, []

        async def waiting() -> None:
            await changes.wait(lambda: there, who, 60.0)
            happened.append("woken")

        tasks = [asyncio.ensure_future(waiting()) for _ in range(3)]
        for _ in range(2):  # a change that is none of theirs wakes nobody for good
            await asyncio.sleep(0)
            changes.announce()
        await asyncio.sleep(0)
        assert not happened
        there = True
        changes.announce()
        await asyncio.gather(*tasks)
        return happened

    assert asyncio.run(wait()) == ["woken"] * 3


def test_what_holds_already_is_not_waited_for() -> None:
    asyncio.run(Changes().wait(lambda: True, who, 0.0))


def test_a_wait_ends_at_its_limit_or_at_the_deadline_of_the_one_that_it_goes_on_with() -> None:
    with pytest.raises(WaitTimeout, match=r"^the trainer did not come within 0\.05 s$"):
        asyncio.run(Changes().wait(lambda: False, who, 0.05))
    with pytest.raises(WaitTimeout, match=r"^the trainer did not come within 60 s$"):
        asyncio.run(Changes().wait(lambda: False, who, 60.0, time.monotonic()))


def test_the_next_change_is_told_from_none() -> None:
    async def wait() -> tuple[bool, bool]:
        changes = Changes()
        asyncio.get_running_loop().call_soon(changes.announce)
        return await changes.next(60.0), await changes.next(0.0)

    assert asyncio.run(wait()) == (True, False)


def test_a_change_wakes_only_those_for_whom_it_holds_and_several_changes_are_looked_at_once() -> None:
    async def wait() -> int:
        changes, there, asked = Changes(), False, 0

        def ready() -> bool:
            nonlocal asked
            asked += 1
            return there

        tasks = [asyncio.ensure_future(changes.wait(ready, who, 60.0)) for _ in range(100)]
        await asyncio.sleep(0)
        for _ in range(10):  # for other waits
            changes.announce()
        for _ in range(5):
            await asyncio.sleep(0)
        looked, there = asked, True
        changes.announce()
        await asyncio.gather(*tasks)
        return looked

    assert asyncio.run(wait()) == 200  # once before the wait, and once at the changes


def test_a_change_that_the_running_code_makes_after_it_announced_counts() -> None:
    async def wait() -> None:
        changes, there = Changes(), False
        waiting = asyncio.ensure_future(changes.wait(lambda: there, who, 60.0))
        await asyncio.sleep(0)
        changes.announce()
        there = True
        await asyncio.wait_for(waiting, 5.0)

    asyncio.run(wait())


def test_an_error_of_a_condition_is_that_of_its_own_wait() -> None:
    async def wait() -> None:
        changes, broken = Changes(), False

        def ready() -> bool:
            if broken:
                raise LookupError("no such version")
            return False

        waiting = asyncio.ensure_future(changes.wait(ready, who, 60.0))
        await asyncio.sleep(0)
        broken = True
        changes.announce()
        with pytest.raises(LookupError, match="no such version"):
            await asyncio.wait_for(waiting, 5.0)

    asyncio.run(wait())
