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
