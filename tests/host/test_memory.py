"""Peak memory: what forks share counts once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.host import hardware

BYTES = 200 * 2**20


def in_a_fork(grow: int) -> int:
    """Peak of a fork that lives beside this process, and makes so many bytes of its own."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        mine = bytearray(b"x") * grow
        os.write(write, b"%d" % hardware.peak_memory())
        os._exit(len(mine) - grow)
    os.close(write)
    with os.fdopen(read) as told:
        peak = int(told.read())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return peak


def test_of_what_forks_share_each_counts_its_share() -> None:
    shared = bytearray(b"x") * BYTES
    idle, growing = in_a_fork(0), in_a_fork(BYTES)
    assert hardware.peak_rss() >= BYTES
    assert idle < hardware.peak_rss() - 0.4 * BYTES
    assert growing - idle == pytest.approx(BYTES, rel=0.2)
    assert len(shared) == BYTES


def test_where_the_system_does_not_tell_all_of_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)
    assert hardware.peak_memory() == hardware.peak_rss()


def test_what_was_started_counts_with_who_started_it() -> None:
    alone = hardware.peak_memory_with_children()
    hold = f"held = b'x' * {BYTES}; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert hardware.peak_memory_with_children() > alone + 0.9 * BYTES
        child.communicate(b"\n")
