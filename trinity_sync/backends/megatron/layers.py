"""Layers of megatron-core as transformers has them.

For models without Transformer Engine, on a CPU or on a GPU where it is not installed, megatron-core has a "local"
specification of a layer itself; two of its modules do not fit and are replaced here.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import VocabParallelEmbedding, scatter_to_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

# The router asks whether there is Transformer Engine by a name that megatron-core 0.16 only defines if there is.
vars(moe_utils).setdefault("te_general_gemm", None)


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm that takes part in sequence parallelism, which megatron-core's own wrapper of torch's refuses.

    Each tensor-parallel rank normalises its slice of the sequence, so the gradients of the weight have to be summed
    over them; megatron-core does that for weights with this mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(DotProductAttention):
    """Unfused causal attention that ignores the padding mask verl passes, as Transformer Engine does.

    verl's mask is true where a token is, megatron-core's where none may be looked at. Rows are padded on the right, so
    causality alone keeps tokens from seeing padding.
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
    """The layers of this pipeline stage, without Transformer Engine.

    Args:
        config: the model's configuration; RMSNorm, attention without latent heads.
        vp_stage: virtual pipeline stage, None for the only one.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
        if config.num_moe_experts:  # Transformer Engine does not fuse this norm then, and a checkpoint has its own name
            parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        attention = parts.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    block.layer_norm = RmsNorm
    return block


def freeze_padding(embedding: VocabParallelEmbedding, token: int) -> None:
    """Leave the row of the padding token as it is, as transformers' embeddings do. A new model has zeros there, which a
    norm makes a gradient of that is many times that of all others: samples of such a model have the token, too.

    Args:
        embedding: of the words; also the output layer of a model that shares it, which then trains the row.
        token: id of the padding token.
    """

    def freeze(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        padding = inputs[0] == token
        if embedding.reduce_scatter_embeddings:  # of shape (sequence, batch), and of the sequence this rank's share
            padding = scatter_to_sequence_parallel_region(padding.transpose(0, 1))
        return torch.where(padding[..., None], output.detach(), output)

    embedding.register_forward_hook(freeze)
