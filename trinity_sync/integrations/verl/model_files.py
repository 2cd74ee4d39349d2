"""The files of the model that a verl program trains, and its export in Hugging Face format. The checkpoint managers
call it.

Files come from the model's folder unchanged. Where the program has changed config or tokenizer in memory, the files
have the changes.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from trinity_sync.backends.fsdp_state import sharded
from trinity_sync.checkpoint.export import plan_files, write_file, write_index
from trinity_sync.checkpoint.reading import TensorInfo
from trinity_sync.errors import ConfigError, RunError, in_one_line
from trinity_sync.models.files import CONFIG, INDEX, ModelFiles, cached_folder
from trinity_sync.weights.tensors import from_torch, saved_list

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager

_Config: TypeAlias = Mapping[str, Any]
Processing: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"

_BY_VERL = {
    *("attn_implementation", "_attn_implementation", "dtype", "torch_dtype", "use_cache"),
    *("transformers_version", "_name_or_path", "auto_map"),
}
"""Fields that verl or transformers set for their own work."""
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|spiece|tekken|chat_template|additional_chat_templates/"
    r"|(video_)?(pre)?processor_config|[^/]*\.(model|tiktoken)$)"
)


def model_files(config: PretrainedConfig, processing: Processing | None) -> ModelFiles:
    """Collect the files of a model. Raises ConfigError if a file of the folder cannot be read."""
    folder = cached_folder(config.name_or_path)
    if folder is None or not (folder / CONFIG).is_file():
        return ModelFiles({**_written(config).contents, **_written(processing).contents})
    files = ModelFiles.read(folder)
    if processing is not None:
        files = _with_tokenizer(files, folder, processing)
    tokenizer = getattr(processing, "tokenizer", processing)
    original = type(config).from_pretrained(folder).to_dict()
    return files.with_values(dict(_changes(files.config, original, config.to_dict(), tokenizer)))


def _changes(
    source: _Config, given: _Config, held: _Config, tokenizer: object
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values that the program has changed, by their keys in config.json."""
    for key, value in held.items():
        before = given.get(key)
        if (key in given and before == value) or key in _BY_VERL or (key in _DRAFT_LAYERS and value == 0):
            continue
        if key in _SPECIAL_TOKENS and value == getattr(tokenizer, key, None):
            continue
        if isinstance(value, dict) and isinstance(before, dict) and isinstance(source.get(key), dict):
            for path, inner in _changes(source[key], before, value, None):
                yield (key, *path), inner
        elif key == "rope_parameters" and key not in source and "rope_theta" in value:  # names of transformers 4
            scaling = {name: each for name, each in value.items() if name != "rope_theta"}
            yield ("rope_theta",), value["rope_theta"]
            yield ("rope_scaling",), None if scaling.get("rope_type", "default") == "default" else scaling
        else:
            yield (key,), value


def _with_tokenizer(files: ModelFiles, folder: Path, processing: Processing) -> ModelFiles:
    """Take the tokenizer's files from its own folder, or from memory if the program has changed it."""
    tokenizer = getattr(processing, "tokenizer", processing)
    source = cached_folder(tokenizer.name_or_path)
    if source is not None and _is_as_it_came(processing, tokenizer, source):
        if source == folder:
            return files
        others = ModelFiles.read(source)
    else:
        others = _written(processing)
    kept = {name: data for name, data in files.contents.items() if not _OF_TOKENIZER.match(name)}
    replaced = {name: data for name, data in others.contents.items() if _OF_TOKENIZER.match(name)}
    return ModelFiles({**kept, **replaced}, files.too_large)


