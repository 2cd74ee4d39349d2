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
    """Tell vLLM of `TrinityTransfer`, once in a process.

    Raises:
        ValueError: somebody else has registered the name.
    """
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "trinity_sync.integrations.vllm.transfer", "TrinityTransfer")
    _registered = True
