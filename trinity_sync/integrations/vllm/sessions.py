"""What vLLM's layerwise reload leaves behind when it does not come to its end, put right; and what it does not tell."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
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


def never_loaded(model: torch.nn.Module, loaded: Iterable[str] | None) -> list[str]:
    """Names of parameters, within a session, for which nothing came.

    Args:
        model: the model, of which every layer waits for weights or has them.
        loaded: what its `load_weights` returned; None: it does not tell, and layers are asked.
    """
    if loaded is not None:
        return sorted({name for name, _ in model.named_parameters()} - set(loaded))
    waiting = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not is_deferred_attention_layer(layer) and info.load_numel <= 0 < info.load_numel_total:
            waiting.append(name)
    return waiting