def _is_as_it_came(processing: Processing, tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    try:
        fresh = type(tokenizer).from_pretrained(folder)
        templates = [fresh.chat_template]  # verl sets it in a processor without one
        if processing is not tokenizer:
            templates.append(type(processing).from_pretrained(folder).chat_template)
    except Exception:  # its class cannot be made from its folder
        return False
    return processing.chat_template in templates and _encoding(tokenizer) == _encoding(fresh)


def _encoding(tokenizer: PreTrainedTokenizerBase) -> object:
    """Return what determines a tokenizer's output, without the padding token, which verl chooses if there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return {**body, "padding": None, "truncation": None, "special": special}  # not those of the last call


def _written(held: PretrainedConfig | Processing | None) -> ModelFiles:
    """Return the files that transformers writes for an object in memory. Raises ConfigError if it refuses."""
    with TemporaryDirectory() as folder:
        try:
            if held is not None:
                held.save_pretrained(folder)
        except Exception as error:
            reason = in_one_line(error)
            raise ConfigError(
                f"the {type(held).__name__} of this program cannot be written, so no checkpoint could have it: {reason}"
            ) from error
        return ModelFiles.read(Path(folder))


# The small files of an FSDP checkpoint, and the model in Hugging Face format.


HUGGING_FACE = "huggingface"
_MAX_SHARD_BYTES = 5 * 10**9
_READ: WeakKeyDictionary[VerlCheckpointManager, tuple[ModelFiles, dict[str, bytes]]] = WeakKeyDictionary()
"""The results of `metadata`."""


def check_export(manager: VerlCheckpointManager) -> None:
    """Raise ConfigError if a manager's model cannot be saved in Hugging Face format."""
    if manager._has_lora():
        raise ConfigError(
            "hf_model in save_contents (save_as_hf) cannot be written for a model with a LoRA adapter; leave it "
            "out, and export with verl's merger or, saved with save_lora_only, `trinity-sync ckpt export`"
        )


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside FSDP's wrapper."""
    return model._fsdp_wrapped_module if fsdp_version(model) == 1 else model


def metadata(manager: VerlCheckpointManager) -> dict[str, bytes]:
    """Return the files by which other programs read the shards, relative path -> contents: the model's files in
    ``huggingface/``, ``fsdp_config.json``, verl's note on LoRA. Read once for a manager, so later changes of the
    model's folder have no effect. Raises ConfigError if a file of the model's folder cannot be read.
    """
    if manager not in _READ:
        inner = unwrapped(manager.model)
        with TemporaryDirectory() as name:
            manager._save_lora_train_meta(name, inner)
            notes = {path.name: path.read_bytes() for path in Path(name).iterdir()}
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig

        runtime = FSDPConfig(FSDP_version=fsdp_version(manager.model), world_size=manager.world_size)
        notes["fsdp_config.json"] = json.dumps(asdict(runtime), indent=4).encode()
        _READ[manager] = model_files(inner.config, manager.processing_class), notes
    files, notes = _READ[manager]
    return {**{f"{HUGGING_FACE}/{path}": data for path, data in files.contents.items()}, **notes}


def of_export(small: Mapping[str, bytes], folder: str, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the small files of a checkpoint with an export: the config in `folder` names the dtype of the weights."""
    name = f"{folder}/{CONFIG}"
    files = ModelFiles({CONFIG: small[name]}).with_dtype(str(dtype).removeprefix("torch."))
    return {**small, name: files.contents[CONFIG]}


def full_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the device) of the model's state dict, gathered one at a time. Collective: all ranks
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
    """Move offloaded parameters to the device inside the block: FSDP1 gathers there."""
    device = next(model.parameters()).device.type
    moved = fsdp_version(model) == 1 and device == "cpu" and get_device_name() != "cpu"
    if moved:
        load_fsdp_model_to_gpu(model)
    try:
        yield
    finally:
        if moved:
            offload_fsdp_model_to_cpu(model)


def class_of(model: torch.nn.Module) -> type[PreTrainedModel]:
    """Return the transformers class of a model. Its config may name another class: a critic has a head of its own.
    Raises ConfigError if it is not a model of transformers.
    """
    for kind in type(unwrapped(model)).__mro__:
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule):
            return kind
    raise ConfigError(
        f"{type(unwrapped(model)).__name__} is not a model of transformers, so it cannot be exported to Hugging Face "
        "format; leave hf_model out of save_contents"
    )


def empty_model(model: torch.nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of the same class without storage. On the main thread, as it sets torch's default dtype
    meanwhile.
    """
    config = copy.deepcopy(unwrapped(model).config)
    with torch.device("meta"):
        return class_of(model)._from_config(config, dtype=dtype)


def write_export(empty: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write a full model's state dict (CPU tensors) in Hugging Face format; return the files of weights. `metadata` has
    the other files.
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
