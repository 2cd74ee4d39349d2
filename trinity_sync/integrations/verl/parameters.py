"""The weights that one of verl's engines hands out for explorers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trinity_sync.backends.engines import Engine
from trinity_sync.errors import ConfigError


def parameters(engine: Engine) -> Iterable[tuple[str, torch.Tensor]]:
    """Return (name, full tensor) of all of them, in the engine's order. All ranks go through them.

    Args:
        engine: any of verl's.

    Raises:
        ConfigError: on every rank, where what is trained is not among them.
    """
    tensors, adapters = engine.get_per_tensor_param()
    if adapters is not None:
        raise ConfigError(
            "the model is trained with LoRA adapters, and the engine hands out the frozen weights without them, so "
            "explorers would have the first version for ever: set verl's model.lora.merge=true to send merged weights"
        )
    return tensors
