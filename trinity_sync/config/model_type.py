"""What can be said of a model's config.json before transformers is imported, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from trinity_sync.config.problems import Problem
from trinity_sync.models.families import class_problem, is_known, suggestion


def folder_problems(folder: Path, *, trust_remote_code: bool) -> Iterator[Problem]:
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
