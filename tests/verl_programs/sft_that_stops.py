"""verl's own SFT trainer on CPUs, which stands still after the save of step 4, when it has written all of its share.

It touches `written-RANK` in the current folder then.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import verl.utils.distributed as verl_distributed
from verl.utils.checkpoint import CheckpointHandler

from tests.verl_programs.sft_on_cpu import meet

_real = CheckpointHandler.save_checkpoint


def save_checkpoint(self: Any, step: int) -> None:
    _real(self, step)
    if step == 4:
        self.engine.checkpoint_manager.finish_writing()
        Path(f"written-{os.environ['RANK']}").touch()
        threading.Event().wait()


if __name__ == "__main__":
    verl_distributed.initialize_global_process_group = meet
    CheckpointHandler.save_checkpoint = save_checkpoint
    from verl.trainer import sft_trainer

    sft_trainer.main()
