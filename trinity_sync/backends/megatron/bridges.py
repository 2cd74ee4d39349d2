"""The model families that the Megatron backend trains, as bridges for mbridge, and the shards of their parameters.

Each bridge takes over a family in mbridge's registry. Their base (`TrinityBridge`) fills gaps of mbridge 0.15.1: layers
without Transformer Engine, tied embeddings in every family, the rotary embedding as transformers 5 writes it, and a
vocabulary that the tensor-parallel ranks do not divide.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import VocabParallelEmbedding, scatter_to_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from trinity_sync.backends.megatron.megatron_families import FAMILIES, WITH_EXPERTS, dense_layers
from trinity_sync.errors import ConfigError
from trinity_sync.weights.shards import Rect, Shard, listed, row_slice, whole
from trinity_sync.weights.wire import FP32, WireFormat

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


_Output = tuple[torch.Tensor, torch.Tensor | None]
"""Logits, and a bias that is not added to them yet."""

_log = logging.getLogger(__name__)

# A vocabulary padded to a multiple of this has the same size in checkpoints of all usual tensor-parallel sizes.
_VOCABULARY_MULTIPLE = 8

# Logit of a padding row of the vocabulary: no probability, and no infinity that could turn into a nan.
_NO_LOGIT = -1e4

# Llama 3's constants in the scaling of the rotary embedding; megatron-core has them built in.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@cache
def has_transformer_engine() -> bool:
    """Return whether layers of Transformer Engine are available; on a GPU without it, log the replacement once."""
    found = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if torch.cuda.is_available() and not found:
        _log.warning(
            "transformer-engine is not installed: backend=megatron uses megatron-core's own layers, which are slower"
        )
    return found


class TrinityBridge(LLMBridge):
    """Base of all families. Constructed by mbridge's `AutoBridge`, on all ranks."""

    _DIRECT_MAPPING: dict[str, str]

    # Names of norms in layers without Transformer Engine, which would fuse a norm into the next linear layer.
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
    """Base of families with experts. An expert's tensors are cut over as many ranks as the other layers."""

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: object) -> TransformerConfig:
        kwargs |= {
            "moe_router_dtype": "fp32",
            # mbridge always weights the chosen experts by a softmax over them alone
            "moe_router_pre_softmax": not self.hf_config.norm_topk_prob,
        }
        if not has_transformer_engine():
            # torch would compile the fused one again for each number of an expert's tokens
            kwargs |= {"moe_grouped_gemm": False, "bias_activation_fusion": False}
        return super()._build_base_config(text_config_key, **kwargs)

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        """Extend mbridge, which knows only Transformer Engine's names of experts."""
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
                    # megatron-core does this for more than one expert-parallel rank only. A checkpoint then has a
                    # separate optimizer of the experts, which one rank could not load.
                    parameter.allreduce = False  # type: ignore[attr-defined]
            return model

        return provider


@register_model("qwen3_moe")
class Qwen3Moe(ExpertsBridge, Qwen3MoEBridge):
    """Qwen3 with experts in every layer."""


def check_architecture(config: PretrainedConfig) -> None:
    """Raise a `ConfigError` for a model that would be built or named wrongly."""
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
    """Raise a `ConfigError` if the expert-parallel ranks do not divide the experts.

    The driver checks this only for a model in a folder.
    """
    count = config.num_experts if config.model_type in WITH_EXPERTS else 0
    if ranks > 1 and (count == 0 or count % ranks):
        raise ConfigError(f"backend.ep is {ranks}; it must divide the model's num_experts ({count})")


