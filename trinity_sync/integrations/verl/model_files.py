"""The files of the model that a program of verl's trains: those of its folder as they came, and where the program has
changed config or tokenizer in memory, what is in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_sync.errors import ConfigError
from trinity_sync.models.files import CONFIG, ModelFiles
from trinity_sync.models.hub import cached_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

Processing: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"

_BY_VERL = {
    *("attn_implementation", "_attn_implementation", "dtype", "torch_dtype", "use_cache"),
    *("transformers_version", "_name_or_path", "auto_map"),
}
"""Fields that verl sets for its own work, or transformers by itself."""
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|spiece|tekken|chat_template|additional_chat_templates/"
    r"|(video_)?(pre)?processor_config|[^/]*\.(model|tiktoken)$)"
)


def model_files(config: PretrainedConfig, processing: Processing | None) -> ModelFiles:
    """Collect the files of a model.

    Args:
        config: as the program has it, of the folder that its `name_or_path` names. Of a model without a folder it is
            written itself.
        processing: the tokenizer or processor, likewise.

    Raises:
        ConfigError: a file of the folder cannot be read.
    """
    folder = cached_folder(config.name_or_path)
    if folder is None or not (folder / CONFIG).is_file():
        return ModelFiles({**_written(config).contents, **_written(processing).contents})
    files = ModelFiles.read(folder)
    if processing is not None:
        files = _with_tokenizer(files, folder, processing)
    tokenizer = getattr(processing, "tokenizer", processing)
    given = type(config).from_pretrained(folder).to_dict()
    return files.with_values(dict(_changes(files.config, given, config.to_dict(), tokenizer)))


def _changes(
    source: Mapping[str, Any], given: Mapping[str, Any], held: Mapping[str, Any], tokenizer: object
) -> Iterator[tuple[tuple[str, ...], object]]:
    """The values that the program has changed, by keys of config.json.

    Args:
        source: what config.json says.
        given: the config as transformers makes it of that.
        held: the config as the program has it.
        tokenizer: its special tokens verl notes in the config.
    """
    for key, value in held.items():
        before = given.get(key)
        if (key in given and before == value) or key in _BY_VERL or (key in _DRAFT_LAYERS and value == 0):
            continue
        if key in _SPECIAL_TOKENS and value == getattr(tokenizer, key, None):
            continue
        if isinstance(value, dict) and isinstance(before, dict) and isinstance(source.get(key), dict):
            for path, inner in _changes(source[key], before, value, None):
                yield (key, *path), inner
        elif key == "rope_parameters" and key not in source and "rope_theta" in value:  # the names of transformers 4
            scaling = {name: each for name, each in value.items() if name != "rope_theta"}
            yield ("rope_theta",), value["rope_theta"]
            yield ("rope_scaling",), None if scaling.get("rope_type", "default") == "default" else scaling
        else:
            yield (key,), value


def _with_tokenizer(files: ModelFiles, folder: Path, processing: Processing) -> ModelFiles:
    """Take the tokenizer's files from its own folder; from memory where the program has changed it."""
    tokenizer = getattr(processing, "tokenizer", processing)
    source = cached_folder(tokenizer.name_or_path)
    if source is not None and _is_as_it_came(processing, tokenizer, source):
        if source == folder:
            return files
        others = ModelFiles.read(source)
    else:
        others = _written(processing)
    kept = {name: data for name, data in files.contents.items() if not _OF_TOKENIZER.match(name)}
    taken = {name: data for name, data in others.contents.items() if _OF_TOKENIZER.match(name)}
    return ModelFiles({**kept, **taken}, files.too_large)


def _is_as_it_came(processing: Processing, tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    try:
        fresh = type(tokenizer).from_pretrained(folder)
        templates = [fresh.chat_template]  # which verl gives to a processor that has none
        if processing is not tokenizer:
            templates.append(type(processing).from_pretrained(folder).chat_template)
    except Exception:  # of a class that was made otherwise than by its folder
        return False
    return processing.chat_template in templates and _encoding(tokenizer) == _encoding(fresh)


def _encoding(tokenizer: PreTrainedTokenizerBase) -> object:
    """What a tokenizer encodes by. The token of padding is not looked at: verl chooses one where there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return {**body, "padding": None, "truncation": None, "special": special}  # the first two as of the last call


def _written(held: PretrainedConfig | Processing | None) -> ModelFiles:
    """What is in memory, as transformers writes it.

    Raises:
        ConfigError: transformers refuses to.
    """
    with TemporaryDirectory() as folder:
        try:
            if held is not None:
                held.save_pretrained(folder)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the {type(held).__name__} of this program cannot be written, so no checkpoint could have it: {reason}"
            ) from error
        return ModelFiles.read(Path(folder))
