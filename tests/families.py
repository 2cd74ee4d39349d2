"""A tiny model of each family that people train: what `model.architecture` says of it."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 24}
OF_DEEPSEEK = _ROUTED | {
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""What a DeepSeek-V3 has beside what a plain model has: experts, and heads of their own kind."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 8},
    "llama": _COMMON,
    "mistral": _COMMON,
    "gemma2": _COMMON | {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": _COMMON
    | {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": _COMMON,
    "glm4": _COMMON | {"head_dim": 8},
    "olmo2": _COMMON,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen2_moe": _COMMON | _EXPERTS | _SHARED,
    "qwen3_moe": _COMMON | _EXPERTS | {"head_dim": 8},
    "mixtral": _COMMON | _LOCAL,
    "deepseek_v3": _COMMON | OF_DEEPSEEK | {"num_key_value_heads": 4},
    "glm4_moe": _COMMON | _ROUTED | {"n_group": 1, "topk_group": 1, "head_dim": 8},
    "gpt_oss": _COMMON | _LOCAL | {"head_dim": 8, "sliding_window": 8},
    "granitemoe": _COMMON | _LOCAL,
    "qwen3_next": _COMMON
    | _EXPERTS
    | _SHARED
    | {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""By `model_type` of transformers: the other fields of the config."""

_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = _WIDTHS | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10000.0}
_MARKS = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 28, "vision_end_token_id": 29}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _TOWER | _LAYERS,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": _TOWER | _LAYERS | {"model_type": "pixtral", "head_dim": 16},
        "image_token_index": 30,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_scaling": _ROPE},
        "vision_config": _TOWER | _QWEN | {"deepstack_visual_indexes": [0]},
        **_MARKS,
    },
    "qwen3_5": {
        "text_config": TEXT | _LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        "vision_config": _TOWER | _QWEN,
        **_MARKS,
    },
}
"""Families for images and text, whose towers stay as they are: the fields of the config."""

REFUSED = ("qwen2_5_vl", "qwen3_5_moe")
"""Families of which docs/models.md says that they are refused, beside those above."""

EXPERTS = [
    "model.architecture.model_type=qwen3_moe",
    "+model.architecture.num_experts=4",
    "+model.architecture.num_experts_per_tok=2",
    "+model.architecture.moe_intermediate_size=64",
    "+model.architecture.norm_topk_prob=true",
]
"""What makes the default model of a run one with experts, on the command line."""

EAGER = {"gemma2", "gpt_oss"}
"""Those that transformers computes as their config says with `attn_implementation=eager` only, on a CPU."""


def architecture(family: str) -> dict[str, Any]:
    """What `make_model` takes."""
    return {"model_type": family, **FAMILIES[family]}
