"""The checks on what a run is for, and on the model that it names or describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trinity_sync.config.model_weights import weights_problems
from trinity_sync.config.options import LABELS
from trinity_sync.config.problems import Get, Problem
from trinity_sync.models.attention import attention_problem
from trinity_sync.models.families import class_problem, is_known, suggestion

_SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    }
)
"""Fields of a config that are at least 1."""


def check_workload(get: Get) -> Iterator[Problem]:
    """That a run trains, or moves bytes, with all its parts."""
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
    """That the model which is trained is there, or can be made."""
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
    """That the attention is installed, and computes the model as its config says."""
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
    """Whether a package is installed; a folder of that name is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def check_positions(get: Get) -> Iterator[Problem]:
    """That the longest response leaves room for a prompt in the positions of the model. Of a task with a file the look
    at its rows tells that.
    """
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
    """Say why this is neither the folder of a model nor may be an id of the hub; None: it may be."""
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        return f"is {path}, a folder without config.json; name one in Hugging Face format"
    if folder.exists():
        return f"is {path}, a file; name a folder in Hugging Face format, or a hub id such as org/name"
    if re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", path):
        return None
    return f"is {path}, which does not exist; name a folder in Hugging Face format, or a hub id such as org/name"


def model_fields(get: Get) -> dict[str, Any]:
    """The fields of the model's Hugging Face config, as far as they are at hand; none for a model on the hub."""
    path = get("model.path")
    if path is not None:
        return read_fields(Path(path))
    architecture = get("model.architecture")
    return {} if architecture is None else {str(name): value for name, value in architecture.items()}


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a model folder's config.json; none where it cannot be read, of which other checks tell."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _folder_problems(folder: Path, *, trust_remote_code: bool) -> Iterator[Problem]:
    """What is wrong with the config.json of a model folder.

    Args:
        folder: it has a config.json.
        trust_remote_code: whether code that comes with the model may run.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Problem("model.path", f"is {folder}, whose config.json cannot be read: {error}")
        return
    if not isinstance(config, Mapping):
        yield Problem("model.path", f"is {folder}, whose config.json is no JSON object; it must be a model's config")
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
