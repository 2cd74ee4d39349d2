"""verl's Megatron engine as this project runs it. Importing this registers it with verl under `DEVICE`.

The engine is verl's own, except for the weight decay, non-finite gradients, and the CPU: there each of its calls runs
inside `CudaMeansCpu`. The import registers the bridges too.
"""

from __future__ import annotations

import math
import os
import warnings

import torch

from trinity_sync.backends.megatron import cpu
from trinity_sync.backends.megatron.optimizer_state import leave_out_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns about each accelerated part that is not installed
    from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
    from verl.utils.megatron.optimizer import init_megatron_optim_config
    from verl.utils.megatron_utils import register_megatron_training_hooks
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

    def _build_optimizer(self) -> MegatronOptimizer:
        """Build it as verl does, but decay all weights.

        verl's FSDP engines do so too, because flat parameters cannot be told apart. megatron-core would leave out norms
        and biases.
        """
        config = init_megatron_optim_config(
            self.optimizer_config,
            use_distributed_optimizer=self.engine_config.use_distributed_optimizer,
            fp16=self.param_dtype == torch.float16,
            bf16=self.param_dtype == torch.bfloat16,
        )
        overrides = get_standard_config_overrides(config)
        decaying = {key: override for key, override in overrides.items() if "wd_mult" not in override}
        optimizer = get_megatron_optimizer(config, self.module, decaying)
        register_megatron_training_hooks(self.module, optimizer)
        leave_out_scale(optimizer)
        return optimizer

    def optimizer_step(self) -> float:
        """Step as verl does, but skip the step for a non-finite gradient, as verl's FSDP engines do. Returns the norm
        of the gradient before clipping; nan for a skipped step.
        """
        changed, norm, _ = self.optimizer.step()
        return float(norm) if changed else math.nan


def prepare() -> None:
    """Have verl build this engine in this process, and on a machine without an accelerator install the CPU adapter."""
    os.environ["VERL_ENGINE_DEVICE"] = DEVICE
    if torch.cuda.is_available() or "initialize" in vars(MegatronEngine):
        return
    cpu.install()
    for name in _CALLS:
        setattr(MegatronEngine, name, cpu.inside_mode(getattr(MegatronEngine, name)))
