"""What goes into a checkpoint folder beside the trainer's state: metadata for verl's merger, Hugging Face exports."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager, FSDPConfig
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)
from verl.utils.transformers_compat import drop_tied_target_keys, get_auto_model_for_vision2seq

from trinity_sync.backends.sharded import sharded
from trinity_sync.errors import ConfigError, RunError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside FSDP's wrapper."""
    return model._fsdp_wrapped_module if fsdp_version(model) == 1 else model


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write small files; returns their paths."""
    written = []
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        written.append(path)
    return written


def generation_config(model: torch.nn.Module) -> GenerationConfig | None:
    """Return the generation config of a model that generates and came from a path that has one."""
    inner = unwrapped(model)
    origin = getattr(inner.config, "name_or_path", None)
    if not inner.can_generate() or not origin:
        return None
    try:
        return GenerationConfig.from_pretrained(origin)
    except (OSError, ValueError):
        return None


def metadata(manager: FSDPCheckpointManager) -> dict[str, bytes]:
    """The files by which others read the shards, relative path -> contents: Hugging Face config, tokenizer or
    processor, generation config and code of the model's own in ``huggingface/``; ``fsdp_config.json``; verl's note on
    LoRA.

    Args:
        manager: verl's checkpoint manager, ours or its own.
    """
    inner = unwrapped(manager.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hugging_face = folder / "huggingface"
        hugging_face.mkdir()
        config = inner.config
        if None in (getattr(config, "auto_map", None) or {}):
            config.auto_map = {key: value for key, value in config.auto_map.items() if key is not None}
        config.save_pretrained(hugging_face)
        if manager.processing_class is not None:
            manager.processing_class.save_pretrained(hugging_face)
        generation = generation_config(manager.model)
        if generation is not None:
            generation.save_pretrained(hugging_face)
        if hasattr(config, "auto_map"):
            base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
            custom_object_save(base, hugging_face, config=config)
        runtime = FSDPConfig(FSDP_version=fsdp_version(manager.model), world_size=manager.world_size)
        (folder / "fsdp_config.json").write_text(json.dumps(asdict(runtime), indent=4))
        manager._save_lora_train_meta(str(folder), inner)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


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


def auto_class(config: PretrainedConfig) -> type[_BaseAutoModelClass]:
    """Return the transformers class by which a model of this architecture is saved and loaded.

    Raises:
        ConfigError: of an architecture that is not known to be one of the three kinds.
    """
    architectures = getattr(config, "architectures", None) or [""]
    kinds: dict[str, Callable[[], type[_BaseAutoModelClass]]] = {
        "ForTokenClassification": lambda: AutoModelForTokenClassification,
        "ForCausalLM": lambda: AutoModelForCausalLM,
        "ForConditionalGeneration": get_auto_model_for_vision2seq,
    }
    for kind, found in kinds.items():
        if kind in architectures[0]:
            return found()
    raise ConfigError(
        f"a model of architecture {architectures[0] or 'unknown'!r} cannot be exported to Hugging Face format: it is "
        f"none of {', '.join(f'*{kind}' for kind in kinds)}; leave hf_model out of save_contents"
    )


def empty_model(model: torch.nn.Module, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Make a model of the same architecture without storage.

    On the main thread: it sets torch's default dtype meanwhile.
    """
    config = copy.deepcopy(unwrapped(model).config)
    with torch.device("meta"):
        made = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    generation = generation_config(model)
    if made.can_generate() and generation is not None:
        made.generation_config = generation
    return made


def write_export(empty: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write a full model in Hugging Face format; `state` is its state dict on the CPU. Returns the files of weights.

    The other files in the folder (config, tokenizer) are `metadata`'s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drop_tied_target_keys(state, empty, empty.config)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        empty.save_pretrained(name, state_dict=state)
        written = []
        for path in sorted(Path(name).iterdir()):
            if "safetensors" in path.name:
                path.rename(folder / path.name)
                written.append(folder / path.name)
    return written
