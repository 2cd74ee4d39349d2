"""What a version of an adapter has to consist of, and on which layers of a model an adapter can be trained.

Worked out from the architecture and peft's config alone, on a model without storage, as for whole models in `saved`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trinity_sync.backends.engines import ModelConfig
from trinity_sync.backends.saved import meta_model, travelling
from trinity_sync.errors import ConfigError
from trinity_sync.models.adapter_layers import AdapterLayers, adapter_layers
from trinity_sync.weights.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE, held_adapter, saved_name, target_text
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import listed, shape_text
from trinity_sync.weights.tensors import from_torch

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def adapter_by(
    model_config: ModelConfig, config: LoraConfig, wire_dtype: str, keep_fp32: Sequence[str] | None = None
) -> dict[str, Saved]:
    """Return the tensors that peft's `save_pretrained` would write, by name, in the dtypes in which they travel.

    Args:
        model_config: the model config of verl's engine.
        config: peft's, of the adapter.
        wire_dtype: the dtype in which floating tensors travel, as safetensors names it.
        keep_fp32: which of them travel in fp32 nevertheless, by parts of names (`found_in`); None: none.
    """
    saved = {
        saved_name(name): Saved.as_held(from_torch(tensor.dtype), tensor.shape, name)
        for name, tensor in _on_meta(meta_model(model_config), config).items()
    }
    # not strict: an entry may mean tensors of the base alone
    return travelling(saved, wire_dtype, keep_fp32 or (), strict=False)


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the base of a model with a LoRA adapter is at work alone.

    peft's own way also says of the adapter's parameters that they need no gradient, and then that they do. FSDP2 makes
    those that it computes with only once, and would go on with what it was told first.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_targets(model: PreTrainedModel, fields: Mapping[str, Any], strategy: str) -> AdapterLayers:
    """Return the layers of a model that get the adapter which is asked for, before an engine is built.

    Args:
        model: on the meta device.
        fields: `WorkerSpec.lora`.
        strategy: the backend's label.

    Raises:
        ConfigError: a target is not a layer that can have an adapter, peft refuses it for this model, or the adapter at
            `model.lora.path` is another model's; one line that names the key and the module.
    """
    from peft import LoraConfig

    path = fields["lora_adapter_path"]
    try:
        layers = adapter_layers(model, fields["target_modules"], saved=path is not None)
    except ConfigError as error:
        raise error if path is None else ConfigError(f"model.lora.path={path}, {CONFIG_FILE}: {error}") from error
    if strategy == "fsdp2" and any(name.rpartition(".")[2] == "lm_head" for name in layers.shapes):
        raise ConfigError(
            "model.lora.targets means lm_head, which verl wraps by itself with backend=fsdp2, as torch cannot with "
            "peft's layer: leave it out, or use backend=fsdp"
        )
    if path is None:
        _on_meta(model, LoraConfig(r=fields["lora_rank"], target_modules=list(layers.names)))
    else:
        wanted = _on_meta(model, LoraConfig.from_pretrained(path))
        check_shapes(Path(path), {saved_name(name): tuple(tensor.shape) for name, tensor in wanted.items()})
    return layers


def _on_meta(model: PreTrainedModel, config: LoraConfig) -> dict[str, torch.Tensor]:
    """The adapter's tensors, under the names that the model, which is on the meta device, then holds them by."""
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a base on the meta device is not
            with torch.device("meta"):
                get_peft_model(model, copy.deepcopy(config))
    except ValueError as error:
        raise ConfigError(
            f"model.lora.targets={target_text(config.target_modules or ())} cannot be had of this model: "
            f"{' '.join(str(error).split())}"
        ) from error
    return held_adapter(model)


def check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a saved adapter has the tensors that a model wants, and no others; reads a file's header.

    Args:
        path: the adapter's folder.
        wanted: shapes by saved name.

    Raises:
        ConfigError: it has not; names a tensor.
    """
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, "pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.path={path}: {file} cannot be read: {error}") from error
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        what = [f"has no {listed(missing)}"] if missing else []
        what += [f"has {listed(unknown)}, which this one does not take"] if unknown else []
        raise ConfigError(f"model.lora.path={path} is an adapter for another model: it {', and '.join(what)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(
                f"model.lora.path={path} is an adapter for another model: {name.removeprefix(PREFIX)} is "
                f"{shape_text(found[name])} there, this model wants {shape_text(shape)}"
            )
