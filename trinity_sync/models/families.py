"""Whether transformers knows a model family, its class for it, and the limits of attentions and of vLLM.

The sources of transformers and vLLM are read: an import takes seconds, and the checks of a configuration use them, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache

from trinity_sync.errors import ConfigError, near
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


# Whether an attention in transformers computes a model as its config says, and deterministic kernels.


_FLAGS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
_SDPA, _EAGER = "sdpa", "eager"


def check_attention(fields: Mapping[str, object], attention: str) -> None:
    """Raise a ConfigError where `attention_problem` finds one."""
    if problem := attention_problem(fields, attention):
        raise ConfigError(f"model.attn_implementation {problem}")


def attention_problem(fields: Mapping[str, object], attention: str, where: str = "the model's config") -> str | None:
    """Return why an attention (transformers' name) does not compute a model as its config.json says; None: it does.

    None also for a model that comes with code. Absent fields have the default of their family. `where`: names the
    config.
    """
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, Mapping) else {}):
        family = str(part.get("model_type"))
        source = modeling_source(family)
        if source is None:
            continue
        if attention in _FLAGS and "True" not in re.findall(rf"^    {_FLAGS[attention]} = (\w+)", source, re.MULTILINE):
            return f"is {attention}, which transformers does not have for {family}; set model.attn_implementation=eager"
        for field, applied in _of_kernels(source, part):
            if attention not in applied:
                said = part.get(field, "by default")
                return (
                    f"is {attention}, which leaves out {field} ({said}) of {where}, so that explorers may compute "
                    f"something else; set model.attn_implementation={applied[0]}"
                )
    return None


def _of_kernels(source: str, fields: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the config fields that a family leaves to the attention's kernel, and the kernels that apply each."""
    for field in re.findall(r"\bsoftcap=self\.(\w+)", source):
        if fields.get(field, True):
            yield field, (_EAGER, "flash_attention_2")
    if "s_aux=self.sinks" in source:
        yield "the sinks", (_EAGER,)
    in_kernel = "sliding_window=getattr(self.config" in source and "sliding_window_causal_mask" not in source
    if in_kernel and fields.get("sliding_window"):  # elsewhere the mask has the window
        yield "sliding_window", ("flash_attention_2",)
    if fields.get("alibi"):
        yield "alibi", (_SDPA, _EAGER)


_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # the cross-entropy of flash-attn is in Triton, which neither torch's switch nor the one above affects
    "VERL_DISABLE_FLASH_ATTN_CE": "1",
    # the order of a sum over ranks depends on NCCL's choice
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def use_deterministic_kernels() -> None:
    """Have this process compute the same bits from the same inputs on its GPU: verl's ``full_determinism``, without its
    seeds.

    Call it before the first computation. A CPU needs nothing: the same inputs and threads give the same bits. Existing
    environment variables stay. torch warns once about an operation without such a kernel.
    """
    import torch

    if not torch.cuda.is_available():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # memory that is overwritten at once need not be filled first
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


# vLLM's limits for a model and a run.


_COLDEST, _HOTTEST = 0.01, 2.0
_NOT_FILLED = ("gpt_oss",)
"""Families whose layers vLLM 0.31 does not fill from a version, by its own report on a CPU."""


def vllm_temperature_problem(temperature: float) -> str | None:
    """Return why vLLM does not sample at a temperature; None: it does."""
    if temperature == 0 or _COLDEST <= temperature <= _HOTTEST:
        return None
    done = f"samples at {_COLDEST} instead" if temperature < _COLDEST else "refuses"
    return (
        f"is {temperature}, at which vLLM {done}; set it to 0 or between {_COLDEST} and {_HOTTEST:g}, or choose "
        "explorer=hf"
    )


def vllm_problem(fields: Mapping[str, object], *, on_cpu: bool) -> str | None:
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
