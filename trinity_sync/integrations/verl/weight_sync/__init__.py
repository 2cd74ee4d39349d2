"""Weight sync as a backend of verl's: from the trainer's ranks to the rollout, through memory, a process group or a
folder, with digests that are checked before a version is whole at a receiver.

verl's `CheckpointEngineManager` calls it; `register` makes it known to verl, which the plug-in calls.
Importing this package loads neither torch nor verl.
"""

from __future__ import annotations

import contextlib
import os

BACKEND = "trinity"
"""The name under which verl finds it: ``checkpoint_engine.backend=trinity``."""

NO_GATHER = "delta_sharded"
"""The one backend name for which verl hands over the training engine, and no tensors that it has gathered."""

NO_GATHER_VARIABLE = "TRINITY_SYNC_NO_GATHER"


def register() -> None:
    """Make the backend known to verl. May be called again.

    With ``TRINITY_SYNC_NO_GATHER=1`` in the environment also under the name `NO_GATHER`, in place of verl's own engine
    of that name.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from trinity_sync.errors import ConfigError
    from trinity_sync.integrations.verl.weight_sync.engine import ShardedWeightSync, WeightSync

    CheckpointEngineRegistry.register(BACKEND)(WeightSync)
    asked = os.environ.get(NO_GATHER_VARIABLE, "0")
    if asked not in ("0", "1"):
        raise ConfigError(f"{NO_GATHER_VARIABLE}={asked}: set it to 1 to send without a gather, or to 0")
    if asked == "1":
        with contextlib.suppress(ImportError):  # as verl does; imported later, it would take the name back
            import verl.checkpoint_engine.delta_checkpoint_engine  # noqa: F401
        CheckpointEngineRegistry.register(NO_GATHER)(ShardedWeightSync)
