"""A process that is killed before it has reported."""

from __future__ import annotations

import os
import signal


def serve(given: bytes, report: object) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
