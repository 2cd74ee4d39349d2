"""Kernels of GPUs that give the same bits each time."""

from __future__ import annotations

import os

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # the cross-entropy of flash-attn is in Triton, which neither torch's switch nor the one above reaches
    "VERL_DISABLE_FLASH_ATTN_CE": "1",
    # how a sum over ranks is ordered hangs on what NCCL chooses
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def use_deterministic_kernels() -> None:
    """Have this process compute the same bits from the same inputs on its GPU: what verl's ``full_determinism`` sets,
    but for its seeds. To be called before anything is computed there. Without a GPU nothing changes: the same inputs
    and threads give the same bits on a CPU.

    What the environment sets already stays. An operation that has no such kernel is told of by torch, once.
    """
    import torch

    if not torch.cuda.is_available():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # what is copied over at once need not be filled first
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
