"""Models of transformers without weights: what versions are loaded into, and what shapes are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers
from transformers.initialization import no_init_weights

from trinity_sync.models.families import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def unfilled_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    attn_implementation: str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make a causal language model whose parameters are not filled; buffers that no checkpoint holds have their values.

    What transformers raises where it has no such model is passed on.

    Args:
        config: of the model.
        dtype: of its floating tensors.
        device: where; ``"meta"`` for none.
        attn_implementation: the attention, as transformers names it.
        trust_remote_code: whether code that comes with the model may run.
    """
    kind = getattr(transformers, auto_class(config.to_dict()))
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = kind.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    # a part of the initialisation that was left out
    model.tie_weights()
    return model.eval().requires_grad_(False)
