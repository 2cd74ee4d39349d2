"""Programs that take turns at every file operation, in an order that a seed gives; some die on the way.

Each program is a thread, but only one runs at a time. It stops before each thing that it does to a file (Python's audit
events, and `os.stat`, which has none), and the seed says who goes on. One that is killed does nothing more to the disk,
not even what its own clean-up would.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable

import pytest

_OPERATIONS = {
    "open",
    "os.link",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.utime",
}
_LIMIT_S = 60.0
_mine = threading.local()


class Killed(BaseException):
    """The program is dead."""


class _Program:
    def __init__(self, body: Callable[[], None], back: threading.Semaphore) -> None:
        self.go = threading.Semaphore(0)
        self.back = back
        self.killed = False
        self.done = False
        self.raised: BaseException | None = None
        self._body = body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        if not self.killed:
            self.back.release()
            self.go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        self.go.acquire()
        _mine.program = self
        try:
            if not self.killed:
                self._body()
        except Killed:
            pass
        except BaseException as error:
            self.raised = error
        finally:
            _mine.program = None
            self.done = True
            self.back.release()


def _pause(event: str, _: object = None) -> None:
    program = getattr(_mine, "program", None)
    if program is not None and event in _OPERATIONS:
        program.pause()


sys.addaudithook(_pause)


def interleave(
    seed: int, *bodies: Callable[[], None], kills: int = 0, watch: Callable[[], None] = lambda: None
) -> None:
    """Run these programs to their ends. What one of them raises is raised here.

    Args:
        kills: so many of them die, each before one of the first file operations of all.
        watch: called after each turn.
    """
    chance = random.Random(seed)
    back = threading.Semaphore(0)
    programs = [_Program(body, back) for body in bodies]
    doomed = {chance.randrange(120) for _ in range(kills)}
    turns = 0
    while running := [program for program in programs if not program.done]:
        program = chance.choice(running)
        # Often one gets far ahead of the others: most faults need few changes of turn, at the right places.
        for _ in range(chance.choice((1, 2, 5, 10, 20, 40))):
            program.killed = program.killed or turns in doomed
            turns += 1
            program.go.release()
            assert back.acquire(timeout=_LIMIT_S), f"a program hangs, seed {seed}"
            watch()
            if program.done:
                break
    for program in programs:
        if program.raised is not None:
            raise program.raised


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.stat` is an operation too; fsync, which changes nothing for those who live, takes no time."""
    stat = os.stat

    def paused(*args: object, **kwargs: object) -> object:
        program = getattr(_mine, "program", None)
        if program is not None:
            program.pause()
        return stat(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", paused)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
