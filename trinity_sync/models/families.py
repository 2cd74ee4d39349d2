"""Whether transformers knows a model family, and its class for it.

The tables of transformers are read as source: an import takes seconds, and the checks of a configuration use them, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from trinity_sync.errors import near
from trinity_sync.host.package_source import source_of

WITH_IMAGES = ("gemma3", "mistral3", "qwen3_5", "qwen3_vl")
"""Families for images and text that were tried on texts alone. verl's Qwen2-VL and Qwen2.5-VL require images."""

TEXTS, IMAGES = "AutoModelForCausalLM", "AutoModelForImageTextToText"
"""Classes of transformers: of language models, and of those that also take images."""
_TABLES = {TEXTS: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", IMAGES: "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"}
_MODULES = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"


def is_known(model_type: str) -> bool:
    """Return whether transformers has this family; true also where its tables cannot be found."""
    known = _known()
    return not known or model_type in known


def suggestion(model_type: str) -> str:
    """Return the closest known family, as words to append to the unknown one; empty where none is close."""
    return near(model_type, _known())


def auto_class(fields: Mapping[str, object]) -> str:
    """Return the auto class of transformers that makes a model: for the trainer, the explorers and the checks.

    It is verl's choice, because verl's engines choose by themselves (`verl.utils.model.get_hf_auto_model_class`).
    `fields`: of the model's config.json. A model for which `class_problem` has a text may fail to be made.
    """
    if (code := _code_class(fields)) is not None:
        return code
    return IMAGES if str(fields.get("model_type")) in _table("modeling_auto.py", _TABLES[IMAGES]) else TEXTS


def class_problem(fields: Mapping[str, object]) -> str | None:
    """Return why no class makes a model that can be trained on texts, by its config.json; None: one does."""
    family, named, code, chosen = (
        str(fields.get("model_type")),
        named_class(fields),
        _code_class(fields),
        auto_class(fields),
    )
    if named is None:
        return "config.json has no `architectures`, by which verl chooses the model's class"
    if code is None and chosen == IMAGES and family not in WITH_IMAGES:
        return (
            f"config.json has model_type {family}, a family for images and text that is not known to train on texts "
            f"alone; those that are: {', '.join(WITH_IMAGES)}"
        )
    table = _table("modeling_auto.py", _TABLES[TEXTS])
    if code is None and chosen == TEXTS and table and family not in table:
        return f"config.json has model_type {family}, but transformers has no causal language model of it"
    if chosen not in _TABLES or (code is None and chosen == TEXTS and "ForCausalLM" not in named):
        return (
            f"config.json has architectures [{named}], which verl makes without its output layer, so it cannot be "
            "trained; choose a model whose architecture is one ...ForCausalLM"
        )
    return None


def noise(fields: Mapping[str, object]) -> str | None:
    """Return the fields of a model's config by which training has noise that sampling lacks (dropout, router jitter),
    or None.
    """
    nested = fields.get("text_config")
    found = {
        name: value
        for part in (fields, nested if isinstance(nested, Mapping) else {})
        for name, value in part.items()
        if re.search("drop|jitter", name) and isinstance(value, float) and value > 0
    }
    return ", ".join(f"{name}={value}" for name, value in found.items()) or None


def made_class(fields: Mapping[str, object]) -> str | None:
    """Return the class that transformers makes of a config; None: the model comes with code, or the tables lack it."""
    if _code_class(fields) is not None:
        return None
    return _table("modeling_auto.py", _TABLES[auto_class(fields)]).get(str(fields.get("model_type")))


def modeling_source(model_type: str) -> str | None:
    """Return the source of a family's models; None: transformers has it elsewhere."""
    module = _table("auto_mappings.py", _MODULES).get(model_type, model_type.replace("-", "_"))
    return source_of("transformers", f"models/{module}/modeling_{module}.py")


def named_class(fields: Mapping[str, object]) -> str | None:
    """Return the class that the config names, which verl and vLLM use."""
    named = fields.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _code_class(fields: Mapping[str, object]) -> str | None:
    """Return the auto class for which code comes with the model; None: none does."""
    named, code = named_class(fields), fields.get("auto_map")
    if named is None or not isinstance(code, Mapping):
        return None
    return next((kind for kind, value in code.items() if value is not None and named in value), None)


@cache
def _known() -> frozenset[str]:
    sources = [source_of("transformers", f"models/auto/{n}") for n in ("auto_mappings.py", "configuration_auto.py")]
    return frozenset(name for source in sources if all(sources) for name in re.findall(r'"([^"\s]+)"', str(source)))


@cache
def _table(file: str, name: str) -> dict[str, str]:
    """Return a table of names in the source of transformers' auto classes; empty where it is elsewhere."""
    source = source_of("transformers", f"models/auto/{file}") or ""
    found = re.search(rf"(?ms)^{name} = OrderedDict\(\n(.*?)^\)", source)
    return dict(re.findall(r'\(\s*"([^"]+)",\s*"([^"]+)"', found[1])) if found else {}
