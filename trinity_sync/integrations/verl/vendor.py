"""By which word verl's programs ask for us, and how we speak in them."""

from __future__ import annotations

import contextlib
import os
import sys

VENDOR = "trinity"
"""What `VERL_ENGINE_VENDOR` names."""

RETENTION = "TRINITY_SYNC_RETENTION"
"""The variable with retention policies, such as ``keep_last.n=2 keep_every.steps=100``."""

TESTED = (0, 9)
"""The version of verl that the plug-in was written for and is tested with, without its last part."""

CALLBACK = "trinity_sync.integrations.verl.callback.CheckpointCallback"
"""What `trainer.checkpoint_callback_class` names."""

PLUGIN = "trinity_sync.integrations.verl.plugin"
"""What `VERL_USE_EXTERNAL_MODULES` names."""


def is_tested(version: str) -> bool:
    """Whether the plug-in is on with this version of verl."""
    return tuple(version.split(".")[: len(TESTED)]) == tuple(map(str, TESTED))


def is_on() -> bool:
    """Whether verl's engines are to be ours, in this process."""
    return os.environ.get("VERL_ENGINE_VENDOR") == VENDOR


def say(text: str) -> None:
    """Say something where the user looks, in a program whose logging is verl's; nothing where that is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"trinity-sync: {text}", file=sys.stderr, flush=True)
