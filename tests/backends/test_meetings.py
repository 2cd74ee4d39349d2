"""Saves that ranks do together: all pass a stage or none, whoever fails or is late, and the next save is sound.

Ranks are threads here, each with a client of its own of one real store.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from trinity_sync.backends import meetings as module
from trinity_sync.backends.meetings import Meetings, RankMeeting
from trinity_sync.errors import RunError

RANKS = 3
LIMIT = 60.0


class Group:
    """The ranks of a trainer."""

    def __init__(self) -> None:
        limit = timedelta(seconds=LIMIT)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        clients = [dist.TCPStore("127.0.0.1", self.store.port, is_master=False, timeout=limit) for _ in range(RANKS)]
        self.ranks = [Meetings(client, rank, RANKS, LIMIT) for rank, client in enumerate(clients)]
        self._pool = ThreadPoolExecutor(RANKS)

    def begin(self, work: Callable[[Meetings], Any]) -> list[Future[Any]]:
        return [self._pool.submit(work, meetings) for meetings in self.ranks]

    def outcomes(self, work: Callable[[Meetings], Any]) -> list[Any]:
        """What each rank returned, or the text of what it raised."""
        return [outcome(done) for done in self.begin(work)]


def outcome(done: Future[Any]) -> Any:
    try:
        return done.result(LIMIT)
    except RunError as error:
        return str(error)


@pytest.fixture(scope="module")
def group() -> Group:
    """One for all tests: what a save leaves behind, the next one would meet."""
    return Group()


def save(meetings: Meetings) -> tuple[list[int], str]:
    meeting = meetings.begin("step 1")
    brought = meeting.gather("write", lambda: 10 * meetings.rank)
    return brought, meeting.scatter("tell", lambda: [f"for {rank}" for rank in range(RANKS)])


SOUND = [([0, 10, 20], "for 0"), ([], "for 1"), ([], "for 2")]


def test_rank_0_gets_what_all_bring_and_gives_each_its_own(group: Group) -> None:
    assert group.outcomes(save) == SOUND


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize("where", ["begin", "gather", "give up"])
def test_a_rank_that_fails_tells_all_the_others_and_the_next_save_is_sound(
    group: Group, where: str, failing: int
) -> None:
    def fail(meetings: Meetings, here: str) -> None:
        if meetings.rank == failing and where == here:
            raise OSError(28, "No space left on device", "/there")

    def work(meetings: Meetings) -> None:
        meeting = meetings.begin("step 1", lambda: fail(meetings, "begin"))
        try:
            fail(meetings, "give up")
        except OSError as error:
            meeting.give_up(error)
            raise RunError("its own") from error
        meeting.gather("write", lambda: fail(meetings, "gather"))

    told = group.outcomes(work)
    expected = [f"rank {failing}: No space left on device (/there)"] * RANKS
    if where == "give up":
        expected[failing] = "its own"
    assert told == expected
    assert group.outcomes(save) == SOUND


def test_a_rank_that_waits_for_one_that_does_not_come_can_be_made_to_give_up(group: Group) -> None:
    told = threading.Event()
    begun: queue.Queue[RankMeeting] = queue.Queue()

    def work(meetings: Meetings) -> None:
        meeting = meetings.begin("step 1")
        if meetings.rank == 1:
            begun.put(meeting)
        meeting.gather("write", lambda: meetings.rank != 2 or told.wait(LIMIT))

    under_way = group.begin(work)
    begun.get(timeout=LIMIT).give_up(RunError("rank 2 has died"))
    assert [outcome(under_way[rank]) for rank in (0, 1)] == ["rank 1: rank 2 has died"] * 2
    told.set()
    assert outcome(under_way[2]) == "rank 1: rank 2 has died"
    assert group.outcomes(save) == SOUND


def test_rank_0_that_fails_to_tell_the_others_fails_them_too(group: Group) -> None:
    def work(meetings: Meetings) -> None:
        meetings.begin("step 1").scatter("close", lambda: [][1])

    for outcome in group.outcomes(work):
        assert re.fullmatch(r"rank 0: IndexError: list index out of range \(.*test_meetings\.py:\d+\)", outcome)
    assert group.outcomes(save) == SOUND


@pytest.mark.parametrize("where", ["begin", "write", "tell"])
def test_a_rank_that_is_late_is_named_and_told_when_it_comes_and_the_next_save_is_sound(
    group: Group, where: str
) -> None:
    late = 0 if where == "tell" else 1
    others_gave_up = threading.Event()

    def stay_away(meetings: Meetings, here: str) -> None:
        if meetings.rank == late and where == here:
            assert others_gave_up.wait(LIMIT)

    def work(meetings: Meetings) -> None:
        meeting = meetings.begin("step 7", lambda: stay_away(meetings, "begin"))
        meeting.gather("write", lambda: stay_away(meetings, "write"))
        meeting.scatter("tell", lambda: stay_away(meetings, "tell") or [None] * RANKS)

    for meetings in group.ranks:
        meetings.timeout_s = LIMIT if meetings.rank == late else 0.5
    under_way = group.begin(work)
    told = {rank: outcome(under_way[rank]) for rank in range(RANKS) if rank != late}
    others_gave_up.set()
    what = {"begin": "begin to save"}.get(where, where)
    assert {*told.values(), outcome(under_way[late])} == {f"rank {late} did not {what} (step 7) within 0.5 s"}
    for meetings in group.ranks:
        meetings.timeout_s = LIMIT
    assert group.outcomes(save) == SOUND


def test_a_rank_that_still_waits_beside_training_holds_up_no_begin(group: Group) -> None:
    """Its connection to the store is held by the wait."""
    first = [begun.result(LIMIT) for begun in group.begin(lambda meetings: meetings.begin("step 1"))]
    with ThreadPoolExecutor(RANKS) as beside:
        waiting = beside.submit(first[1].gather, "write", lambda: None)

        def begin(meetings: Meetings) -> None:
            def refuse() -> None:
                raise RunError("the save before is still being written")

            meetings.begin("step 2", refuse if meetings.rank == 1 else lambda: None)

        assert group.outcomes(begin) == ["rank 1: the save before is still being written"] * RANKS
        assert not waiting.done()
        others = [beside.submit(first[rank].gather, "write", lambda: None) for rank in (0, 2)]
        assert [done.result(LIMIT) for done in (*others, waiting)] == [[None] * RANKS, [], []]
    assert group.outcomes(save) == SOUND


def test_what_is_larger_than_the_store_takes_arrives_whole(group: Group) -> None:
    large = bytes(range(256)) * (40 << 10)  # 10 MiB

    def work(meetings: Meetings) -> tuple[bool, bool]:
        meeting = meetings.begin("step 1")
        brought = meeting.gather("write", lambda: large if meetings.rank == 2 else b"")
        told = meeting.scatter("tell", lambda: [large] * RANKS)
        return brought in ([], [b"", b"", large]), told == large

    assert group.outcomes(work) == [(True, True)] * RANKS


def test_the_store_does_not_grow_with_the_saves(group: Group) -> None:
    counts = []
    for _ in range(4):
        group.outcomes(save)
        group.outcomes(lambda meetings: meetings.begin("step 2", lambda: [][1]))
        counts.append(len(group.store.list_keys()))
    assert counts[1] == counts[3]


_SERVE = """
import time, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
time.sleep(600)
"""


@contextmanager
def served() -> Iterator[tuple[int, Any]]:
    """The pid of a process that serves a store, and a client of it."""
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port, limit = int(process.stdout.readline()), timedelta(seconds=LIMIT)
            yield process.pid, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        finally:
            process.kill()


def test_a_rank_0_that_stands_still_holds_up_no_other_rank_for_ever_and_the_next_save_is_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call of a client waits for it, also those that find out who is missing."""
    with served() as (pid, client), ThreadPoolExecutor(2) as pool:
        meetings = [Meetings(dist.PrefixStore("saves", client), rank, 2, LIMIT) for rank in range(2)]
        begun = [pool.submit(one.begin, "step 1") for one in meetings]
        first = [one.result(LIMIT) for one in begun]
        for one in (*meetings, *first):
            one.timeout_s = 0.5
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "_ANSWER_S", 0.5)
        try:
            waiting = [pool.submit(first[1].gather, "write", lambda: None), pool.submit(meetings[1].begin, "step 2")]
            for one in waiting:
                with pytest.raises(RunError, match=r"rank 0, through which the ranks meet, did not answer"):
                    one.result(LIMIT)
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr(module, "_ANSWER_S", LIMIT)
        for meeting in meetings:
            meeting.timeout_s = LIMIT
        meetings[0].begin("step 2")  # rank 1 had come to it
        sound = [pool.submit(one.begin, "step 3") for one in meetings]
        assert [one.result(LIMIT).rank for one in sound] == [0, 1]


def test_the_making_of_meetings_waits_for_a_rank_0_that_stands_still_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with served() as (pid, client), ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(module, "_get_default_store", lambda: dist.PrefixStore("default", client))
        Meetings.of_default_group(LIMIT)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "_ANSWER_S", 0.5)
        try:
            made = pool.submit(Meetings.of_default_group, 0.5)
            with pytest.raises(RunError, match=r"rank 0, through which the ranks meet, did not answer"):
                made.result(LIMIT / 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        made.exception(LIMIT)
        monkeypatch.setattr(module, "_ANSWER_S", LIMIT)
        Meetings.of_default_group(0.5)


def test_a_store_that_is_gone_is_said_to_be() -> None:
    group = Group()
    begun = [done.result(LIMIT) for done in group.begin(lambda meetings: meetings.begin("step 1"))]
    del group.store  # the ranks have clients of their own
    with pytest.raises(RunError, match=r"rank 0, .* has died"):
        begun[1].gather("write", lambda: None)
