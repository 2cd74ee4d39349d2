"""Versions for vLLM, through its own registry of weight transfers.

vLLM calls `register`, the entry point `vllm.general_plugins`, in each of its processes. An engine with
``weight_transfer_config={"backend": "trinity"}`` has `TrinityTransfer` in each worker; `WorkerTarget` gives it
versions.
"""

from __future__ import annotations

BACKEND = "trinity"
"""Our name in vLLM's registry."""

_registered = False


def register() -> None:
    """Register `TrinityTransfer` with vLLM, once in a process, and allow the processor's AMX tiles."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "trinity_sync.integrations.vllm.transfer", "TrinityTransfer")
    _allow_tiles()
    _registered = True


def _allow_tiles() -> None:
    """Ask the kernel for AMX's tiles, where the processor has them. vLLM's attention on CPUs uses them unasked, and
    the process ends by SIGILL unless something else has asked before.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)  # no public function does this
    if ask is not None:
        ask()
