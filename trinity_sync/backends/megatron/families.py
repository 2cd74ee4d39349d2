"""Which models `backend=megatron` trains. Imports nothing, since the checks of a configuration ask, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model families of transformers; `bridges` has a bridge for each."""

WITH_EXPERTS = ("qwen3_moe",)
"""Those whose layers are mixtures of experts, in every layer."""


def dense_layers(model: Mapping[str, Any]) -> dict[str, bool]:
    """Fields that leave some layers without experts, or route to one alone: whether a model of this kind has it.

    Args:
        model: the fields of its Hugging Face config.
    """
    if model.get("model_type") not in WITH_EXPERTS:
        return {}
    return {
        "mlp_only_layers": bool(model.get("mlp_only_layers")),
        "decoder_sparse_step": model.get("decoder_sparse_step", 1) != 1,
        "num_experts_per_tok=1": model.get("num_experts_per_tok") == 1 and bool(model.get("norm_topk_prob")),
    }
