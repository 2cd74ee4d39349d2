"""Peak memory of a process, for summary.json. Every actor reports its own; the driver collects them by role."""

from __future__ import annotations

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
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":", 1) for line in lines)}
        return peak_rss() - (sizes["Rss"] - sizes["Pss"])
    except (OSError, ValueError, KeyError):
        return peak_rss()
