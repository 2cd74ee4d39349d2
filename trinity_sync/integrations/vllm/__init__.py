"""Versions for vLLM, through its own registry of weight transfers.

The entry point `vllm.general_plugins` names `register`, which vLLM calls in each of its processes. An engine that is
started with ``weight_transfer_config={"backend": "trinity"}`` has a `TrinityTransfer` in each worker; a `WorkerTarget`
gives it versions.
"""

from __future__ import annotations

BACKEND = "trinity"
"""The name under which vLLM knows us."""

_registered = False


def register() -> None:
    """Register `TrinityTransfer` with vLLM, once in a process, and allow the process AMX's tiles."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "trinity_sync.integrations.vllm.transfer", "TrinityTransfer")
    _allow_tiles()
    _registered = True


def _allow_tiles() -> None:
    """Request AMX's tiles from the kernel, where the processor has them. vLLM's attention on CPUs uses them without a
    request, which ends the process by SIGILL.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)  # no public function does this
    if ask is not None:
        ask()
