"""The wait of a test for a condition, with a limit."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once `holds` gives a true value; raises AssertionError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {holds}"
        time.sleep(0.01)
