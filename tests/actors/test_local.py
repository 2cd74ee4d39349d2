"""An actor in a local process, without Ray: the server on an event loop of its own thread, the handles in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from trinity_sync.actors import local
from trinity_sync.actors.local import Link, LocalHandle, LocalHost, LocalServer
from trinity_sync.actors.pending import DeathError
from trinity_sync.errors import ConfigError, RunError, TrinityError, WaitTimeout
from trinity_sync.host import channel
from trinity_sync.host.channel import ForeignPeerError, open_connection

SECRET = b"s" * channel.SECRET_BYTES
LIMIT = 10.0


class OddError(TrinityError):
    """Takes other arguments than it keeps."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


class Body:
    def __init__(self, host: LocalHost) -> None:
        self._host = host
        self.ids: list[str] = []
        self.ends: list[str] = []
        self.drops = 0
        self.gate = asyncio.Event()
        self._ended = asyncio.Event()

    async def add(self, one: int, other: int = 0) -> int:
        self.ids.append(self._host.call_id())
        return one + other

    async def echo(self, length: int) -> bytes:
        return bytes(length)

    def plain(self) -> str:
        return "plain"

    async def wait(self) -> str:
        self.ids.append(self._host.call_id())
        await self.gate.wait()
        return "open"

    async def open(self) -> None:
        self.gate.set()

    async def drop(self, times: int) -> int:
        """End the caller's connection so often, and answer then."""
        self.drops += 1
        if self.drops <= times:
            local._current.get().caller.writer.close()
            await asyncio.Event().wait()
        return self.drops

    async def refuse(self) -> None:
        raise ConfigError("checkpoint.dir is not there")

    async def refuse_oddly(self) -> None:
        raise OddError("this", "that")

    async def fail(self) -> None:
        raise KeyError("lost")

    async def unpicklable(self) -> Unpicklable:
        return Unpicklable()

    async def lifeline(self, name: str) -> None:
        assert await self._host.outlived(())
        self.ends.append(name)
        self._ended.set()

    async def an_end(self) -> list[str]:
        await self._ended.wait()
        return self.ends

    def _hidden(self) -> str:
        return "hidden"


