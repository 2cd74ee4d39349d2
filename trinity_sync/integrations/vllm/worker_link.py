"""A socket between an explorer and the workers of its vLLM engine. Each worker connects and becomes a local actor. It
answers in a thread while its engine generates; a call over vLLM's own control would block the engine. Both sides prove
a key, which the workers get through vLLM. Workers that do not find the Unix socket are on another machine, or in a
container, and connect over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from trinity_sync.actors.client import Client, MethodNames, RemoteMethod
from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.actors.local import Link, LocalHandle, LocalServer
from trinity_sync.actors.pending import DeathError
from trinity_sync.errors import ConfigError, WaitTimeout
from trinity_sync.host.channel import SECRET_BYTES, Address, Connection, Listener, open_connection, pack
from trinity_sync.host.package_source import source_checksums
from trinity_sync.host.threads import in_background
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    from trinity_sync.integrations.vllm.transfer import TrinityTransfer
else:
    TrinityTransfer = MethodNames()

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST_FOLDER = 70

_CONNECT_S = 30.0
"""Limit of each side for the other one to prove the key, seconds; the engine is blocked meanwhile."""

_GRACE_S = 0.5
"""Time after the limit of a request, seconds, by which a worker that has read it is named as late."""


class WorkerAddress(NamedTuple):
    """Path of the socket and its key, hex. `host`, `port`: for workers on other machines; None: there are none."""

    path: str
    key: str
    host: str | None = None
    port: int | None = None

    @property
    def place(self) -> Address:
        """Where this process connects."""
        if self.host is None or self.port is None or os.path.exists(self.path):  # noqa: PTH110 - of no permission, too
            return self.path
        return self.host, self.port


class WorkerHello(NamedTuple):
    """A worker's first message. Its form stays: peers of all releases read it."""

    rank: int
    pid: int
    sources: Mapping[str, int] | None = None  # of its loaded modules of this package; None: it is of an early release


class WorkerClient(Client):
    """Client of a worker. `giver` is the key of the explorer's address."""

    fetch = RemoteMethod(TrinityTransfer.fetch, "fetch the version")
    expect = RemoteMethod(TrinityTransfer.expect, "prepare for versions")
    take = RemoteMethod(TrinityTransfer.take, "take the version")
    show = RemoteMethod(TrinityTransfer.show, "compare its weights with version {1}")
    let_go = RemoteMethod(TrinityTransfer.let_go, "drop the version's bytes")


class _Worker(NamedTuple):
    pid: int
    handle: LocalHandle
    client: WorkerClient


