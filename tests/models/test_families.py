"""Which class makes a model, for trainer and explorers alike."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as tables

from trinity_sync.models.families import WITH_IMAGES, auto_class, class_problem, made_class

TEXTS, IMAGES = tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def fields_of(family: str, made: str) -> dict[str, Any]:
    return {"model_type": family, "architectures": [made]}


@pytest.mark.parametrize("family", sorted({**TEXTS, **IMAGES}))
def test_the_class_is_the_one_that_verl_takes(family: str) -> None:
    from verl.utils.model import get_hf_auto_model_class

    fields = fields_of(family, IMAGES.get(family) or TEXTS[family])
    if class_problem(fields) is None:
        kind = CONFIG_MAPPING[family]
        config = kind.__new__(kind)
        config.__dict__["architectures"] = fields["architectures"]
        assert get_hf_auto_model_class(config).__name__ == auto_class(fields)
        assert made_class(fields) == fields["architectures"][0]


@pytest.mark.parametrize("family", sorted(IMAGES.keys() - set(WITH_IMAGES)))
def test_a_family_with_images_that_was_not_tried_is_refused(family: str) -> None:
    assert f"model_type {family}, a family for images" in str(class_problem(fields_of(family, IMAGES[family])))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "qwen3"}, "has no `architectures`"),
        (fields_of("t5", "T5ForConditionalGeneration"), "model_type t5, but transformers has no causal language"),
        (fields_of("qwen3", "Qwen3ForSequenceClassification"), "[Qwen3ForSequenceClassification], which verl makes"),
        (fields_of("gpt2", "GPT2LMHeadModel"), "[GPT2LMHeadModel], which verl makes without its output layer"),
    ],
    ids=["nameless", "no language model", "no output layer", "another name"],
)
def test_a_model_that_no_class_makes_for_texts_is_refused_by_its_field(fields: dict[str, Any], words: str) -> None:
    assert words in str(class_problem(fields))


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
def test_code_that_comes_with_a_model_names_its_class(kind: str) -> None:
    fields = fields_of("own", "OwnModel") | {"auto_map": {"AutoConfig": "code.OwnConfig", kind: "code.OwnModel"}}
    assert auto_class(fields) == kind
    assert class_problem(fields) is None


@pytest.mark.parametrize(
    "odd", [{"architectures": "Qwen3ForCausalLM"}, {"architectures": []}, {"model_type": ["qwen3"]}, {"auto_map": 3}]
)
def test_fields_of_another_kind_than_they_should_be_break_nothing(odd: dict[str, Any]) -> None:
    fields = fields_of("qwen3", "Qwen3ForCausalLM") | odd
    assert auto_class(fields) == "AutoModelForCausalLM"
    assert (class_problem(fields) is None) == ("auto_map" in odd)
