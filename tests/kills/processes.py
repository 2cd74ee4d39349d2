"""The processes of a run: found by a mark in the environment that all of them inherit, and never anybody else's."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "TRINITY_KILLS"

_END_S = 60.0

_BY_LOG = {
    "trainer-rank-": "rank",
    "node-agent": "agent",
    "checkpoint_monitor": "monitor",
    "synchronizer": "synchronizer",
    "explorer-": "explorer",
}
_BY_TITLE = {
    "ray::TrainerRank": "rank",
    "ray::NodeAgent": "agent",
    "ray::CheckpointMonitor": "monitor",
    "ray::Explorer": "explorer",
    "ray::SynchronizerActor": "synchronizer",
    "/raylet/raylet": "raylet",
    "/gcs/gcs_server": "gcs",
}


@dataclass(frozen=True)
class Member:
    """A process of a run."""

    pid: int
    role: str
    name: str


def own_mark(chain: str) -> str:
    """For the environment of a chain's runs: tells them from those of every other campaign, dead ones included."""
    return f"{os.getpid()}.{_started(os.getpid())}.{chain}"


def members(mark: str, driver: int) -> list[Member]:
    """All processes with the mark that live."""
    return [Member(pid, *_role(pid, driver)) for pid in _marked(lambda value: value == mark)]


def send(member: Member, mark: str, signum: int) -> bool:
    """Send a signal; False where the process is gone. Its number cannot have gone to another one meanwhile."""
    try:
        handle = os.pidfd_open(member.pid)
    except OSError:
        return False
    try:
        if _mark_of(member.pid) != mark:
            return False
        signal.pidfd_send_signal(handle, signum)
        if signum == signal.SIGKILL:
            select.select([handle], [], [], 5.0)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def wait_gone(mark: str, driver: int, limit_s: float) -> list[Member]:
    """Wait until no process with the mark is left; those that are after the limit."""
    deadline = time.monotonic() + limit_s
    while left := members(mark, driver):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def end_all(mark: str) -> None:
    """Kill every process with the mark, and those that they start meanwhile."""
    deadline = time.monotonic() + _END_S
    while left := members(mark, 0):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{[member.pid for member in left]} do not end within {_END_S:.0f} s of SIGKILL")
        for member in left:
            send(member, mark, signal.SIGKILL)


def end_orphans() -> None:
    """Kill what a campaign that was killed itself left behind."""
    for pid in _marked(_is_orphan):
        mark = _mark_of(pid)
        if mark is not None and _is_orphan(mark):
            send(Member(pid, "", ""), mark, signal.SIGKILL)


def _is_orphan(mark: str) -> bool:
    pid, _, rest = mark.partition(".")
    return not (pid.isdecimal() and _started(int(pid)) == rest.partition(".")[0])


def _marked(matches: Callable[[str], bool]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (mark := _mark_of(int(entry.name))) is not None and matches(mark):
            found.append(int(entry.name))
    return found


def _mark_of(pid: int) -> str | None:
    """The mark of a process that lives; None: it has none, or is a zombie, whose environment is empty."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    for item in environment.split(b"\0"):
        if item.startswith(MARK.encode() + b"="):
            return item.partition(b"=")[2].decode()
    return None


def _started(pid: int) -> str:
    """When it was started, which tells it from another one of that number; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _role(pid: int, driver: int) -> tuple[str, str]:
    if pid == driver:
        return "driver", "driver"
    log = ""
    with contextlib.suppress(OSError):
        log = Path(f"/proc/{pid}/fd/1").readlink().name.removesuffix(".log")
    title = _title(pid)
    for start, role in _BY_LOG.items():
        if log.startswith(start):
            return role, log
    for text, role in _BY_TITLE.items():
        if text in title.partition(" ")[0]:
            # a child of the raylet has its title until it is another program
            return ("other" if title == _title(_parent(pid)) else role), title.partition(" ")[0]
    return "other", title[:60]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
