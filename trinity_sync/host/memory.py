"""Peak memory of a process, for summary.json: every actor reports its own, the driver collects them by role. And what
is free.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


def peak_rss() -> int:
    """Return the largest resident set this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes (getrusage(2) of each).
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory() -> int:
    """Return the same, but of what this process now shares with others its share only: forks share most of what they
    have imported. Where the system does not tell (Linux does), all of it.
    """
    try:
        return peak_rss() - _shared("self")
    except (OSError, ValueError, KeyError):
        return peak_rss()


def peak_memory_with_children() -> int:
    """Return the sum of `peak_memory` over this process and all below it, as far as the system tells."""
    import psutil

    total = peak_memory()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or is no Linux process
            total += _sizes(Path(f"/proc/{child.pid}/status"))["VmHWM"] - _shared(str(child.pid))
    return total


def _shared(process: str) -> int:
    """Bytes that a process has of others' share."""
    sizes = _sizes(Path(f"/proc/{process}/smaps_rollup"))
    return sizes["Rss"] - sizes["Pss"]


def _sizes(table: Path) -> dict[str, int]:
    """The sizes in a table of /proc, in bytes."""
    lines = (line.split(":", 1) for line in table.read_text().splitlines() if line.endswith(" kB"))
    return {name: int(size.split()[0]) * 1024 for name, size in lines}


def available_memory() -> int | None:
    """Return the bytes that this machine, or the container around this process, has left; None: it does not tell."""
    free: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        pages = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        if limit != "max":
            free.append(int(limit) - used + int(pages.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return min(free, default=None)
