"""Which attention computes a model as its config says."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import EAGER, FAMILIES
from trinity_sync.models.families import attention_problem


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
@pytest.mark.parametrize("said", [{}, {"attn_logit_softcapping": 2.0}])
def test_a_soft_cap_is_refused_where_the_kernel_leaves_it_out(family: str, said: dict[str, Any]) -> None:
    told = attention_problem({"model_type": family, **said}, "sdpa", "x/config.json")
    assert told is not None
    assert told.startswith("is sdpa, which leaves out attn_logit_softcapping")
    assert "of x/config.json" in told
    assert told.endswith("; set model.attn_implementation=eager")


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_a_soft_cap_is_taken_where_the_kernel_applies_it(attention: str) -> None:
    assert attention_problem({"model_type": "gemma2", "attn_logit_softcapping": 2.0}, attention) is None


def test_a_soft_cap_that_is_off_is_no_matter() -> None:
    assert attention_problem({"model_type": "gemma2", "attn_logit_softcapping": None}, "sdpa") is None


def test_the_language_model_inside_another_is_looked_at() -> None:
    text = {"model_type": "gemma2", "attn_logit_softcapping": 2.0}
    assert "attn_logit_softcapping" in str(attention_problem({"model_type": "paligemma", "text_config": text}, "sdpa"))


@pytest.mark.parametrize(
    ("fields", "attention", "instead"),
    [
        ({"model_type": "olmoe", "sliding_window": 8}, "sdpa", "flash_attention_2"),
        ({"model_type": "falcon", "alibi": True}, "flash_attention_2", "sdpa"),
        ({"model_type": "bloom"}, "sdpa", "eager"),
        ({"model_type": "gpt_oss"}, "sdpa", "eager"),
        ({"model_type": "gpt_oss"}, "flash_attention_2", "eager"),
    ],
)
def test_windows_biases_and_sinks_are_refused_likewise(fields: dict[str, Any], attention: str, instead: str) -> None:
    told = attention_problem(fields, attention)
    assert str(told).endswith(f"; set model.attn_implementation={instead}")


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - EAGER))
def test_other_families_are_computed_with_sdpa(family: str) -> None:
    assert attention_problem(CONFIG_MAPPING[family](**FAMILIES[family]).to_dict(), "sdpa") is None


@pytest.mark.all
@pytest.mark.parametrize(
    ("attention", "flag"), [("sdpa", "_supports_sdpa"), ("flash_attention_2", "_supports_flash_attn")]
)
def test_what_the_source_says_is_what_the_classes_say(attention: str, flag: str) -> None:
    lacking = {
        family
        for family, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if "does not have" in str(attention_problem({"model_type": family}, attention))
    }
    said = {
        family
        for family, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if not getattr(getattr(transformers, made), flag)
    }
    assert lacking == said
