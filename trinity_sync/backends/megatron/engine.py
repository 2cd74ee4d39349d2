"""verl's Megatron engine as this project runs it. Importing this registers it with verl under `DEVICE`.

The engine is verl's own and unchanged but for the CPU: there each of its calls runs inside `CudaMeansCpu`. Bridges come
with the import.
"""

from __future__ import annotations

import os
import warnings

import torch

from trinity_sync.backends.megatron import cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core tells of each accelerated part that is not installed
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from trinity_sync.backends.megatron import bridges  # noqa: F401 - registers the families

# verl chooses an engine by this variable's value, before the device that it finds.
DEVICE = "trinity"

_CALLS = (
    "__init__",
    "initialize",
    "to",
    "forward_backward_batch",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "save_checkpoint",
    "load_checkpoint",
)


@EngineRegistry.register(model_type="language_model", backend="megatron", device=DEVICE)
class MegatronEngine(MegatronEngineWithLMHead):
    """A rank's engine. All its calls are collective."""


def prepare() -> None:
    """Have verl build this engine in this process, and on a machine without an accelerator install the CPU adapter."""
    os.environ["VERL_ENGINE_DEVICE"] = DEVICE
    if torch.cuda.is_available() or "initialize" in vars(MegatronEngine):
        return
    cpu.install()
    for name in _CALLS:
        setattr(MegatronEngine, name, cpu.inside_mode(getattr(MegatronEngine, name)))
