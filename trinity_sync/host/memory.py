"""Peak memory of a process, for summary.json. Every actor reports its own; the driver collects them by role."""

from __future__ import annotations

import resource
import sys


def peak_rss() -> int:
    """Return the largest resident set this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes (getrusage(2) of each).
    return peak if sys.platform == "darwin" else peak * 1024
