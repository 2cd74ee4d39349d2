"""What of this machine decides how numbers are rounded: the processor, its vector instructions, and the GPUs."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "asimd")
"""From the newest: kernels are chosen by the best that there is."""


def describe() -> dict[str, str]:
    """Say ``machine``, ``cpu``, ``vectors`` and, where there are any, ``gpus``, as text. Reads files of the kernel and
    loads no library; what cannot be found out is left out.
    """
    found = {"machine": platform.machine(), "cpu": _cpu("model name"), "vectors": _vectors(), "gpus": _gpus()}
    return {name: text for name, text in found.items() if text}


def _cpu(field: str) -> str:
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return " ".join(value.split())
    return ""


def _vectors() -> str:
    flags = (_cpu("flags") or _cpu("Features")).split()
    return next((name for name in _VECTORS if name in flags), "")


def _gpus() -> str:
    """As ``2 x NVIDIA H200``, all that the machine has."""
    models: Counter[str] = Counter()
    for path in sorted(_GPUS.glob("*/information")):
        models.update(line.partition(":")[2].strip() for line in _read(path).splitlines() if line.startswith("Model"))
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
