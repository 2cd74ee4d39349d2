"""The place of a model's files: its folder, or the hub's cache on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trinity_sync.errors import ConfigError

_ANSWER_S = 5.0


def check_named(model_path: str) -> None:
    """Check that a model of the hub is in the cache of this machine, or that the hub knows it.

    The hub gets one request, and only if the cache has no config.json of it. Folders are not checked.
    """
    if Path(model_path).is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(model_path, "config.json"), str):
            return
        HfApi().model_info(model_path, timeout=_ANSWER_S)
    except HFValidationError as error:
        raise ConfigError(f"model.path is {model_path}, which is neither a folder nor a hub id: {error}") from error
    except Exception as error:  # of any HTTP library
        if _is_busy(error):
            return  # the load of the model asks again, with the library's retries
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.path is {model_path}: there is no such folder, it is not in the hub's cache on this machine, and "
            f"the hub does not give it ({type(error).__name__}: {reason}); name a folder, or fetch the model first by: "
            f"hf download {model_path}"
        ) from error


def _is_busy(error: Exception) -> bool:
    """Return whether the hub is there but slow or overloaded."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__.endswith("Timeout") or status == 429 or (status or 0) >= 500


def cached_folder(name_or_path: str) -> Path | None:
    """Return the absolute folder of a model's or tokenizer's files on this machine, given a folder or a hub id, or
    None.

    The hub is not asked.
    """
    if name_or_path and Path(name_or_path).is_dir():
        return Path(name_or_path).absolute()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in ("config.json", "tokenizer_config.json"):
        with contextlib.suppress(HFValidationError):
            if isinstance(found := try_to_load_from_cache(name_or_path, name), str):
                return Path(found).parent
    return None


def local_folder(model_path: str) -> Path:
    """Return the absolute folder of a model's files, given a folder or a hub id.

    Missing files of the hub are fetched as transformers fetches them: config.json, and ``model.safetensors`` or the
    files of its index, if there are any.
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
