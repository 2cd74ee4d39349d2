"""Weight sync as a backend of verl's: from the trainer's ranks to the rollout, through memory, a process group or a
folder. A receiver checks all digests before a version is whole.

The plug-in calls `register`; then verl's `CheckpointEngineManager` calls the engines. Importing this package loads
neither torch nor verl.
"""

from __future__ import annotations

import contextlib
import os

BACKEND = "trinity"
"""The name under which verl finds it: ``checkpoint_engine.backend=trinity``."""

NO_GATHER = "delta_sharded"
"""The one backend name for which verl passes the training engine, and not gathered tensors."""

NO_GATHER_VARIABLE = "TRINITY_SYNC_NO_GATHER"


def register() -> None:
    """Register the backend with verl. May be called again.

    With ``TRINITY_SYNC_NO_GATHER=1`` in the environment it also takes the name `NO_GATHER` from verl's own engine;
    ConfigError: the variable is neither 0 nor 1.
    """
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from trinity_sync.errors import ConfigError
    from trinity_sync.integrations.verl.weight_sync.checkpoint_engine import ShardedWeightSync, WeightSync

    CheckpointEngineRegistry.register(BACKEND)(WeightSync)
    asked = os.environ.get(NO_GATHER_VARIABLE, "0")
    if asked not in ("0", "1"):
        raise ConfigError(f"{NO_GATHER_VARIABLE}={asked}: set it to 1 to send without a gather, or to 0")
    if asked == "1":
        with contextlib.suppress(ImportError):  # imported later, it would take the name back
            import verl.checkpoint_engine.delta_checkpoint_engine  # noqa: F401
        CheckpointEngineRegistry.register(NO_GATHER)(ShardedWeightSync)
