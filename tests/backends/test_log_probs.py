"""Log-probs taken many at a time, against verl's token by token."""

from __future__ import annotations

import pytest
import torch
from verl.utils.torch_functional import logprobs_from_logits, logprobs_from_logits_v2

from trinity_sync.backends import lean_verl as ours


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("at_once", [40 * 7, 2**26])
def test_log_probs_and_gradients_are_bit_for_bit_verls(
    dtype: torch.dtype, autocast: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_ELEMENTS", at_once)
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(100, 40) * 3, torch.randint(40, (100,)), torch.randn(100)
    found = []
    for of in (logprobs_from_logits_v2, ours.log_probs):
        leaf = logits.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            log_probs = of(leaf, labels)
        (log_probs.float() * weights).sum().backward()
        found.append((log_probs, leaf.grad))
    (theirs, their_gradient), (here, gradient) = found
    assert here.dtype == theirs.dtype
    assert torch.equal(here, theirs)
    assert torch.equal(gradient, their_gradient)


def test_verls_engines_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.utils.torch_functional.logprobs_from_logits_v2", logprobs_from_logits_v2)
    ours.install()
    asked = []
    monkeypatch.setattr(ours, "_of_rows", lambda *parts: asked.append(parts) or parts[0][:, 0])
    logprobs_from_logits(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))
    assert len(asked) == 1
