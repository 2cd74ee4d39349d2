"""The accelerator of a run, and verl's environment for it. Imports neither torch nor verl.

The launcher calls `accelerator_count` before Ray starts and passes `platform_env` to all processes.
"""

from __future__ import annotations

import os
from pathlib import Path


def accelerator_count() -> int:
    """Return the number of NVIDIA GPUs that this process may use. Loads no CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is not None:
        return min(devices, len([item for item in visible.split(",") if item.strip() not in ("", "-1")]))
    return devices


def platform_env(use_gpu: bool) -> dict[str, str]:
    """Return the environment variables for every process that imports verl; empty on CUDA."""
    if use_gpu:
        return {}
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
        "VERL_ENGINE_DEVICE": "cuda",
    }
