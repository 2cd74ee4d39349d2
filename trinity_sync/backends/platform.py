"""Which accelerator the run uses, and what verl must be told about it. Imports neither torch nor verl.

The launcher asks `accelerator_count` before Ray starts and hands `platform_env` to all processes.
"""

from __future__ import annotations

import os
from pathlib import Path


def accelerator_count() -> int:
    """The number of NVIDIA GPUs that this process may use, 0 on a machine without any. Loads no CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [path for path in Path("/proc/driver/nvidia/gpus").glob("*")]
        if Path("/proc/driver/nvidia/gpus").is_dir()
        else []
    )
    if visible is not None:
        return min(len(devices), len([item for item in visible.split(",") if item.strip() not in ("", "-1")]))
    return len(devices)


def platform_env(use_gpu: bool) -> dict[str, str]:
    """Environment variables that every process importing verl needs; empty on CUDA, where verl runs as it is."""
    if use_gpu:
        return {}
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
        "VERL_ENGINE_DEVICE": "cuda",
    }
