"""An adapter's names and its sum with the weights, against peft's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from tests.checkpoint.written import small_model
from trinity_sync.errors import RunError
from trinity_sync.weights import lora


@pytest.fixture
def wrapped() -> Any:
    model = get_peft_model(small_model("tied"), LoraConfig(r=3, lora_alpha=5, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def test_names_are_those_that_peft_saves(wrapped: Any) -> None:
    held = {name for name in wrapped.state_dict() if lora.is_adapter(name)}
    assert {lora.saved_name(name) for name in held} == get_peft_model_state_dict(wrapped).keys()
    assert lora.saved_name("base_model.model.embed.lora_embedding_A.default") == (
        "base_model.model.embed.lora_embedding_A"
    )


def test_merged_is_what_peft_merges(wrapped: Any) -> None:
    adapter = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(wrapped).items()}
    base = {name: tensor.clone() for name, tensor in small_model("tied").state_dict().items()}
    scale = lora.scaling({"r": 3, "lora_alpha": 5})
    ours = dict(base)
    for name, (a, b) in lora.pairs(adapter).items():
        ours[name] = lora.merged(base[name], adapter[a], adapter[b], scale)
    theirs = wrapped.merge_and_unload().state_dict()
    changed = [name for name in base if not torch.equal(base[name], ours[name])]
    assert len(changed) == 7
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7)


def test_a_transposed_weight_gets_the_transposed_product() -> None:
    weight, a, b = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(2, 6), torch.randn(4, 2)
    whole = lora.merged(weight, a, b, 0.5)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(lora.merged(weight.T, a, b, 0.5, transposed=True), whole.T)


@pytest.mark.parametrize("empty", [set(), [], {}, "", None, False])
def test_a_key_that_is_empty_asks_for_nothing(empty: object) -> None:
    """peft leaves an empty set in `target_parameters` of a mixture's adapter."""
    assert lora.not_plain({"r": 3, "lora_alpha": 5, "target_parameters": empty}) == []


@pytest.mark.parametrize(
    "more", [{"use_dora": True}, {"target_parameters": ["experts.down_proj"]}, {"bias": "all"}, {"r": 0}]
)
def test_what_is_no_plain_product_is_refused_by_name(more: Mapping[str, object]) -> None:
    with pytest.raises(RunError, match=next(iter(more))):
        lora.scaling({"r": 4, "lora_alpha": 8} | dict(more))


def test_factors_without_their_other_half_are_refused() -> None:
    with pytest.raises(RunError, match=r"q_proj\.lora_B\.weight"):
        lora.pairs([f"{lora.PREFIX}q_proj.lora_A.weight"])


def test_which_layers_it_is_for_is_told_by_the_tensors() -> None:
    assert lora.scaling({"r": 4, "lora_alpha": 8, "layers_to_transform": [0], "exclude_modules": "q_proj"}) == 2.0


def test_rslora_scales_by_the_root() -> None:
    assert lora.scaling({"r": 4, "lora_alpha": 8, "use_rslora": True}) == 4.0
