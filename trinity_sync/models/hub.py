"""Where the files of a model are: its folder, or, of a model of the hub, that of its files in the hub's cache."""

from __future__ import annotations

from pathlib import Path

from trinity_sync.errors import ConfigError


def local_folder(model_path: str) -> Path:
    """Return the folder of a model's files, absolute. Those of a model of the hub are fetched as transformers fetches
    them: config.json, and ``model.safetensors`` or the files of its index, where there are any.

    Args:
        model_path: a folder or a hub id.

    Raises:
        ConfigError: there is neither such a folder nor such a model, or the hub does not give its files.
    """
    if Path(model_path).is_dir():
        return Path(model_path).absolute()
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def fetched(name: str) -> str | None:
        found: str | None = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        return found

    try:
        config = cached_file(model_path, "config.json")
        if fetched("model.safetensors") is None and (index := fetched("model.safetensors.index.json")) is not None:
            get_checkpoint_shard_files(model_path, index)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path={model_path}: {' '.join(str(error).split())}") from error
    return Path(str(config)).parent
