"""The states of a run in shared memory (`checkpoint.memory_interval`), from which it heals without an older checkpoint.

They lie in a folder that is laid out as the checkpoint folder, and has a monitor of its own, so they are saved, checked
and read as checkpoints are. The folder belongs to the program, and outlives the attempts of its run. The next attempt
copies the newest state to the checkpoint folder, as it does with a checkpoint at a mirror.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trinity_sync.checkpoint.folder.catalog import CheckpointInfo
from trinity_sync.checkpoint.folder.lock import has_no_monitor, locked
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, RunMirror
from trinity_sync.config import Config
from trinity_sync.errors import TrinityError
from trinity_sync.host.interrupts import wait_until
from trinity_sync.weights.slots import kept_folder

KEY = "checkpoint.memory_interval"
_MONITOR_S, _REST_S = 10.0, 1.0


@dataclass(frozen=True)
class MemoryStates:
    """The folder of the states; `owner` is the run."""

    root: Path
    owner: Owner

    def bring(self, checkpoints: Path, newest: CheckpointInfo | None) -> int | None:
        """Copy the newest state to the checkpoint folder if it is newer than the newest checkpoint there; return its
        step. A state that cannot be read is told and left out.
        """
        settings = MirrorSettings(key=KEY, tries=1)
        place = RunMirror(str(self.root), settings, self.owner)
        try:
            # a monitor of the attempt before may still commit
            wait_until(partial(has_no_monitor, self.root), _MONITOR_S, _REST_S)
            step = place.fetch_newer(checkpoints, newest)
        except (TrinityError, OSError) as error:
            print(f"the states in memory cannot be used: {error}", file=sys.stderr)
            return None
        if step is not None:
            print(f"the state of step {step} was in memory ({KEY})", file=sys.stderr)
        return step

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Empty the folder and let an attempt write there."""
        for left in self.root.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        with locked(self.root, Path(self.owner.folder)):
            write_mark(self.root, self.owner)
            yield


@contextmanager
def memory_folder(cfg: Config, run: Path) -> Iterator[Path | None]:
    """Make the folder of a run's states for the block, or take that of a killed driver; None: the run has none."""
    if not cfg.checkpoint.memory_interval:
        yield None
        return
    name = f"states-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}"
    with kept_folder(cfg.sync.shm_dir, name) as folder:
        yield folder
