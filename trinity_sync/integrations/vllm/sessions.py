"""What vLLM's layerwise reload leaves behind when it does not come to its end, put right; and what it does not tell."""

from __future__ import annotations

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


def never_loaded(model: torch.nn.Module) -> list[str]:
    """Names of parameters, within a session, of layers for which nothing came.

    Args:
        model: the model; what came for it has been handed to its `load_weights`.
    """
    waiting = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # a layer that has all of its weights is in no session any more; that of attention has none to wait for
        if info.can_load() and info.load_numel <= 0 and not is_deferred_attention_layer(layer):
            waiting += [f"{name}.{one}" if name else one for one, _ in layer.named_parameters(recurse=False)]
    return sorted(waiting)
