"""Which model families the Megatron backend trains, and how mbridge builds them.

Each class takes over a family in mbridge's registry. What they have in common (`TrinityBridge`) mends what mbridge
0.15.1 leaves open: layers without Transformer Engine, tied embeddings in every family, the rotary embedding as
transformers 5 writes it, and a vocabulary that the tensor-parallel ranks do not divide.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from mbridge.core import register_model
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state
from transformers import PretrainedConfig

from trinity_sync.backends.megatron.families import FAMILIES, WITH_EXPERTS, dense_layers
from trinity_sync.backends.megatron.layers import freeze_padding, local_layers
from trinity_sync.backends.megatron.placement import among_all_experts
from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

_Output = tuple[torch.Tensor, torch.Tensor | None]
"""Logits, and a bias that was not added to them."""

_log = logging.getLogger(__name__)

# A vocabulary padded to a multiple of this has the same size in checkpoints of all usual tensor-parallel sizes.
_VOCABULARY_MULTIPLE = 8

# Logit of a padding row of the vocabulary: no probability, and no infinity that could turn into a nan.
_NO_LOGIT = -1e4

# What Llama 3 fixes in its scaling of the rotary embedding; megatron-core has these numbers built in.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@cache
def has_transformer_engine() -> bool:
    """Whether layers of Transformer Engine can be had; on a GPU without it, says once what is used instead."""
    found = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if torch.cuda.is_available() and not found:
        _log.warning(
            "transformer-engine is not installed: backend=megatron uses megatron-core's own layers, which are slower"
        )
    return found


class TrinityBridge(LLMBridge):
    """What all families have in common. Constructed by mbridge's `AutoBridge`, on all ranks."""

    _DIRECT_MAPPING: dict[str, str]

    # Names that layers without Transformer Engine have, where it would fuse the norm into the linear layer behind it.
    _OTHER_MAPPING: ClassVar[dict[str, list[str]]] = {
        "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }

    def __init__(self, hf_config: PretrainedConfig, **kwargs: object) -> None:
        check_architecture(hf_config)
        check_experts(hf_config, parallel_state.get_expert_model_parallel_world_size())
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        kwargs.setdefault("make_vocab_size_divisible_by", math.lcm(_VOCABULARY_MULTIPLE, ranks))
        super().__init__(hf_config, **kwargs)

    def _adjust_mapping_for_shared_weights(self) -> None:
        # mbridge does this for Qwen only, and on the class, where it also hits the next, untied model.
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": "model.embed_tokens.weight"}

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        names: list[str]
        if mcore_weights_name.endswith("pre_mlp_layernorm.weight"):
            names = self._weight_name_mapping_other(mcore_weights_name)  # mbridge would look among the mlp's weights
        else:
            names = super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        return names

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        if has_transformer_engine():
            return super()._get_transformer_layer_spec(vp_stage)
        self.has_vp_stage = True
        return local_layers(self.config, vp_stage)

    def _get_gptmodel_args(self) -> dict[str, object]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **rotary_arguments(self.hf_config),
        }

    def _model_provider(
        self, post_model_creation_callbacks: list[Callable[[torch.nn.Module], object]]
    ) -> Callable[..., torch.nn.Module]:
        provide = super()._model_provider(post_model_creation_callbacks)

        def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
            model: torch.nn.Module = provide(pre_process, post_process, vp_stage)
            if pre_process and self.hf_config.pad_token_id is not None:
                freeze_padding(model.get_submodule("embedding.word_embeddings"), self.hf_config.pad_token_id)
            if post_process:
                _silence_padding(model, self.hf_config.vocab_size)
            return model

        return provider


