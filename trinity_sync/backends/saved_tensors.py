"""The tensors of every backend's versions: those that `save_pretrained` of an engine's model would write, without a
vision tower.

They follow from the architecture alone, on a model without storage, so that a check finds tensors that a backend does
not map.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trinity_sync.backends.base import EngineModel
from trinity_sync.errors import ConfigError
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.models.families import auto_class, class_problem
from trinity_sync.models.model_folder import LeftOutNames, left_out
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.tensors import kept_by_class, saved_list, version_list
from trinity_sync.weights.wire import WireFormat, kept_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def saved_by(
    model_config: EngineModel, wire_dtype: str, keep_fp32: Sequence[str] | None = None
) -> dict[str, SavedTensor]:
    """Return the tensors of a version (`version_list`) by name, in wire dtypes.

    `keep_fp32`: those that travel in fp32 instead, by name patterns (`found_in`); None: those that the model's class
    keeps in fp32 when it is loaded in the wire dtype. A `ConfigError` if an entry matches no tensor.
    """
    return on_the_wire(meta_model(model_config), wire_dtype, keep_fp32)


def left_out_by(model_config: EngineModel, folder: Path) -> LeftOutNames:
    """Return names of the tensors of the model's folder that are in no version; see `left_out`.

    `model_config`: of verl's engine, which need not be initialised. A `ConfigError` if the folder lacks tensors of the
    model, or has unknown ones.
    """
    model = meta_model(model_config)
    return left_out(folder, model, saved_list(model))


def meta_model(model_config: EngineModel) -> PreTrainedModel:
    """Make the engine's model without storage."""
    config = copy.deepcopy(model_config.hf_config)
    # it computes nothing, so it does not need the kernels that the engine's config may name
    return unfilled_model(
        config,
        config.dtype or torch.float32,
        "meta",
        attn_implementation="eager",
        trust_remote_code=model_config.trust_remote_code,
    )


def on_the_wire(model: torch.nn.Module, wire_dtype: str, keep_fp32: Sequence[str] | None) -> dict[str, SavedTensor]:
    """Return the tensors of a version of a model, in wire dtypes; as `saved_by`."""
    kept = kept_by_class(model, wire_dtype) if keep_fp32 is None else keep_fp32
    return travelling(version_list(model), wire_dtype, kept, strict=keep_fp32 is not None)


def travelling(
    saved: Mapping[str, SavedTensor], wire_dtype: str, kept: Iterable[str], *, strict: bool
) -> dict[str, SavedTensor]:
    """Return tensors by name in wire dtypes; `kept`: those in fp32, see `kept_names`, also for `strict`."""
    wire = WireFormat(wire_dtype, kept_names(kept, saved, strict=strict))
    return {name: tensor._replace(dtype=wire.of(name, tensor.dtype)) for name, tensor in saved.items()}


def check_class(model_config: EngineModel) -> None:
    """Check that verl makes the model with the class that explorers and checks choose, or raise a `ConfigError`.

    `model_config`: of verl's engine, which need not be initialised.
    """
    from verl.utils.model import get_hf_auto_model_class

    config = model_config.hf_config
    fields = config.to_dict()
    if problem := class_problem(fields):
        raise ConfigError(f"model.path: its {problem}")
    theirs, ours = get_hf_auto_model_class(hf_config=config).__name__, auto_class(fields)
    if theirs != ours:
        raise ConfigError(f"model.path: verl makes {config.architectures[0]} with {theirs}, but explorers with {ours}")