class WorkerLink:
    """The explorer's end. `who`: the explorer's name in errors. `workers`: their number. `host`: address of this
    machine for workers on others; None: there are none. `remote`: they are on others.
    """

    def __init__(self, who: str, workers: int, host: str | None = None) -> None:
        self._who = who
        # a socket's path has 107 characters at most
        short = None if len(tempfile.gettempdir()) < _LONGEST_FOLDER else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-vllm-", dir=short))
        key = secrets.token_bytes(SECRET_BYTES)
        path = str(self._folder / "workers")
        self._count = workers
        self._meeting = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._complete = threading.Event()
        self._refused: str | None = None
        self.remote = False
        self._listeners = [Listener(path, key, self._take, _CONNECT_S)]
        self.address = WorkerAddress(path, key.hex())
        if host is not None:
            self._listeners.append(Listener((host, 0), key, self._take, _CONNECT_S))
            self.address = self.address._replace(host=host, port=int(self._listeners[-1].address[1]))

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers have connected. WaitTimeout: some have not. ConfigError: one has other sources."""
        if not self._complete.wait(timeout_s):
            raise WaitTimeout(self._who, f"have {self._count} workers connect", timeout_s)
        if self._refused is not None:
            raise ConfigError(self._refused)
        self._stop_listening()  # removes the folder now, however this process ends

    def ask(self, method: RemoteMethod[P, R], timeout_s: float, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of all workers concurrently; return the answers in the order of the ranks. `timeout_s`: limit
        for all together, seconds. Raises EngineDeathError: a worker has died.
        """
        until = time.monotonic() + timeout_s

        def answer(rank: int) -> R:
            worker = self._workers[rank]
            call = method(worker.client, *args, **kwargs)  # blocks if it is not read
            if not call.has_ended(max(0.0, until - time.monotonic())):
                raise WaitTimeout(call.who, call.what, timeout_s)
            try:
                return call.result(0.0)
            except DeathError as error:
                raise EngineDeathError(f"{call.who} (pid {worker.pid}) has died") from error

        # A death ends the wait at once, since the other workers may wait for the dead one. Any other error is raised
        # when all have answered, so that no worker is at this request while the next one is sent.
        answers = [in_background(partial(answer, rank), "ask a worker") for rank in range(self._count)]
        while True:
            for one in answers:
                if one.done() and isinstance(one.exception(), EngineDeathError):
                    one.result()
            pending = [one for one in answers if not one.done()]
            if not pending:
                return [one.result() for one in answers]
            left = max(0.0, until + _GRACE_S - time.monotonic())
            if not futures.wait(pending, left, futures.FIRST_EXCEPTION).done:
                late = self._workers[answers.index(pending[0])].client
                raise WaitTimeout(late.who, f"read the request to {method.name}", timeout_s)

    @property
    def workers(self) -> list[int]:
        """The pids of the connected workers, in the order of their ranks."""
        return [worker.pid for _, worker in sorted(self._workers.items())]

    def close(self) -> None:
        """Close the connections, which ends the workers' threads."""
        with self._meeting:
            self._stop_listening()
            for worker in self._workers.values():
                worker.handle.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, connection: Connection) -> None:
        link = Link(connection, f"a worker of {self._who}", _CONNECT_S)
        hello: WorkerHello = link.hello
        with self._meeting:
            if self._complete.is_set() or self._listeners[0].closed or hello.rank not in range(self._count):
                connection.close()
                return
            if (differing := _differing(hello.sources)) is not None:
                connection.close()
                self._refused = (
                    f"worker {hello.rank} of {self._who} has another release of this package than the explorer"
                    f"{f' (differing: {listed(differing)})' if differing else ''}; install this one in the "
                    "environment of vLLM (docs/install.md), and start vLLM again"
                )
                self._complete.set()
                return
            if before := self._workers.pop(hello.rank, None):
                before.handle.close()
            # without a limit of its own for a request to be read: a busy worker reads it later
            handle = LocalHandle(link, send_s=math.inf)
            client = WorkerClient(handle, f"worker {hello.rank} of {self._who}")
            self._workers[hello.rank] = _Worker(hello.pid, handle, client)
            self.remote |= connection.socket.family != socket.AF_UNIX
            if len(self._workers) == self._count:
                self._complete.set()


def _differing(sources: Mapping[str, int] | None) -> Sequence[str] | None:
    """Return the modules that have another checksum here, none for an early release; None: there are none."""
    if sources is None:
        return ()
    here = source_checksums(sources)
    return [name for name, checksum in sources.items() if here.get(name) != checksum] or None


def serve(
    address: WorkerAddress,
    rank: int,
    sources: Mapping[str, int],
    body: object,
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Connect to the explorer as a worker, and answer its requests in a thread until it closes the connection.
    `sources`: as of `WorkerHello`. `body`: the actor. `begin`, `end`: called first and last in the thread. Raises
    OSError, EOFError, ForeignPeerError, WaitTimeout: the explorer does not listen, or does not accept.
    """
    try:
        connection = open_connection(place := address.place, bytes.fromhex(address.key), _CONNECT_S)
        connection.send(pack(WorkerHello(rank, os.getpid(), sources)), _CONNECT_S)
    except TimeoutError:
        raise WaitTimeout(f"the process that listens at {place}", "take the connection", _CONNECT_S) from None

    async def answer() -> None:
        server = LocalServer()
        server.serve(body, None)
        await server.answer(connection)

    def work() -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(end)
            ending.callback(connection.close)
            begin()
            asyncio.run(answer())

    threading.Thread(target=work, name="versions arrive", daemon=True).start()