class Served:
    """A server, on a thread of its own."""

    def __init__(self, ready: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: Future[int] = Future()
        self._ready = ready
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.port = self._started.result(LIMIT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.server, self._over = LocalServer(), asyncio.Event()
        port = self.server.listen("127.0.0.1", SECRET)
        self.body = Body(LocalHost())
        if self._ready:
            self.serve()
        self._started.set_result(port)
        await self._over.wait()
        await self.server.close()

    def serve(self) -> None:
        self.server.serve(self.body, lambda: {"members": self.server.members})

    def soon(self, work: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(work)

    def ask(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT)

    def close(self) -> None:
        self.soon(self._over.set)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    def link(self, secret: bytes = SECRET, timeout_s: float = LIMIT) -> Link:
        return Link(open_connection(("127.0.0.1", self.port), secret, LIMIT), "the actor", timeout_s)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def served(stack: ExitStack) -> Served:
    served = Served()
    stack.callback(served.close)
    return served


@pytest.fixture
def handle(served: Served, stack: ExitStack) -> LocalHandle:
    handle = LocalHandle(served.link())
    stack.callback(handle.close)
    return handle


def call(handle: LocalHandle, method: str, *args: object, **kwargs: object) -> Any:
    return handle.call("the actor", f"do {method}", method, args, kwargs)


def test_calls_are_answered_however_many_are_under_way(handle: LocalHandle) -> None:
    waiting = call(handle, "wait")
    adding = [call(handle, "add", number, other=1) for number in range(300)]
    assert [one.result(LIMIT) for one in adding] == list(range(1, 301))
    assert call(handle, "plain").result(LIMIT) == "plain"
    assert not waiting.is_answered()
    assert not waiting.has_ended()
    call(handle, "open").result(LIMIT)
    assert waiting.result(LIMIT) == "open"
    assert waiting.is_answered()
    assert asyncio.run(call(handle, "add", 2).answer(LIMIT)) == 2


def test_every_wait_ends_and_says_who_was_to_do_what(handle: LocalHandle) -> None:
    waiting = call(handle, "wait")
    with pytest.raises(WaitTimeout, match=r"the actor did not do wait within 0\.05 s"):
        waiting.result(0.05)
    with pytest.raises(WaitTimeout, match=r"the actor did not do wait within 0\.05 s"):
        asyncio.run(waiting.answer(0.05))
    call(handle, "open").result(LIMIT)
    assert waiting.result(LIMIT) == "open"  # a wait that was given up takes nothing from the next


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("refuse", ConfigError, r"^checkpoint\.dir is not there$"),
        ("refuse_oddly", RunError, "^this and that$"),
        ("fail", RunError, r"^the actor could not do fail: KeyError: 'lost' \(\S*test_local\.py:\d+\)$"),
        ("unpicklable", RunError, "it stays here|cannot pickle|Unpicklable"),
        ("_hidden", RunError, "has no method '_hidden'"),
        ("nothing", RunError, "has no method 'nothing'"),
    ],
)
def test_an_error_comes_as_what_it_is(handle: LocalHandle, method: str, kind: type[TrinityError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(handle, method).result(LIMIT)
    assert call(handle, "add", 1).result(LIMIT) == 1


def test_an_answer_that_is_too_large_is_an_error_and_later_calls_go_on(
    handle: LocalHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MOST_BYTES", 10_000)
    with pytest.raises(RunError, match=r"a message of \d+ bytes is too large; the limit is 10000"):
        handle.call("the actor", "echo", "echo", (20_000,), {}).result(LIMIT)
    assert handle.call("the actor", "add", "add", (1,), {}).result(LIMIT) == 1


def test_a_length_over_the_limit_ends_the_connection_before_it_is_read(
    handle: LocalHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MOST_BYTES", 10_000)
    handle._connection.send(channel.LENGTH.pack(1 << 40), LIMIT)  # type: ignore[union-attr]
    with pytest.raises(DeathError):
        handle.call("the actor", "add", "add", (1,), {}).result(LIMIT)


def test_who_does_not_know_the_secret_is_refused_before_anything_is_unpickled(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.pickle, "loads", lambda data: pytest.fail("it was unpickled"))
    with pytest.raises(ForeignPeerError):
        served.link(b"x" * channel.SECRET_BYTES)
    with socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT) as other:
        other.sendall(channel.pack("anything" * 100))
        with suppress(ConnectionResetError):
            while other.recv(4096):
                pass


def test_before_the_actor_is_there_callers_wait_for_it_a_while(stack: ExitStack) -> None:
    served = Served(ready=False)
    stack.callback(served.close)
    with pytest.raises(WaitTimeout, match="the actor did not get ready"):
        served.link(timeout_s=0.1)
    served.soon(served.serve)
    assert served.link().hello == {"members": 0}


def test_the_end_of_a_connection_fails_what_is_under_way_and_what_comes_after(handle: LocalHandle) -> None:
    waiting = call(handle, "wait")
    handle.close()
    with pytest.raises(DeathError, match=r"the actor died before it could do wait \(the connection was closed here\)"):
        waiting.result(LIMIT)
    with pytest.raises(DeathError, match="do add"):
        call(handle, "add", 1).result(LIMIT)


def test_where_the_server_ends_its_callers_are_told(handle: LocalHandle, served: Served) -> None:
    waiting = call(handle, "wait")
    call(handle, "add", 1).result(LIMIT)
    served.soon(served.server.take_no_more)
    with pytest.raises(DeathError, match=r"do wait \(.*\)"):
        waiting.result(LIMIT)
    link = served.link()  # who comes is told who this is, and not answered
    late = LocalHandle(link)
    with pytest.raises(DeathError):
        call(late, "add", 1).result(LIMIT)


def test_calls_are_made_again_with_their_ids_over_another_connection(served: Served, stack: ExitStack) -> None:
    successor, whys = Served(), []
    stack.callback(successor.close)

    def again(why: str) -> Link:
        whys.append(why)
        return successor.link()

    handle = LocalHandle(served.link(), again)
    stack.callback(handle.close)
    waiting = call(handle, "wait")
    call(handle, "add", 1).result(LIMIT)
    served.soon(served.server.take_no_more)
    call(handle, "open").result(LIMIT)
    assert waiting.result(LIMIT) == "open"
    assert len(whys) == 1
    assert served.body.ids[0] in successor.body.ids, "a repeated call has another id"


def test_connections_that_end_before_an_answer_are_not_made_for_ever(served: Served, stack: ExitStack) -> None:
    made = []

    def again(why: str) -> Link:
        link = served.link()
        made.append(link)
        link.connection.end()
        return link

    handle = LocalHandle(served.link(), again)
    stack.callback(handle.close)
    waiting = call(handle, "wait")
    served.soon(served.server.take_no_more)
    with pytest.raises(DeathError):
        waiting.result(LIMIT)
    assert 1 <= len(made) <= 5


def test_connections_that_hold_are_made_for_as_long_as_it_takes(
    served: Served, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_HOLDS_S", 0.0)
    handle = LocalHandle(served.link(), lambda why: served.link())
    stack.callback(handle.close)
    assert call(handle, "drop", 7).result(LIMIT) == 8


def test_what_the_search_for_another_one_fails_of_is_told(served: Served, stack: ExitStack) -> None:
    def again(why: str) -> Link:
        raise RunError("the folder has been taken over")

    handle = LocalHandle(served.link(), again)
    stack.callback(handle.close)
    call(handle, "add", 1).result(LIMIT)
    waiting = call(handle, "wait")
    served.soon(served.server.take_no_more)
    with pytest.raises(DeathError, match="the folder has been taken over"):
        waiting.result(LIMIT)


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Do something in a fork, which then waits to be killed, as it is at the end of the block."""
    done, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(tells, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tells)
    try:
        assert os.read(done, 1) == b"1"
        yield pid
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_death_of_a_caller_is_noticed_though_a_fork_of_it_lives(served: Served, stack: ExitStack) -> None:
    """A fork, such as one that loads data, holds no connection of its parent's open, and cannot use it either."""
    forks, tells = os.pipe()

    def in_rank() -> None:
        handle = LocalHandle(served.link())
        call(handle, "lifeline", "rank")
        call(handle, "add", 1).result(LIMIT)
        pid = os.fork()
        if pid == 0:
            with pytest.raises(RunError, match="for a fork"):
                call(handle, "add", 1).result(LIMIT)
            os.write(tells, b"%d" % os.getpid())
            signal.pause()

    with forked(in_rank):
        fork = int(os.read(forks, 20))
        watcher = LocalHandle(served.link())
        stack.callback(watcher.close)
        waiting = call(watcher, "an_end")
        assert not waiting.has_ended(0.05)
    try:
        assert waiting.result(LIMIT) == ["rank"]
    finally:
        os.kill(fork, signal.SIGKILL)


def test_members_are_those_who_have_called_until_they_are_gone(served: Served) -> None:
    looking = served.link()  # has not called
    assert looking.hello == {"members": 0}
    handle = LocalHandle(served.link())
    call(handle, "add", 1).result(LIMIT)
    assert served.link().hello == {"members": 1}
    gone = asyncio.run_coroutine_threadsafe(served.server.members_gone(first_s=0.0, grace_s=0.05), served._loop)
    call(handle, "add", 1).result(LIMIT)
    assert not gone.done()
    handle.close()
    gone.result(LIMIT)
    served.ask(served.server.members_gone(first_s=0.05, grace_s=0.0))
