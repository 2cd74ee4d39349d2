"""What `save_pretrained` of an engine's model would write: what the versions of every backend have to consist of.

Worked out from the architecture alone, on a model without storage, so that what a backend does not know to map is
missed.
"""

from __future__ import annotations

import copy

import torch

from trinity_sync.backends.engines import ModelConfig
from trinity_sync.weights.tensors import Saved, saved_list, wire_name


def saved_by(model_config: ModelConfig, wire_dtype: str) -> dict[str, Saved]:
    """Return the tensors that `save_pretrained` would write, by name.

    Args:
        model_config: the model config of verl's engine.
        wire_dtype: the dtype in which floating tensors travel, as safetensors names it.
    """
    from verl.utils.model import get_hf_auto_model_class

    config = copy.deepcopy(model_config.hf_config)
    with torch.device("meta"):
        # it computes nothing, so it does without the kernels that the engine's config may name
        model = get_hf_auto_model_class(hf_config=config).from_config(
            config, trust_remote_code=model_config.trust_remote_code, attn_implementation="eager"
        )
    saved = saved_list(model)
    return {name: tensor._replace(dtype=wire_name(tensor.dtype, wire_dtype)) for name, tensor in saved.items()}
