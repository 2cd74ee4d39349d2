"""A model's folder, and its files except the weights, as bytes, for checkpoints and exports of the same model.

The files are read once, when a run starts. The trainer's checkpoints, the plug-in for verl and exports write them
unchanged, except for single values of config.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from safetensors import safe_open

from trinity_sync.errors import ConfigError, in_one_line
from trinity_sync.weights.lora import CONFIG_FILE as ADAPTER_CONFIG

CONFIG = "config.json"

MAX_FILE_BYTES = 128 << 20
"""A larger file is not kept: each checkpoint has a copy. The largest published tokenizers have 35 MB."""
MAX_BYTES = 1 << 30
"""Limit of all kept files together."""

_WEIGHTS = re.compile(
    r"(\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|ggml|onnx|onnx[._]data(_\d+)?|ot|npz|tflite|nemo|distcp"
    r"|index\.json|index|data-\d+-of-\d+)|saved_model\.pb)$",
    re.IGNORECASE,
)
_TRAINING = re.compile(
    r"(trainer_state\.json|zero_to_fp32\.py|latest|events\.out\.tfevents\..*|(optimizer|scheduler|rng_state|scaler).*\.pkl"
    r"|fsdp_config\.json|lora_train_meta\.json|checkpoint-\d+|global_step_?\d+|__pycache__|lost\+found)$"
)
_LOADED = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
_DTYPES = ("dtype", "torch_dtype")
_NOTHING = object()
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class ModelFiles:
    """Files of one model, without its weights."""

    contents: Mapping[str, bytes]  # by path relative to the folder, with ``/``
    too_large: tuple[str, ...] = ()  # paths of the files above `MAX_FILE_BYTES`

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Read the files of a folder in Hugging Face format, and those below it. Links are followed.

        Weights of any format and their indexes are left out, and so are the files of an adapter, hidden files, and a
        trainer's files for its own resume.
        """
        contents, too_large, total = {}, [], 0
        for name, path in sorted(_found(folder)):
            try:
                found = path.stat()
                name.encode()
                if not S_ISREG(found.st_mode):  # reading a pipe would never end
                    continue
                if found.st_size > MAX_FILE_BYTES:
                    too_large.append(name)
                elif (total := total + found.st_size) > MAX_BYTES:
                    raise ConfigError(
                        f"{folder} has more than {MAX_BYTES >> 20} MB of files other than weights, such as {name}, and "
                        f"each checkpoint would copy them: move files that are not the model's elsewhere"
                    )
                else:
                    contents[name] = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from error
            except UnicodeEncodeError as error:
                raise ConfigError(f"{folder} has a file whose name is not UTF-8: {name!a}; rename it") from error
        return cls(contents, tuple(too_large))

    def with_dtype(self, dtype: str) -> ModelFiles:
        """Return the files of the same model with weights in another dtype (torch's name, such as ``bfloat16``).

        config.json and the configs inside it name the dtype.
        """
        body = self.config
        if {body[key] for key in _DTYPES if key in body} == {dtype}:
            return self
        return self.with_values({path: dtype for path in _dtype_keys(body)})

    def with_values(self, values: Mapping[tuple[str, ...], object]) -> ModelFiles:
        """Return these files with other values in config.json, whose other bytes stay unchanged."""
        if not values:
            return self
        body = self.config
        text = self.contents[CONFIG].decode()
        for path, value in values.items():
            if _at(body, path) == value:
                continue
            try:
                text = _with_value(text, path, value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{CONFIG} cannot hold {'.'.join(path)}={value!r}: {error}") from error
        return replace(self, contents={**self.contents, CONFIG: text.encode()})

    @property
    def config(self) -> Mapping[str, object]:
        """The contents of config.json; a `ConfigError` if it is missing or not a JSON object."""
        try:
            body = json.loads(self.contents[CONFIG].decode())
        except KeyError:
            raise ConfigError(f"the model has no {CONFIG}") from None
        except ValueError as error:
            raise ConfigError(f"{CONFIG} cannot be read: {error}") from error
        if not isinstance(body, dict):
            raise ConfigError(f"{CONFIG} is not a JSON object")
        return body

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, data in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written.append(path)
        return written


def check_alone(folder: Path) -> None:
    """Raise a `ConfigError` if a model folder has an adapter: transformers would add it, or load its base."""
    path = folder / ADAPTER_CONFIG
    if path.is_file():
        raise ConfigError(
            f"{path} makes transformers load a LoRA adapter with this model: remove that file, or name the adapter's "
            "base as model.path and the adapter's folder as model.lora.path"
        )


def check_code(folder: Path) -> None:
    """Raise a `ConfigError` if a model folder lacks code that ``auto_map`` names for the classes that a run loads."""
    for path in (folder / CONFIG, folder / "tokenizer_config.json"):
        try:
            found = json.loads(path.read_bytes())["auto_map"]
            values = [found.get(kind) for kind in _LOADED]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        names = [one for value in values for one in (value if isinstance(value, list) else [value])]
        # a name with "--" is of another repository
        files = (f"{name.split('.')[0]}.py" for name in names if isinstance(name, str) and "--" not in name)
        if missing := next((file for file in files if not (folder / file).exists()), None):
            raise ConfigError(f"{path} names {missing} in auto_map, but that file is missing")


def is_weights(name: str) -> bool:
    """Return whether a file has weights, or their index, by its name."""
    return _WEIGHTS.search(name) is not None


def _found(folder: Path) -> Iterator[tuple[str, Path]]:
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        here = Path(place)
        folders[:] = [name for name in folders if _is_kept(name) and not _leads_up(here / name)]
        for name in files:
            if _is_kept(name) and not is_weights(name):
                yield (here / name).relative_to(folder).as_posix(), here / name


def _is_kept(name: str) -> bool:
    return not name.startswith((".", "adapter_config.json")) and _TRAINING.match(name) is None


def _leads_up(folder: Path) -> bool:
    return folder.is_symlink() and any(above.resolve().is_relative_to(folder.resolve()) for above in folder.parents)


def _unreadable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read, so it cannot be kept with the model: {error.strerror or error}")


def _refuse(error: OSError) -> None:
    raise _unreadable(error.filename, error)


def _dtype_keys(body: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys under which a config, and those inside it, name the dtype of weights."""
    for key, value in body.items():
        if key in _DTYPES and isinstance(value, str):
            yield (*above, key)
        elif isinstance(value, dict) and key != "quantization_config":
            yield from _dtype_keys(value, (*above, key))


def _at(body: object, path: tuple[str, ...]) -> object:
    """Return the value at these keys; for missing keys an object that is equal to nothing else."""
    for key in path:
        body = body.get(key, _NOTHING) if isinstance(body, dict) else _NOTHING
    return body


def _with_value(text: str, path: tuple[str, ...], value: object) -> str:
    """Return a JSON text with another value at these keys, all but the last of which exist; the layout stays."""
    start, written = _after_space(text, 0), json.dumps(value, ensure_ascii=False)
    for key in path[:-1]:
        start = next(begin for name, begin, _ in reversed(list(_members(text, start))) if name == key)
    members = list(_members(text, start))
    for name, begin, end in reversed(members):
        if name == path[-1]:
            text = text[:begin] + written + text[end:]
    if path[-1] not in {name for name, _, _ in members}:
        first = _after_space(text, start + 1)
        comma = f",{text[start + 1 : first] or ' '}" if members else ""
        text = f"{text[:first]}{json.dumps(path[-1])}: {written}{comma}{text[first:]}"
    return text


def _members(text: str, start: int) -> Iterator[tuple[str, int, int]]:
    at = _after_space(text, start + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after_space(text, _after_space(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        yield key, begin, end
        at = _after_space(text, end)
        at = _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()


# The place of a model's files: its folder, or the hub's cache on this machine.


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
        reason = in_one_line(error)
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
        raise ConfigError(f"model.path={model_path}: {in_one_line(error)}") from error
    return Path(str(config)).parent


# The copy of a tensor that the index names, if several files of a model folder have one. transformers takes the last.


INDEX = "model.safetensors.index.json"


class IndexedFile:
    """A safetensors file without the tensors that the index next to it finds in another file; used as `safe_open`."""

    def __init__(self, path: str | os.PathLike[str], framework: str, **settings: str) -> None:
        self._opened = safe_open(path, framework, **settings)
        self._name = Path(path).name
        try:
            files = index_of(Path(path).parent) or {}
        except (OSError, ValueError):  # a damaged leftover: the index of the loaded model was already read
            files = {}
        # a file that is not in the index is loaded by its own name
        self._files = files if self._name in files.values() else {}

    def __enter__(self) -> IndexedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def keys(self) -> list[str]:
        names = self._opened.keys()
        return [name for name in names if self._files.get(name, self._name) == self._name]


def index_of(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the folder's index; None: there is no index. Raises OSError, ValueError: it
    cannot be read.
    """
    try:
        found = (folder / INDEX).stat()
    except FileNotFoundError:
        return None
    return _read(folder / INDEX, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2)  # each of a hundred files needs an index of megabytes
def _read(path: Path, changed_ns: int, size: int) -> dict[str, str]:
    body = json.loads(path.read_text(encoding="utf-8"))
    named = body.get("weight_map") if isinstance(body, dict) else None
    if not (isinstance(named, dict) and all(isinstance(at, str) and "/" not in at for at in named.values())):
        raise ValueError("it has no weight_map from names of tensors to names of files next to it")
    return named


def follow_indexes() -> None:
    """Have transformers, in this process, load the copies that indexes name."""
    from transformers import modeling_utils

    modeling_utils.safe_open = IndexedFile
