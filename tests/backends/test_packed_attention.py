"""Packed sequences, by themselves: each family's model sees in them what it sees in single ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import FAMILIES
from trinity_sync.backends import option, packed_attention
from trinity_sync.backends.option import ATTENTION, unpackable

LENGTHS = (7, 1, 12, 3, 12)


def model_of(family: str, attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    fields = FAMILIES[family] | {"pad_token_id": 0, "eos_token_id": 2}
    packed_attention.register()
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **fields), dtype=torch.float32, attn_implementation=attention
    )


@pytest.mark.parametrize("family", option.FAMILIES)
def test_each_sequence_sees_itself_alone(family: str) -> None:
    draw = np.random.default_rng(0)
    rows = [torch.from_numpy(draw.integers(3, 60, length)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    weights = torch.from_numpy(draw.normal(size=(sum(LENGTHS), 64))).float()
    single, packed = model_of(family, "sdpa"), model_of(family, ATTENTION)
    wanted = torch.cat([single(row[None]).logits[0] for row in rows])
    found = packed(torch.cat(rows)[None], position_ids=positions[None], attention_mask=None, use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for logits in (wanted, found):
        (logits * weights).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), single.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ValueError, match="takes packed sequences: one row with positions and without a mask"):
        yield


def test_padded_rows_and_rows_without_positions_are_refused() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    positions = torch.arange(5)[None]
    with refused():
        packed_attention.packed_attention(
            torch.nn.Module(), heads, heads, heads, torch.ones(1, 5), 0.0, None, positions
        )
    with refused():
        packed_attention.packed_attention(torch.nn.Module(), heads, heads, heads, None)
    two = torch.zeros(2, 2, 5, 4)
    with refused():
        packed_attention.packed_attention(torch.nn.Module(), two, two, two, None, 0.0, None, positions)


@pytest.mark.parametrize(
    ("model", "attention", "why"),
    [
        ({"model_type": "qwen3"}, "sdpa", None),
        ({"model_type": "qwen3"}, "flash_attention_2", None),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, "sdpa", None),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "sdpa", None),
        ({"model_type": "qwen3"}, "eager", "model.attn_implementation is eager"),
        ({"model_type": "gpt2"}, "sdpa", "models of the family gpt2 are not among"),
        ({"model_type": "mistral", "sliding_window": 8}, "sdpa", "layers of sliding_attention"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "sdpa", "linear_attention"),
    ],
)
def test_models_that_cannot_be_packed_are_told_apart(model: dict[str, Any], attention: str, why: str | None) -> None:
    found = unpackable(model, attention)
    assert (found is None) if why is None else (why in str(found))
