"""A model with an adapter is its base while the adapter is off, and the same as before afterwards."""

from __future__ import annotations

import pytest
import torch

from trinity_sync.backends.adapters import adapter_off


def test_the_base_is_at_work_alone_and_nothing_else_changes() -> None:
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(torch.nn.Linear(4, 3))
    given = torch.randn(2, 4)
    alone = base(given)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))  # type: ignore[arg-type]
    both, trained = model(given), [parameter.requires_grad for parameter in model.parameters()]
    assert not torch.equal(both, alone)
    with adapter_off(model):
        assert torch.equal(model(given), alone)
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert torch.equal(model(given), both)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert torch.equal(model(given), both)
