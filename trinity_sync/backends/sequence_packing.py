"""The models that support sequences packed without padding, one after another in one row (`trainer.remove_padding`).

Imports nothing heavy, because the checks of a configuration use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ATTENTION = "trinity_packed"
"""Name of the attention for transformers in place of sdpa, see `trinity_sync.backends.packed_attention`."""

FAMILIES = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "granitemoe",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model families of transformers whose log-probs were compared, packed and padded."""


def unpackable(model: Mapping[str, object], attention: str) -> str | None:
    """Return why a model does not support packed sequences; None: it does."""
    if attention == "eager":
        return "model.attn_implementation is eager, which sees across the ends of packed sequences"
    family = model.get("model_type")
    if family not in FAMILIES:
        return f"models of the family {family} are not among those that were tried so ({', '.join(FAMILIES)})"
    layers = model.get("layer_types")
    windowed = [kind for kind in layers if kind != "full_attention"] if isinstance(layers, Sequence) else []
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    if windowed or (not layers and window is not None):
        return f"the model has layers of {windowed[0] if windowed else 'sliding_attention'}, which are padded only"
    return None
