"""The model that `HFEngine` holds: without weights, or with those of the folder below an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import transformers

from trinity_sync.config.lora import Adapter
from trinity_sync.errors import ConfigError
from trinity_sync.models.adapter_layers import adapter_layers
from trinity_sync.models.families import auto_class
from trinity_sync.models.indexed_file import follow_indexes
from trinity_sync.models.unfilled import unfilled_model
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import from_torch
from trinity_sync.weights.wire_cast import cast_model, hold_fp32, kept_by_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def held_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attn_implementation: str,
    trust_remote_code: bool,
    keep_fp32: Sequence[str] | None,
    weights: str | None,
) -> PreTrainedModel:
    """Make the model.

    Args:
        config: of the model.
        dtype: in which it computes.
        device: where it is.
        attn_implementation, trust_remote_code, keep_fp32: as for `HFEngine`.
        weights: folder in Hugging Face format, or hub id, from which they are read; None: they are not filled.

    Raises:
        ConfigError: a tensor that is to be kept in fp32 cannot be, or the model does not compute with it.
        OSError, ValueError: transformers has no such model, or no weights are there.
    """
    if weights is None:
        model = unfilled_model(
            config, dtype, device, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    else:
        follow_indexes()  # as trainers do
        # What is kept whole must not have been rounded before.
        kind = getattr(transformers, auto_class(config.to_dict()))
        model = kind.from_pretrained(
            weights,
            config=config,
            dtype=dtype if keep_fp32 is None else torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        ).to(device)
        if keep_fp32 is not None:
            cast_model(model, dtype, keep_fp32)
        model.eval().requires_grad_(False)
    if dtype is not torch.float32:
        kept = hold_fp32(model, kept_by_class(model, from_torch(dtype)) if keep_fp32 is None else keep_fp32)
        if kept:
            _check_computes(model, dtype, kept)
    return model


def add_adapter(adapter: Adapter, model: PreTrainedModel) -> None:
    """Put an adapter without weights into a model, in the dtypes of what it is added to."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_rslora=adapter.rslora,
        target_modules=list(adapter_layers(model, adapter.targets, saved=adapter.path is not None).names),
        bias="none",
        inference_mode=True,
    )
    get_peft_model(model, config, autocast_adapter_dtype=False)
    model.eval().requires_grad_(False)


@torch.inference_mode()
def _check_computes(model: PreTrainedModel, dtype: torch.dtype, kept: Sequence[str]) -> None:
    """Check that the model computes with what is kept in fp32, by a pass whose result is thrown away.

    Raises:
        ConfigError: it does not, as a linear layer in another dtype than what it is given.
    """
    try:
        model(torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    except torch.OutOfMemoryError:  # nothing of the kind
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"sync.keep_fp32 keeps {listed(kept)} in fp32, with which this model cannot compute in explorer.dtype="
            f"{str(dtype).removeprefix('torch.')}: {' '.join(str(error).split())}; set explorer.dtype=fp32, or leave "
            "them out"
        ) from error
