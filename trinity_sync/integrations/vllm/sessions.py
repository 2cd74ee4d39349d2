"""What vLLM's layerwise reload leaves behind when it does not come to its end, put right; and what it does not tell."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)


def begin(model: torch.nn.Module) -> None:
    """Begin a session: layers wait for weights.

    vLLM puts experts into the form that a processor computes with only where it makes their kernel. With a kernel that
    is there it would compute with weights as they came, and say nothing; so on a CPU the kernel is made anew.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None
    initialize_layerwise_reload(model)


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
    tied = set(_tied(model))
    waiting = []
    for name, layer in model.named_modules():
        if not _waits(layer) or layer in tied:
            continue
        waiting += [f"{name}.{one}" if name else one for one, _ in layer.named_parameters(recurse=False)]
    return sorted(waiting)


def finish(model: torch.nn.Module, config: ModelConfig) -> None:
    """End a session: what waits for all of its layer's weights is put in, and an output layer that is the embedding
    computes with what came for that.

    Args:
        model: the model, for which all has come (see `unfilled`).
        config: vLLM's, of the model.
    """
    tied = _tied(model)
    for layer in tied:  # so that vLLM does not warn, at each version, of weights that nobody sends
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()
    finalize_layerwise_reload(model, config)
    for layer, method in tied.items():  # a processor's own copy of the weight, in the form that it computes with
        method.process_weights_after_loading(layer)


def _tied(model: torch.nn.Module) -> dict[torch.nn.Module, UnquantizedEmbeddingMethod]:
    """Layers of a vocabulary for which nothing came, since their weight is that of another, for which all came; and
    what puts their weight into the form that is computed with.
    """
    filled = set()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and _waits(layer):
            continue
        held = (
            info.kernel_tensors[0]
            if info.can_load() and info.kernel_tensors
            else dict(layer.named_parameters(recurse=False))
        )
        filled |= {id(one) for one in held.values()}
    found = {}
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not _waits(layer) or info.load_numel or not info.kernel_tensors or not info.kernel_tensors[0]:
            continue
        method = getattr(layer, "quant_method", None)
        shared = all(id(one) in filled for one in info.kernel_tensors[0].values())
        if shared and isinstance(method, UnquantizedEmbeddingMethod):
            found[layer] = method
    return found


def _waits(layer: torch.nn.Module) -> bool:
    # A layer that has all of its weights is in no session any more; that of attention has none to wait for.
    info = get_layerwise_info(layer)
    return info.can_load() and not is_deferred_attention_layer(layer) and not _holds_padding(layer, info.load_numel)


def _holds_padding(layer: torch.nn.Module, loaded: int) -> bool:
    """Tell whether a layer is (a share of) a vocabulary, of which all but padding may be there."""
    return isinstance(layer, VocabParallelEmbedding) and (loaded > 0 or layer.shard_indices.num_org_elements == 0)