@register_model("qwen3")
class Qwen3(TrinityBridge, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen2")
class Qwen2(TrinityBridge, Qwen2Bridge):
    """Qwen2 and Qwen2.5, dense."""


@register_model("llama")
class Llama(TrinityBridge, LLaMABridge):
    """Llama 2 and 3."""


class ExpertsBridge(TrinityBridge):
    """What families with experts have in common. An expert's tensors are cut over as many ranks as those beside it."""

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: object) -> TransformerConfig:
        kwargs |= {
            "moe_router_dtype": "fp32",
            # mbridge always weights the chosen experts by a softmax over them alone
            "moe_router_pre_softmax": not self.hf_config.norm_topk_prob,
        }
        if not has_transformer_engine():
            # the fused one is compiled by torch, anew for each number of tokens that an expert gets
            kwargs |= {"moe_grouped_gemm": False, "bias_activation_fusion": False}
        return super()._build_base_config(text_config_key, **kwargs)

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        """mbridge knows experts only as Transformer Engine names them."""
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        first = self.mpu.ep_rank * self.config.num_moe_experts // self.mpu.ep_size if consider_ep else 0
        return {local: among_all_experts(name, first) for local, name in names.items()}

    def _model_provider(
        self, post_model_creation_callbacks: list[Callable[[torch.nn.Module], object]]
    ) -> Callable[..., torch.nn.Module]:
        provide = super()._model_provider(post_model_creation_callbacks)

        def provider(*args: object, **kwargs: object) -> torch.nn.Module:
            model = provide(*args, **kwargs)
            for name, parameter in model.named_parameters():
                if ".mlp.experts." in name:
                    # megatron-core says so for more than one expert-parallel rank only; a checkpoint holds the
                    # optimizer of the experts apart then, and could not be loaded by the other kind
                    parameter.allreduce = False  # type: ignore[attr-defined]
            return model

        return provider


@register_model("qwen3_moe")
class Qwen3Moe(ExpertsBridge, Qwen3MoEBridge):
    """Qwen3 with experts in every layer."""


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse a model that would be built or named wrongly.

    Raises:
        ConfigError: says what the model has and what is supported.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model: backend=megatron trains {', '.join(FAMILIES)}, and this model is of the family "
            f"{config.model_type}; use backend=fsdp2"
        )
    problems = {
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        **dense_layers(config.to_dict()),
    }
    found = [name for name, is_one in problems.items() if is_one]
    if found:
        raise ConfigError(f"model: backend=megatron does not know models with {', '.join(found)}; use backend=fsdp2")


def check_experts(config: PretrainedConfig, ranks: int) -> None:
    """Refuse experts that the expert-parallel ranks do not divide. The driver sees this of a model in a folder only.

    Raises:
        ConfigError: names `backend.ep` and how many experts there are.
    """
    count = config.num_experts if config.model_type in WITH_EXPERTS else 0
    if ranks > 1 and (count == 0 or count % ranks):
        raise ConfigError(f"backend.ep is {ranks}; it must divide the model's num_experts ({count})")


def rotary_arguments(config: PretrainedConfig) -> dict[str, object]:
    """The rotary embedding as arguments of megatron-core's `GPTModel`.

    Raises:
        ConfigError: a scaling that megatron-core does not have.
    """
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    base = {"rotary_base": rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return base
    if kind == "linear":
        return {**base, "seq_len_interpolation_factor": rope["factor"]}
    if kind == "llama3" and all(rope.get(name) == value for name, value in _LLAMA3_ROPE.items()):
        return {**base, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    raise ConfigError(f"model: backend=megatron does not know the rotary embedding {rope}; use backend=fsdp2")


def _silence_padding(model: GPTModel, vocabulary: int) -> None:
    """Keep the rows that pad the vocabulary out of the softmax. They get no gradient, so they stay zero."""
    local = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    valid = vocabulary - parallel_state.get_tensor_model_parallel_rank() * local
    if valid >= local:
        return
    padding = torch.arange(local) >= valid

    def silence(module: torch.nn.Module, inputs: object, output: _Output) -> _Output:
        logits, bias = output
        return logits.masked_fill(padding.to(logits.device), _NO_LOGIT), bias

    model.output_layer.register_forward_hook(silence)
