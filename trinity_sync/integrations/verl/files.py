"""What goes into a checkpoint folder beside the trainer's state: metadata for verl's merger, Hugging Face exports."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager, FSDPConfig
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)

from trinity_sync.backends.sharded import sharded
from trinity_sync.checkpoint.hf_files import plan_files, write_file, write_index
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.model_files import model_files
from trinity_sync.models.files import CONFIG, ModelFiles
from trinity_sync.models.indexed_file import INDEX
from trinity_sync.weights.tensors import from_torch, saved_list

HUGGING_FACE = "huggingface"
_MAX_SHARD_BYTES = 5 * 10**9
_READ: WeakKeyDictionary[VerlCheckpointManager, tuple[ModelFiles, dict[str, bytes]]] = WeakKeyDictionary()
"""What `metadata` has read for a manager."""


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside FSDP's wrapper."""
    return model._fsdp_wrapped_module if fsdp_version(model) == 1 else model


def metadata(manager: VerlCheckpointManager) -> dict[str, bytes]:
    """The files by which others read the shards, relative path -> contents: those of the model in ``huggingface/``;
    ``fsdp_config.json``; verl's note on LoRA. Read once for a manager: later changes of the model's folder do not
    matter.

    Args:
        manager: verl's checkpoint manager, ours or its own.

    Raises:
        ConfigError: a file of the model's folder cannot be read.
    """
    if manager not in _READ:
        inner = unwrapped(manager.model)
        with tempfile.TemporaryDirectory() as name:
            manager._save_lora_train_meta(name, inner)
            notes = {path.name: path.read_bytes() for path in Path(name).iterdir()}
        runtime = FSDPConfig(FSDP_version=fsdp_version(manager.model), world_size=manager.world_size)
        notes["fsdp_config.json"] = json.dumps(asdict(runtime), indent=4).encode()
        _READ[manager] = model_files(inner.config, manager.processing_class), notes
    files, notes = _READ[manager]
    return {**{f"{HUGGING_FACE}/{path}": data for path, data in files.contents.items()}, **notes}


def of_export(small: Mapping[str, bytes], folder: str, dtype: torch.dtype) -> dict[str, bytes]:
    """The small files of a checkpoint with a model in Hugging Face format, whose config says the dtype of its weights.

    Args:
        small: relative path -> contents.
        folder: of the model below the checkpoint's, with ``/``.
        dtype: of the weights.
    """
    name = f"{folder}/{CONFIG}"
    files = ModelFiles({CONFIG: small[name]}).with_dtype(str(dtype).removeprefix("torch."))
    return {**small, name: files.contents[CONFIG]}


# ---- full tensors


def full_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the device) of the model's state dict, one gathered at a time. Collective: all ranks
    iterate to the end.
    """
    with _on_device(model), sharded(model, offload=False):
        state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, DTensor):
            moved = value.to(get_device_id())
            assert isinstance(moved, DTensor)
            yield name, moved.full_tensor()
        elif type(value).__name__ == "ShardedTensor":
            raise RunError(
                f"{name} is sharded without a device mesh, as verl's engines have one; it cannot be gathered"
            )
        else:
            yield name, value


@contextmanager
def _on_device(model: torch.nn.Module) -> Iterator[None]:
    """FSDP1 gathers on the device, so parameters that were offloaded have to be there for the while."""
    here = next(model.parameters()).device.type
    moved = fsdp_version(model) == 1 and here == "cpu" and get_device_name() != "cpu"
    if moved:
        load_fsdp_model_to_gpu(model)
    try:
        yield
    finally:
        if moved:
            offload_fsdp_model_to_cpu(model)


# ---- Hugging Face export


def class_of(model: torch.nn.Module) -> type[PreTrainedModel]:
    """Return the transformers class of a model, whatever its config names: a critic's has a head of its own.

    Raises:
        ConfigError: it is no model of transformers.
    """
    for kind in type(unwrapped(model)).__mro__:
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule):
            return kind
    raise ConfigError(
        f"{type(unwrapped(model)).__name__} is no model of transformers, so it cannot be exported to Hugging Face "
        "format; leave hf_model out of save_contents"
    )


def empty_model(model: torch.nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of the same class without storage.

    On the main thread: it sets torch's default dtype meanwhile.
    """
    config = copy.deepcopy(unwrapped(model).config)
    with torch.device("meta"):
        return class_of(model)._from_config(config, dtype=dtype)


def write_export(empty: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write a full model in Hugging Face format; `state` is its state dict on the CPU. Returns the files of weights.

    The other files in the folder (config, tokenizer) are `metadata`'s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = revert_weight_conversion(empty, state)
    saved = {name: tensors[name] for name in saved_list(empty)}
    infos = {name: TensorInfo(from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in saved.items()}
    files = plan_files(infos, _MAX_SHARD_BYTES)
    for file, names in files.items():
        write_file(folder, file, {name: infos[name] for name in names}, saved.__getitem__)
    if len(files) > 1:
        write_index(folder, files, infos)
    return sorted(folder / name for name in [*files, *([INDEX] if len(files) > 1 else [])])
