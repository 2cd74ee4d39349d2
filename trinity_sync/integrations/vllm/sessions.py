"""What vLLM's layerwise reload leaves behind when it does not come to its end, put right; and what it does not tell."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info


def give_back(model: torch.nn.Module) -> None:
    """Give each layer that waits for weights the tensors back that it computed with, and forget what came for it.

    vLLM leaves such layers without memory, and a later session would take what came before for its own. The tensors
    hold weights of several versions then: nobody may generate before a whole version is in.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def unfilled(model: torch.nn.Module) -> list[str]:
    """Names of parameters, within a session, of layers that still wait for weights. vLLM would fill them with what
    is in memory, or leave them as they were.

    Args:
        model: the model; what came for it has been handed to its `load_weights`.
    """
    waiting = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # A layer that has all of its weights is in no session any more; that of attention has none to wait for.
        if not info.can_load() or is_deferred_attention_layer(layer) or _holds_padding(layer, info.load_numel):
            continue
        waiting += [f"{name}.{one}" if name else one for one, _ in layer.named_parameters(recurse=False)]
    return sorted(waiting)


def _holds_padding(layer: torch.nn.Module, loaded: int) -> bool:
    """Tell whether a layer is (a share of) a vocabulary, of which all but padding may be there."""
    return isinstance(layer, VocabParallelEmbedding) and (loaded > 0 or layer.shard_indices.num_org_elements == 0)
