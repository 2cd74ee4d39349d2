"""verl's own SFT trainer on CPUs, of which no rank writes its files of step 4 before there is a file ``go``.

A rank touches `writing-RANK` in the current folder when it is about to write them. The trainer goes on meanwhile, but
for its last step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import verl.utils.distributed as verl_distributed

from tests.verl_programs.sft_on_cpu import meet
from trinity_sync.checkpoint import CheckpointCoordinator

_real = CheckpointCoordinator.save_async


def save_async(self: Any, name: str, save_fn: Any, global_step: int, *args: Any, **kwargs: Any) -> None:
    def slow() -> Any:
        Path(f"writing-{os.environ['RANK']}").touch()
        while not Path("go").exists():
            time.sleep(0.02)
        return save_fn()

    _real(self, name, slow if global_step == 4 else save_fn, global_step, *args, **kwargs)


if __name__ == "__main__":
    verl_distributed.initialize_global_process_group = meet
    CheckpointCoordinator.save_async = save_async
    from verl.trainer import sft_trainer

    sft_trainer.main()
