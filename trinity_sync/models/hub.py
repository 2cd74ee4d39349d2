"""Where the files of a model are: its folder, or, of a model of the hub, that of its files in the hub's cache."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trinity_sync.errors import ConfigError

_ANSWER_S = 5.0


def check_named(model_path: str) -> None:
    """Check that a model of the hub is in the cache of this machine, or that the hub knows it. One question is put to
    the hub, and only where the cache has no config.json of it.

    Args:
        model_path: a folder, of which nothing is said, or a hub id.

    Raises:
        ConfigError: there is no such folder, it is not in the cache, and the hub does not know it, does not give it to
            this user, or does not answer.
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
        raise ConfigError(f"model.path is {model_path}, which is no folder and no hub id: {error}") from error
    except Exception as error:  # of its HTTP library, whichever that is
        if _is_busy(error):
            return  # it is asked once more when the model is loaded, with its library's patience
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.path is {model_path}: there is no such folder, it is not in the hub's cache on this machine, and "
            f"the hub does not give it ({type(error).__name__}: {reason}); name a folder, or fetch the model first by: "
            f"hf download {model_path}"
        ) from error


def _is_busy(error: Exception) -> bool:
    """Whether the hub is there and only slow, or has too much to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__.endswith("Timeout") or status == 429 or (status or 0) >= 500


def cached_folder(name_or_path: str) -> Path | None:
    """Return the folder of a model's or tokenizer's files as they are on this machine, absolute; None: there is none.
    The hub is not asked.

    Args:
        name_or_path: a folder or a hub id.
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
