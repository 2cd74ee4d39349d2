"""What can be said of a model before transformers is imported, which takes seconds: whether that knows its family."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trinity_sync.config.problems import Problem

_TABLES = ("auto_mappings.py", "configuration_auto.py")


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


def is_known(model_type: str) -> bool:
    """Whether transformers has this family, as far as its own tables tell; they are read, not imported."""
    known = _known()
    return not known or model_type in known


def suggestion(model_type: str) -> str:
    """The known family that is meant, as words to put behind the unknown one; empty where none is close."""
    close = difflib.get_close_matches(model_type, _known(), n=1)
    return f" (meant {close[0]}?)" if close else ""


@cache
def _known() -> frozenset[str]:
    """All that may be families; empty where there is no transformers, or one that has its tables elsewhere."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    tables = [Path(found.origin).parent / "models" / "auto" / name for name in _TABLES]
    if not all(table.is_file() for table in tables):
        return frozenset()
    names = (re.findall(r'"([^"\s]+)"', table.read_text(encoding="utf-8")) for table in tables)
    return frozenset(name for of_one in names for name in of_one)
