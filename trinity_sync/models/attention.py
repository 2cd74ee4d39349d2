"""Which attention a family has in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SUPPORT = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}


def check_attention(config: PreTrainedConfig, attn_implementation: str) -> None:
    """Check that transformers has this attention for a causal language model.

    Code that comes with a model is not looked at.

    Args:
        config: of the model.
        attn_implementation: as transformers names it.

    Raises:
        ConfigError: it has not, as sdpa for gpt-oss.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None and not getattr(kind, _SUPPORT.get(attn_implementation, ""), True):
        raise ConfigError(
            f"model.attn_implementation is {attn_implementation}, which transformers does not have for "
            f"{kind.__name__}; set model.attn_implementation=eager"
        )
