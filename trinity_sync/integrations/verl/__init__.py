"""For programs built on verl: a drop-in checkpoint manager, and functions over verl's engines.

The driver calls `open_run`, all ranks of the workers the rest. Importing this package loads neither torch nor verl; its
names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_sync.integrations.verl.engine_functions import (
        fsdp_save_state_dict,
        fsdp_state_dict_meta,
        fsdp_sync_weight_nccl,
        fsdp_upload_state_dict,
        megatron_save_state_dict,
        megatron_state_dict_meta,
        megatron_sync_weight_nccl,
        megatron_upload_state_dict,
    )
    from trinity_sync.integrations.verl.manager import FSDPCheckpointManager, use_in
    from trinity_sync.integrations.verl.megatron_manager import MegatronCheckpointManager, use_in_megatron
    from trinity_sync.integrations.verl.program_run import open_run

_HOME = {
    "FSDPCheckpointManager": "manager",
    "use_in": "manager",
    "MegatronCheckpointManager": "megatron_manager",
    "use_in_megatron": "megatron_manager",
    "fsdp_save_state_dict": "engine_functions",
    "fsdp_upload_state_dict": "engine_functions",
    "fsdp_sync_weight_nccl": "engine_functions",
    "fsdp_state_dict_meta": "engine_functions",
    "megatron_save_state_dict": "engine_functions",
    "megatron_upload_state_dict": "engine_functions",
    "megatron_sync_weight_nccl": "engine_functions",
    "megatron_state_dict_meta": "engine_functions",
    "open_run": "program_run",
}

__all__ = [
    "FSDPCheckpointManager",
    "MegatronCheckpointManager",
    "fsdp_save_state_dict",
    "fsdp_state_dict_meta",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "megatron_save_state_dict",
    "megatron_state_dict_meta",
    "megatron_sync_weight_nccl",
    "megatron_upload_state_dict",
    "open_run",
    "use_in",
    "use_in_megatron",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
