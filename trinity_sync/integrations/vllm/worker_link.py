"""A socket between an explorer and the workers of its vLLM engine. Each worker connects, and answers requests in a
thread while its engine generates; a call over vLLM's own control would block the engine. Both sides prove a key, which
the workers get through vLLM.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from pickle import PicklingError
from typing import NamedTuple

from trinity_sync.actors.explorer_client import EngineDied
from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.origin import error_text
from trinity_sync.host.threads import in_background

_LONGEST_FOLDER = 70

_CONNECT_S = 30.0
"""Limit of each side for the other one to prove the key, seconds; the engine is blocked meanwhile."""

_PAUSE_S = 0.1


class WorkerAddress(NamedTuple):
    """Path of the socket and its key, hex."""

    path: str
    key: str


class WorkerHello(NamedTuple):
    """A worker's first message."""

    rank: int
    pid: int


class _WorkerRequest(NamedTuple):
    number: int
    method: str
    arguments: tuple[object, ...]


class _Answer(NamedTuple):
    number: int
    result: object
    error: TrinityError | None


class WorkerLink:
    """The explorer's end.

    Args:
        who: the explorer's name in errors.
        workers: their number.
    """

    def __init__(self, who: str, workers: int) -> None:
        self._who = who
        # a socket's path has 107 characters at most
        short = None if len(tempfile.gettempdir()) < _LONGEST_FOLDER else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-vllm-", dir=short))
        self._key = secrets.token_bytes(32)
        self.address = WorkerAddress(str(self._folder / "workers"), self._key.hex())
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.address.path)
        self._listening.listen(workers)
        self._count = workers
        self._meeting = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._complete = threading.Event()
        self._number = 0
        threading.Thread(target=self._accept, name="workers connect", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers have connected; WaitTimeout if some have not."""
        if not self._complete.wait(timeout_s):
            raise WaitTimeout(self._who, f"have {self._count} workers connect", timeout_s)
        self._stop_listening()  # removes the folder now, however this process ends

    def ask(self, method: str, arguments: Callable[[int], tuple[object, ...]], timeout_s: float) -> list[object]:
        """Call a method of all workers concurrently; return the answers in the order of the ranks.

        Args:
            timeout_s: limit for all together, seconds.

        Raises:
            EngineDied: a worker has died.
        """
        self._number += 1
        until = time.monotonic() + timeout_s
        self._send(method, arguments, until, timeout_s)
        answers: dict[int, _Answer] = {}
        while len(answers) < self._count:
            waiting = [rank for rank in sorted(self._connections) if rank not in answers]
            ready = wait([self._connections[rank] for rank in waiting], max(0.0, until - time.monotonic()))
            if not ready:
                raise WaitTimeout(f"worker {waiting[0]} of {self._who}", method, timeout_s)
            for rank in (rank for rank in waiting if self._connections[rank] in ready):
                with self._alive(rank):
                    answer: _Answer = self._connections[rank].recv()
                if answer.number == self._number:  # else it is late, and its wait has timed out
                    answers[rank] = answer
        for _, answer in sorted(answers.items()):
            if answer.error is not None:
                raise answer.error
        return [answer.result for _, answer in sorted(answers.items())]

    @property
    def workers(self) -> list[int]:
        """The pids of the connected workers, in the order of their ranks."""
        return [pid for _, pid in sorted(self._pids.items())]

    def close(self) -> None:
        """Close the connections, which ends the workers' threads."""
        with self._meeting:
            self._stop_listening()
            for connection in self._connections.values():
                connection.close()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(
        self, method: str, arguments: Callable[[int], tuple[object, ...]], until: float, timeout_s: float
    ) -> None:
        """Send concurrently: a message that does not fit into the socket blocks until the worker reads."""
        lost: dict[int, Exception] = {}

        def send(rank: int) -> None:
            try:
                with self._alive(rank):
                    self._connections[rank].send(_WorkerRequest(self._number, method, arguments(rank)))
            except Exception as error:  # raised below, in the calling thread
                lost[rank] = error

        threads = {rank: threading.Thread(target=send, args=(rank,), daemon=True) for rank in self._connections}
        for thread in threads.values():
            thread.start()
        for rank, thread in threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise WaitTimeout(f"worker {rank} of {self._who}", f"read the request to {method}", timeout_s)
        for error in lost.values():
            raise error

    @contextlib.contextmanager
    def _alive(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise EngineDied(f"worker {rank} of {self._who} (pid {self._pids[rank]}) has died") from error

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(_PAUSE_S)  # such as for a file descriptor
                continue
            # A thread for each, so that a silent peer does not delay the others.
            threading.Thread(target=self._let_in, args=(accepted,), name="a worker connects", daemon=True).start()

    def _let_in(self, accepted: socket.socket) -> None:
        with accepted:
            connection = Connection(os.dup(accepted.fileno()))
            try:
                _limit_reads(accepted, _CONNECT_S)
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                hello: WorkerHello = connection.recv()
                _limit_reads(accepted, 0)
            except Exception:  # a peer without the key, or one that has closed or is silent
                connection.close()
                return
        with self._meeting:
            if self._complete.is_set() or self._listening.fileno() < 0 or hello.rank not in range(self._count):
                connection.close()
                return
            self._connections[hello.rank], self._pids[hello.rank] = connection, hello.pid
            if len(self._connections) == self._count:
                self._complete.set()


def _limit_reads(connected: socket.socket, timeout_s: float) -> None:
    """Have a read that takes longer (seconds; 0: no limit) fail with `BlockingIOError`."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def serve(
    address: WorkerAddress,
    rank: int,
    methods: Mapping[str, Callable[..., object]],
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Connect to the explorer as a worker, and answer its requests in a thread until it closes the connection.

    Args:
        begin, end: called first and last in the thread.

    Raises:
        OSError, WaitTimeout: the explorer does not listen, or does not accept.
    """
    key = bytes.fromhex(address.key)
    connecting = in_background(lambda: Client(address.path, "AF_UNIX", authkey=key), "connect to the explorer")
    if not futures.wait([connecting], _CONNECT_S).done:
        raise WaitTimeout(f"the process that listens at {address.path}", "take the connection", _CONNECT_S)
    connection = connecting.result()
    connection.send(WorkerHello(rank, os.getpid()))
    threading.Thread(target=_serve, args=(connection, methods, begin, end), name="versions arrive", daemon=True).start()


def _serve(
    connection: Connection,
    methods: Mapping[str, Callable[..., object]],
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    with contextlib.ExitStack() as ending, contextlib.suppress(EOFError, OSError), connection:
        ending.callback(end)
        begin()
        while True:
            request: _WorkerRequest = connection.recv()
            answer = _answered(request, methods)
            try:
                connection.send(answer)
            except (TypeError, AttributeError, PicklingError) as error:
                why = RunError(f"the result of {request.method} cannot be sent: {error}")
                connection.send(_Answer(request.number, None, why))


def _answered(request: _WorkerRequest, methods: Mapping[str, Callable[..., object]]) -> _Answer:
    try:
        return _Answer(request.number, methods[request.method](*request.arguments), None)
    except TrinityError as error:
        return _Answer(request.number, None, error.with_traceback(None))
    except Exception as error:
        return _Answer(request.number, None, RunError(f"{request.method} failed: {error_text(error)}"))
