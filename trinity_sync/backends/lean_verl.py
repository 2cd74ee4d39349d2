"""Imports verl's engines without parts that a run here does not use, which cost seconds in every training process,
and gives them faster log-probs. Left out are:

- Megatron's engines, which verl would load whenever megatron-core is installed. `backends.megatron.megatron_engine`
  imports them itself.
- The senders of verl that import vLLM, which verl would load whenever vLLM is installed.
- Runs of the garbage collector.

Import it before anything of `verl.workers` or `verl.checkpoint_engine`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trinity_sync.host.process import without_collections

_LEFT_OUT = (
    "verl.workers.engine.megatron",
    "verl.workers.engine.mindspeed",
    "verl.checkpoint_engine.hccl_checkpoint_engine",
    "verl.checkpoint_engine.mooncake_checkpoint_engine",
)


@contextmanager
def _without_these() -> Iterator[None]:
    # None in the table of modules makes an import of that name fail, and verl continues without it.
    for name in _LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in _LEFT_OUT:
            del sys.modules[name]


if "verl.workers.engine" not in sys.modules:
    with without_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl

        with _without_these():
            import verl.checkpoint_engine
            import verl.workers.engine  # noqa: F401


# Log-probs of tokens from logits without flash-attn's kernel. verl's own fallback runs token by token in Python,
# forward and backward, which costs a small model more than its layers.

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
    import verl.utils.torch_functional

    verl.utils.torch_functional.logprobs_from_logits_v2 = log_probs
