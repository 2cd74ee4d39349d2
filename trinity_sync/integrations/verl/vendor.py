"""The names by which verl programs choose us, and how we print in them."""

from __future__ import annotations

import contextlib
import os
import sys

VENDOR = "trinity"
"""The value of `VERL_ENGINE_VENDOR`."""

RETENTION = "TRINITY_SYNC_RETENTION"
"""The variable with retention policies, such as ``keep_last.n=2 keep_every.steps=100``."""

MEMORY_INTERVAL = "TRINITY_SYNC_MEMORY_INTERVAL"
"""The variable with the steps between states in memory."""

SHM_DIR = "TRINITY_SYNC_SHM_DIR"
"""The variable with the place of states in memory."""

TESTED = (0, 9)
"""The version of verl for which the plug-in is written and tested, without its last part."""

CALLBACK = "trinity_sync.integrations.verl.callback.CheckpointCallback"
"""The value of `trainer.checkpoint_callback_class`."""

PLUGIN = "trinity_sync.integrations.verl.plugin"
"""The value of `VERL_USE_EXTERNAL_MODULES`."""


def is_tested(version: str) -> bool:
    """Return whether the plug-in is on with this version of verl."""
    return tuple(version.split(".")[: len(TESTED)]) == tuple(map(str, TESTED))


def is_on() -> bool:
    """Return whether this process is to use our engines."""
    return os.environ.get("VERL_ENGINE_VENDOR") == VENDOR


def say(text: str) -> None:
    """Print to standard error, in a program whose logging is verl's; do nothing if that is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"trinity-sync: {text}", file=sys.stderr, flush=True)
