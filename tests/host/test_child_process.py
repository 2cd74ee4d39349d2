"""A child process, and the connection to it: only the child answers, and no wait is without end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host import child
from trinity_sync.host import logs
from trinity_sync.host.child_process import ChildPipe, start_child

LIMIT_S = 60.0


@contextlib.contextmanager
def started(log: Path | None = None, message_s: int = 10) -> Iterator[tuple[subprocess.Popen[bytes], ChildPipe]]:
    process, pipe = start_child(child.__name__, log, message_s)
    with process, contextlib.closing(pipe):
        try:
            assert pipe.poll(LIMIT_S)
            assert pipe.recv() == "up"
            yield process, pipe
        finally:
            process.kill()


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def said(pipe: ChildPipe, code: str, given: object = None) -> object:
    pipe.send((code, given))
    assert pipe.poll(LIMIT_S)
    return pipe.recv()


@pytest.mark.parametrize("size", [0, 1, 16_380, 16_390, 3_000_000])
def test_messages_of_all_lengths_go_both_ways(size: int) -> None:
    with started() as (_, pipe):
        assert said(pipe, "said = given", b"x" * size) == b"x" * size


def test_messages_that_come_together_are_taken_one_by_one() -> None:
    with started() as (_, pipe):
        assert said(pipe, "connection.send(1); connection.send(2); said = 3") == 1
        assert [pipe.recv(), pipe.recv()] == [2, 3]
        assert not pipe.poll(0)


@pytest.mark.parametrize("forks", ["os.fork()", "__import__('ctypes').CDLL(None).fork()"])
def test_a_fork_of_the_child_cannot_answer(forks: str) -> None:
    in_fork = "[connection.send('of the fork') for _ in range(100)]; os._exit(0)"
    with started() as (_, pipe):
        for number in range(20):
            assert said(pipe, f"said = given\nif not {forks}: {in_fork}", number) == number


def test_half_a_message_of_a_fork_does_not_break_those_of_the_child() -> None:
    with started() as (_, pipe):
        code = "said = given\nif not os.fork(): os.write(descriptor, b'\\0\\0\\1\\0half'); os._exit(0)\nos.wait()"
        assert said(pipe, code, 7) == 7
        assert said(pipe, "said = given", 8) == 8


def test_a_child_that_is_gone_is_noticed_though_a_fork_holds_the_connection() -> None:
    with started() as (_, pipe):
        fork = said(pipe, "said = os.fork()\nif not said: __import__('time').sleep(600)")
        assert isinstance(fork, int)
        try:
            pipe.send(("os._exit(3)", None))
            assert pipe.poll(LIMIT_S)
            with pytest.raises(EOFError):
                pipe.recv()
        finally:
            os.kill(fork, 9)


def test_what_a_child_has_said_before_its_end_is_taken() -> None:
    with started() as (process, pipe):
        pipe.send(("connection.send(given); os._exit(3)", b"x" * 100_000))
        assert pipe.poll(LIMIT_S)
        assert process.wait(LIMIT_S) == 3
        assert pipe.recv() == b"x" * 100_000
        with pytest.raises(EOFError):
            pipe.recv()


def test_half_a_message_is_waited_for_no_longer_than_one_that_does_not_come() -> None:
    with started() as (_, pipe):
        slow = "while os.write(descriptor, b'\\1'): __import__('time').sleep(0.02)"
        pipe.send((slow, None))
        assert not pipe.poll(0.5)


def test_a_message_that_is_not_taken_in_time_is_given_up_and_no_other_follows() -> None:
    with started(message_s=1) as (_, pipe):
        said(pipe, "said = 1")
        slow = "while True: os.read(descriptor, 100); __import__('time').sleep(0.05)"
        pipe.send((slow, None))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            pipe.send(b"x" * 30_000_000)
        assert 0.9 < time.monotonic() - began < 10
        with pytest.raises(OSError):
            pipe.send("another")


def test_a_message_that_is_too_long_ends_the_connection() -> None:
    with started() as (_, pipe):
        pipe.most_bytes = 1000
        assert said(pipe, "said = 1") == 1
        pipe.send(("said = given", b"x" * 2000))
        assert pipe.poll(LIMIT_S)
        with pytest.raises(EOFError):
            pipe.recv()


def test_file_descriptors_that_a_child_sends_are_not_opened_here() -> None:
    before = open_files()
    with started() as (_, pipe):
        inside = open_files()
        code = (
            "import socket; s = socket.socket(fileno=os.dup(descriptor)); socket.send_fds(s, [b'\\0\\0\\0\\0'], [0, 1])"
        )
        pipe.send((code, None))
        assert pipe.poll(LIMIT_S)
        assert pipe.recv_bytes() == b""
        assert open_files() == inside
    assert open_files() == before


@pytest.mark.parametrize("users", [None, "/somewhere:/else"])
def test_a_child_finds_our_modules_and_its_programs_have_the_users_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, users: str | None
) -> None:
    monkeypatch.setenv("PYTHONPATH", users) if users else monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    hook = "__editable__.own-1.0.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", [*sys.path, hook, "too long" * 100, ""])
    with started() as (_, pipe):
        assert said(pipe, "import sys, only_here; said = sys.path") == [*sys.path[:-1], str(tmp_path)]
        assert said(pipe, "said = os.environ.get('PYTHONPATH')") == users


def test_a_child_that_floods_its_log_keeps_it_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LOOK_S", 0.01)
    log = tmp_path / "child.log"
    with started(log) as (_, pipe):
        logs.keep_short(log, 2000)
        said(pipe, "for _ in range(100): os.write(1, b'x' * 1000)")
        until = time.monotonic() + LIMIT_S
        while log.stat().st_size >= 2000 or not Path(f"{log}.1").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        said(pipe, "os.write(2, b'after')")
        assert log.read_bytes().endswith(b"after")
        assert Path(f"{log}.1").stat().st_size == 2000
