"""Connections of two ends in this process, one of which may be a stranger."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from trinity_sync.host.channel import LENGTH, MOST_BYTES, Connection, ForeignPeerError, Listener, open_connection, pack

SECRET = b"s" * 32
LIMIT = 10.0


@pytest.fixture
def taken() -> SimpleQueue[Connection]:
    return SimpleQueue()


@pytest.fixture
def listener(tmp_path: Path, taken: SimpleQueue[Connection]) -> Iterator[Listener]:
    with closing(Listener(str(tmp_path / "socket"), SECRET, taken.put, proof_s=0.5)) as listener:
        yield listener


@pytest.fixture
def ends(listener: Listener, taken: SimpleQueue[Connection]) -> Iterator[tuple[Connection, Connection]]:
    with closing(open_connection(listener.address, SECRET, LIMIT)) as one, closing(taken.get(timeout=LIMIT)) as other:
        yield one, other


def test_messages_arrive_whole_and_in_order(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    sent = [{"number": 1}, b"." * (4 << 20), None]
    sending = threading.Thread(target=lambda: [one.send(pack(message), LIMIT) for message in sent])
    sending.start()
    assert [other.receive(LIMIT) for _ in sent] == sent
    sending.join(LIMIT)


def test_a_message_that_comes_late_is_received_by_a_later_call(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    frame = pack("a message in two pieces")
    one.send(frame[:12], LIMIT)
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.send(frame[12:], LIMIT)
    assert other.receive(LIMIT) == "a message in two pieces"


def test_a_peer_that_does_not_read_ends_the_connection_in_time(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    with pytest.raises(TimeoutError):
        one.send(pack(b"." * (4 << 20)), 0.1)
    with pytest.raises(EOFError):
        other.receive(LIMIT)


def test_the_silence_of_the_other_machine_is_no_timeout_of_the_caller() -> None:
    class Silent(socket.socket):
        def recv(self, *given: object) -> bytes:
            raise OSError(errno.ETIMEDOUT, "keep-alive")

    with closing(Connection(Silent())) as connection, pytest.raises(ConnectionAbortedError, match="does not answer"):
        connection.receive(LIMIT)


def test_a_close_in_another_thread_is_an_error_of_the_connection() -> None:
    class Closed(socket.socket):
        def send(self, *given: object) -> int:
            self.close()
            raise BlockingIOError

    with pytest.raises(ConnectionAbortedError, match="closed"):
        Connection(Closed()).send(pack("a message"), LIMIT)


def test_a_length_over_the_limit_is_refused_before_the_message_arrives(ends: tuple[Connection, Connection]) -> None:
    ends[0].socket.send(LENGTH.pack(MOST_BYTES + 1))
    with pytest.raises(OSError, match="over the limit"):
        ends[1].receive(LIMIT)


def test_a_fork_does_not_keep_the_connection_open(ends: tuple[Connection, Connection]) -> None:
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    try:
        ends[0].close()
        with pytest.raises(EOFError):
            ends[1].receive(LIMIT)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_thread_that_waits_for_a_message_is_woken_by_the_end(ends: tuple[Connection, Connection]) -> None:
    threading.Timer(0.1, ends[0].end).start()
    with pytest.raises(EOFError):
        ends[0].receive(LIMIT)


def test_a_silent_peer_delays_no_other_and_is_let_go(listener: Listener, taken: SimpleQueue[Connection]) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(LIMIT)
        silent.connect(str(listener.address))
        began = time.monotonic()
        open_connection(listener.address, SECRET, LIMIT).close()
        taken.get(timeout=LIMIT)
        assert time.monotonic() - began < 0.4
        while silent.recv(1 << 10):  # the nonce, then the end
            pass


def test_a_want_of_descriptors_ends_no_listener(listener: Listener, taken: SimpleQueue[Connection]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as waiting:
        with closing(socket.socket()) as probe:
            free = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            waiting.connect(str(listener.address))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    open_connection(listener.address, SECRET, LIMIT).close()
    taken.get(timeout=LIMIT)


def test_the_thread_that_accepts_ends_with_the_listener(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    Listener(str(tmp_path / "socket"), SECRET, print).close()
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive(), thread.name


def test_a_peer_that_proves_the_secret_after_the_end_is_let_go(
    listener: Listener, taken: SimpleQueue[Connection]
) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(LIMIT)
        slow.connect(str(listener.address))
        assert len(slow.recv(32)) == 32  # its thread has begun
        listener.close()
        slow.sendall(bytes(64))
        with suppress(ConnectionResetError):
            assert not slow.recv(1)
    assert taken.empty()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(64)
                connection.sendall(b"p" * 32 + pack("hello"))

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(ForeignPeerError, match="does not know the secret"):
            open_connection(listening.getsockname(), SECRET, LIMIT)
        pretending.join(LIMIT)


def test_a_proof_that_comes_in_drops_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                while connection.send(b"n"):
                    time.sleep(0.1)

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            open_connection(listening.getsockname(), SECRET, 0.3)
        dripping.join(LIMIT)


def test_a_proof_cannot_be_sent_back_as_ones_own() -> None:
    """Who knows no secret, and echoes what it is told, proves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def echo() -> None:
            connection, _ = listening.accept()
            with connection:
                nonce = b"n" * 32
                connection.sendall(nonce)
                said = connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(said[32:])

        echoing = threading.Thread(target=echo)
        echoing.start()
        with pytest.raises(ForeignPeerError):
            open_connection(listening.getsockname(), SECRET, LIMIT)
        echoing.join(LIMIT)
