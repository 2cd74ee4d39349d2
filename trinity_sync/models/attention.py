"""Whether an attention in transformers computes a model as its config says, and deterministic kernels.

The source of transformers is read, not imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from trinity_sync.errors import ConfigError
from trinity_sync.models.families import modeling_source

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
