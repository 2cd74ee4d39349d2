"""A trainer rank's verl engine in this process, for `agreement.py` and `training.py`."""

from __future__ import annotations

from typing import Any

from trinity_sync.trainer.worker_spec import WorkerSpec


def verl_engine(spec: WorkerSpec) -> Any:
    """Return the initialised engine of a worker."""
    from verl.workers.engine import EngineRegistry

    from trinity_sync.trainer.worker import worker_config

    config = worker_config(spec)
    engine = EngineRegistry.new(
        "language_model",
        spec.backend.strategy,
        model_config=config.model_config,
        engine_config=config.engine_config,
        optimizer_config=config.optimizer_config,
        checkpoint_config=config.checkpoint_config,
    )
    engine.initialize()
    return engine
