"""verl's own SFT trainer on CPUs, with either engine, where something befalls a copy of what is saved; `COPY` says it.

`slow`: the first one goes on until the optimizer has stepped; where the optimizer waits for it, it is let go after a
second. `fails`: the second one of rank 1 does.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

WHAT = "COPY"

_COPIES = 0


def slow() -> None:
    from trinity_sync.integrations.verl.engine_registry import SavesThroughUs
    from trinity_sync.weights.staging import TensorCopy

    asked, stepped = threading.Event(), threading.Event()
    real_step, real_copy = SavesThroughUs.optimizer_step, TensorCopy._copy

    def step(self: SavesThroughUs) -> Any:
        if _COPIES:
            asked.set()
        found = real_step(self)
        if _COPIES:
            stepped.set()
        return found

    def copy(self: TensorCopy) -> None:
        if _first():
            assert asked.wait(60.0), "the trainer does not go on beside the copy"
            stepped.wait(1.0)
        real_copy(self)

    SavesThroughUs.optimizer_step = step  # type: ignore[method-assign]
    TensorCopy._copy = copy  # type: ignore[method-assign]


def fails() -> None:
    from trinity_sync.weights.staging import TensorCopy

    real = TensorCopy._copy_one

    def copy_one(self: TensorCopy, source: Any, target: Any) -> None:
        if _COPIES == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("planted: no copy")
        real(self, source, target)

    real_copy = TensorCopy._copy

    def copy(self: TensorCopy) -> None:
        _first()
        real_copy(self)

    TensorCopy._copy_one = copy_one  # type: ignore[method-assign]
    TensorCopy._copy = copy  # type: ignore[method-assign]


def _first() -> bool:
    """Count a copy."""
    global _COPIES
    _COPIES += 1
    return _COPIES == 1


if __name__ == "__main__":  # verl's own saves start processes that import this
    {"slow": slow, "fails": fails}[os.environ[WHAT]]()
    of = "sft_megatron_on_cpu.py" if any("engine=megatron" in one for one in sys.argv) else "sft_on_cpu.py"
    runpy.run_path(str(Path(__file__).with_name(of)), run_name="__main__")
