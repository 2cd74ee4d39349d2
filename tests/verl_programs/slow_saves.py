"""Named by `VERL_USE_EXTERNAL_MODULES`: from step 4 on no rank writes its files before there is a file ``go-STEP`` in
the folder that `SLOW` names.

A rank touches ``writing-STEP-RANK`` there when it is about to write them. The trainer goes on to the next save.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook


def _slow(module: ModuleType) -> None:
    ours = module.CheckpointCoordinator.save_async
    folder = Path(os.environ["SLOW"])

    def save_async(self: Any, name: str, save_fn: Any, global_step: int, *args: Any, **kwargs: Any) -> None:
        def slow() -> Any:
            (folder / f"writing-{global_step}-{os.environ['RANK']}").touch()
            while not (folder / f"go-{global_step}").exists():
                time.sleep(0.02)
            return save_fn()

        ours(self, name, slow if global_step >= 4 else save_fn, global_step, *args, **kwargs)

    module.CheckpointCoordinator.save_async = save_async


register_post_import_hook(_slow, "trinity_sync.checkpoint.coordinator")
