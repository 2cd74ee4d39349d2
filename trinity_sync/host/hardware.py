"""Memory and processor of this machine, and the folders in which a program finds the user's modules.

Every actor reports its peak memory for summary.json; the driver collects them by role.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def peak_rss() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes, see getrusage(2).
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory() -> int:
    """Return the same, but count only this process's share of shared memory: forks share most of their imports.

    Without Linux's counters, all of it.
    """
    try:
        return peak_rss() - _shared("self")
    except (OSError, ValueError, KeyError):
        return peak_rss()


def peak_memory_with_children() -> int:
    """Return the sum of `peak_memory` over this process and all below it, as far as the system reports it."""
    import psutil

    total = peak_memory()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or the system is not Linux
            total += _sizes(Path(f"/proc/{child.pid}/status"))["VmHWM"] - _shared(str(child.pid))
    return total


def _shared(process: str) -> int:
    """Return the bytes of others' share in a process's memory."""
    sizes = _sizes(Path(f"/proc/{process}/smaps_rollup"))
    return sizes["Rss"] - sizes["Pss"]


def _sizes(table: Path) -> dict[str, int]:
    """Return the sizes in a table of /proc, in bytes."""
    lines = (line.split(":", 1) for line in table.read_text().splitlines() if line.endswith(" kB"))
    return {name: int(size.split()[0]) * 1024 for name, size in lines}


def available_memory() -> int | None:
    """Return the free bytes of this machine, or of the container around this process; None: unknown."""
    free: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        pages = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        if limit != "max":
            free.append(int(limit) - used + int(pages.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return min(free, default=None)


# Hardware that affects the rounding of numbers: the processor, its vector instructions, and the GPUs.

_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "asimd")
"""From the newest: libraries choose kernels by the best available."""


def describe() -> dict[str, str]:
    """Return ``machine``, ``cpu``, ``vectors`` and ``gpus``, as text, without unknown ones.

    Reads files of the kernel and loads no library.
    """
    flags = (_cpu("flags") or _cpu("Features")).split()
    vectors = next((name for name in _VECTORS if name in flags), "")
    found = {"machine": platform.machine(), "cpu": _cpu("model name"), "vectors": vectors, "gpus": _gpus()}
    return {name: text for name, text in found.items() if text}


def _cpu(field: str) -> str:
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return " ".join(value.split())
    return ""


def _gpus() -> str:
    """Return all GPUs of the machine, as in ``2 x NVIDIA H200``."""
    models: Counter[str] = Counter()
    for path in sorted(_GPUS.glob("*/information")):
        models.update(line.partition(":")[2].strip() for line in _read(path).splitlines() if line.startswith("Model"))
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# A program finds modules in the folder in which the user has started it, last of all.

RAYS_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Ray's variable for a function that it calls first in a worker."""
_FOLDERS = "TRINITY_SYNC_MODULES"
_folders: list[str] = []
_named = False


@contextmanager
def own_modules_found(*folders: Path, unless_named: bool = False) -> Iterator[None]:
    """Find the user's modules, such as a reward or a task, in these folders during the block.

    They are searched last, so that no file of theirs hides another module. They replace the folders of an outer block.
    """
    global _named
    here, around, before = [str(folder) for folder in folders], list(_folders), _named
    if unless_named and before:
        yield
        return
    for other in around:
        _leave_out(other)
    _folders[:] = here
    sys.path += here
    _named = True
    try:
        yield
    finally:
        for folder in here:
            _leave_out(folder)
        sys.path += around
        _folders[:] = around
        _named = before


def _leave_out(folder: str) -> None:
    """Remove the last occurrence of a folder from the path; an earlier one may be another's."""
    if folder in sys.path:
        sys.path.reverse()
        sys.path.remove(folder)
        sys.path.reverse()


def own_module_folders() -> list[str]:
    """Return the folders of `own_modules_found`."""
    return list(dict.fromkeys(_folders))


class ScriptFolder(list[str]):
    """For Ray's list of folders that workers search first: takes this program's first one, and not the current one."""

    def extend(self, folders: Iterable[str]) -> None:
        super().extend(folder for folder in folders if folder in sys.path[:1])


def for_workers() -> dict[str, str]:
    """Return variables for `look_there`."""
    return {_FOLDERS: json.dumps(own_module_folders())}


def look_there() -> None:
    """Search the folders of `own_modules_found` in a worker of Ray, last of all.

    Programs that the worker starts do not inherit the variables.
    """
    os.environ.pop(RAYS_HOOK, None)
    sys.path.extend(json.loads(os.environ.pop(_FOLDERS, "[]")))
