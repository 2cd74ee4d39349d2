"""vLLM's limits for a model and a run. Its source is read, not imported, which would take seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trinity_sync.host.package_source import source_of
from trinity_sync.models.families import IMAGES, auto_class, made_class, named_class

_COLDEST, _HOTTEST = 0.01, 2.0
_NOT_FILLED = ("gpt_oss",)
"""Families whose layers vLLM 0.31 does not fill from a version, by its own report on a CPU."""


def temperature_problem(temperature: float) -> str | None:
    """Return why vLLM does not sample at a temperature; None: it does."""
    if temperature == 0 or _COLDEST <= temperature <= _HOTTEST:
        return None
    done = f"samples at {_COLDEST} instead" if temperature < _COLDEST else "refuses"
    return (
        f"is {temperature}, at which vLLM {done}; set it to 0 or between {_COLDEST} and {_HOTTEST:g}, or choose "
        "explorer=hf"
    )


def model_problem(fields: Mapping[str, object], *, on_cpu: bool) -> str | None:
    """Return why vLLM does not compute the same as the trainer; None: it does."""
    named, made = named_class(fields), made_class(fields)
    if named is not None and made not in (None, named):
        return (
            f"goes by architectures [{named}] of config.json, where the trainer makes {made} by its model_type "
            f"{fields.get('model_type')}; correct config.json"
        )
    if auto_class(fields) == IMAGES:
        return (
            f"was not tried on models for images and text (model_type {fields.get('model_type')}); choose explorer=hf"
        )
    if fields.get("model_type") in _NOT_FILLED:
        return f"does not put versions into the layers of model_type {fields['model_type']}; choose explorer=hf"
    return _heads_problem(fields) if on_cpu else None


def _heads_problem(fields: Mapping[str, object]) -> str | None:
    nested = fields.get("text_config")
    text = nested if isinstance(nested, Mapping) else fields

    def number(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) else 0

    latent = number("kv_lora_rank")
    source = source_of("vllm", f"v1/attention/backends/{'mla/cpu_mla' if latent else 'cpu_attn'}.py") or ""
    known = re.search(r"def get_supported_head_sizes\(.*?return \[([\d, ]+)\]", source, re.DOTALL)
    size = latent + number("qk_rope_head_dim") if latent else number("head_dim")
    if not size and number("num_attention_heads"):
        size = number("hidden_size") // number("num_attention_heads")
    if known is None or not size or str(size) in known[1].split(", "):
        return None
    what = "a latent (kv_lora_rank + qk_rope_head_dim)" if latent else "heads"
    return f"cannot run a model with {what} of {size} on a CPU; it knows {known[1]} there"
