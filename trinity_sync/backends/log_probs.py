"""Log-probs of tokens from logits without flash-attn's kernel.

verl's own fallback runs token by token in Python, forward and backward, which costs a small model more than its layers.
"""

from __future__ import annotations

import torch
import verl.utils.torch_functional

_ELEMENTS = 2**26
"""Logits per step: 256 MiB in fp32."""


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of `labels`: bit for bit those of verl's `logprobs_from_logits_v2`, and so are the
    gradients.

    `logits`: (..., vocabulary); `labels`: int64 (...). The result has the labels' shape; bf16 logits give bf16 outside
    of autocast.
    """
    rows = max(1, _ELEMENTS // logits.shape[-1])
    parts = zip(logits.flatten(0, -2).split(rows), labels.flatten().split(rows), strict=True)
    return torch.cat([_of_rows(*part) for part in parts]).view(labels.shape)


def _of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def install() -> None:
    """Have verl's engines in this process use `log_probs`."""
    verl.utils.torch_functional.logprobs_from_logits_v2 = log_probs
