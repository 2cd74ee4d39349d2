"""Versions for vLLM, through its own registry of weight transfers.

`register` is what the entry point `vllm.general_plugins` names: vLLM calls it in each of its processes. Who starts an
engine with ``weight_transfer_config={"backend": "trinity"}`` has `TrinityTransfer` in each worker, and gives it
versions by `WorkerTarget`.
"""

from __future__ import annotations

BACKEND = "trinity"
"""The name under which vLLM knows us."""

_registered = False


def register() -> None:
    """Tell vLLM of `TrinityTransfer`, once in a process, and have the process use what its processor has."""
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