def rotary_arguments(config: PretrainedConfig) -> Mapping[str, object]:
    """Return the rotary embedding as arguments of megatron-core's `GPTModel`, or raise a `ConfigError` for an unknown
    scaling.
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
    """Keep the padding rows of the vocabulary out of the softmax. They get no gradient, so they stay zero."""
    local = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    valid = vocabulary - parallel_state.get_tensor_model_parallel_rank() * local
    if valid >= local:
        return
    padding = torch.arange(local) >= valid

    def silence(module: torch.nn.Module, inputs: object, output: _Output) -> _Output:
        logits, bias = output
        return logits.masked_fill(padding.to(logits.device), _NO_LOGIT), bias

    model.output_layer.register_forward_hook(silence)


# megatron-core 0.16 defines this name only with Transformer Engine, but the router always reads it.
vars(moe_utils).setdefault("te_general_gemm", None)


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm with sequence parallelism, which megatron-core's own wrapper of torch's refuses.

    Each tensor-parallel rank normalises its slice of the sequence, so the gradients of the weight have to be summed
    over them; megatron-core does that for weights with this mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(DotProductAttention):
    """Unfused causal attention that ignores verl's padding mask, as Transformer Engine does.

    verl's mask is true for tokens, megatron-core's for forbidden positions. Rows are padded on the right, so causality
    alone keeps tokens from seeing padding.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        assert (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal, "decoders attend causally"
        found: torch.Tensor = super().forward(query, key, value, None, attn_mask_type=attn_mask_type, **kwargs)
        return found


def local_layers(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, without Transformer Engine."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
        if config.num_moe_experts:  # Transformer Engine does not fuse this norm, so a checkpoint has the plain name
            parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        attention = parts.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    block.layer_norm = RmsNorm
    return block


def freeze_padding(embedding: VocabParallelEmbedding, token: int) -> None:
    """Keep the row of the padding token unchanged, as transformers' embeddings do.

    A new model has zeros there, and through a norm their gradient would be many times that of all others: samples of
    such a model contain the token, too.
    """

    def freeze(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        padding = inputs[0] == token
        if embedding.reduce_scatter_embeddings:  # of shape (sequence, batch), this rank's share of the sequence
            padding = scatter_to_sequence_parallel_region(padding.transpose(0, 1))
        return torch.where(padding[..., None], output.detach(), output)

    embedding.register_forward_hook(freeze)


# The rectangles of Hugging Face tensors in a local Megatron parameter, and their places in it.

# An expert's parameter where each expert is a module of its own, and where all are parameters of one.
_OWN_MODULE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)$")
_NUMBERED = re.compile(r"(\.experts\.linear_fc\d\.weight)(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The facts that determine the cut of a model."""

    heads: int  # query heads
    groups: int  # key and value heads
    head_size: int
    vocabulary: int  # rows of the embedding, without padding
    tp_rank: int
    tp_size: int


@dataclass(frozen=True)
class LocalShard:
    """A shard, and a view of its elements in the local parameter, in the shard's order."""

    shard: Shard
    view: Callable[[torch.Tensor], torch.Tensor]


def dtypes_of(hf_names: Iterable[str], held: str, wire: WireFormat) -> dict[str, str]:
    """Return the wire dtypes of the Hugging Face tensors in a local parameter of dtype `held`."""
    found = {name: wire.of(name, held) for name in hf_names}
    rounded = sorted(name for name, dtype in found.items() if dtype == FP32 not in (held, wire.dtype))
    if rounded:
        raise ConfigError(
            f"sync.keep_fp32 keeps {listed(rounded)} in fp32, but backend=megatron trains in {held} with a master "
            "copy of its own; use backend=fsdp2, or leave it out (sync.keep_fp32=[] keeps nothing)"
        )
    return found


def pieces(
    name: str, hf_names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry
) -> list[LocalShard]:
    """Return this rank's contribution of a local parameter; nothing where it only repeats another rank's. `name`:
    megatron-core's, such as ``"decoder.layers.0.mlp.linear_fc1.weight"``. `dtypes`: the wire dtypes of the tensors by
    name, see `dtypes_of`. Raises NotImplementedError for an unknown kind of parameter.
    """
    name = _NUMBERED.sub(r"\1", name)
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        found = _vocabulary(hf_names[0], shape, dtypes, at)
    elif name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        found = _attention(hf_names, shape, dtypes, at)
    elif name.endswith("linear_fc1.weight"):
        found = _gate_and_up(hf_names, shape, dtypes, at)
    elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        found = [_columns(hf_names[0], shape, dtypes, at)]
    elif name.endswith(("norm.weight", "layer_norm_weight", "router.weight")):
        found = [LocalShard(whole(hf_names[0], dtypes[hf_names[0]], shape), _itself)] if at.tp_rank == 0 else []
    else:
        raise NotImplementedError(f"{name}: no rule says how tensor-parallel ranks share it")
    return [piece for piece in found if piece.shard.rects]


def among_all_experts(name: str, first: int) -> str:
    """Return an expert's parameter name with its number among the experts of all expert-parallel ranks; others
    unchanged.
    """
    numbered = _OWN_MODULE.sub(r".experts.\2\1", name)
    return _NUMBERED.sub(lambda found: f"{found[1]}{first + int(found[2])}", numbered)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rows(
    name: str, full: Sequence[int], dtypes: Mapping[str, str], at: Geometry, view: Callable[..., torch.Tensor]
) -> LocalShard:
    count = full[0] // at.tp_size
    return LocalShard(row_slice(name, dtypes[name], full, at.tp_rank * count, (at.tp_rank + 1) * count), view)


def _vocabulary(name: str, shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> list[LocalShard]:
    start = at.tp_rank * shape[0]
    stop = min(start + shape[0], at.vocabulary)
    if stop <= start:
        return []
    shard = row_slice(name, dtypes[name], (at.vocabulary, *shape[1:]), start, stop)
    return [LocalShard(shard, lambda local: local[: stop - start])]


def _attention(names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> list[LocalShard]:
    per_group = at.heads // at.groups
    spans = ((0, per_group), (per_group, per_group + 1), (per_group + 1, per_group + 2))

    def part(first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda local: local.view(-1, per_group + 2, at.head_size, *shape[1:])[:, first:last]

    return [
        _rows(name, (at.groups * (last - first) * at.head_size, *shape[1:]), dtypes, at, part(first, last))
        for name, (first, last) in zip(names, spans, strict=True)
    ]


def _gate_and_up(
    names: Sequence[str], shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry
) -> list[LocalShard]:
    half = shape[0] // 2
    views = (lambda local: local[:half], lambda local: local[half:])
    full = (half * at.tp_size, *shape[1:])
    return [_rows(name, full, dtypes, at, view) for name, view in zip(names, views, strict=True)]


def _columns(name: str, shape: Sequence[int], dtypes: Mapping[str, str], at: Geometry) -> LocalShard:
    rows, columns = shape
    rect = Rect(0, 0, at.tp_rank * columns, rows, columns)
    return LocalShard(Shard(name, dtypes[name], (rows, columns * at.tp_size), (rect,)), _itself)
