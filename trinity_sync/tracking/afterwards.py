"""Changes to the files of a run after its end; while it runs, only the driver writes them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import PruneEvent, event_line, read_events
from trinity_sync.tracking.run_record import RunFolder, RunFolderInUse, read_record
from trinity_sync.tracking.summary import checkpoint_figures, write_summary


def note_prunes(run: Path, pruned: Iterable[tuple[int, str, int]], checkpoints: Path) -> bool:
    """Add ``prune`` events to a run that has ended, and update its summary.

    Args:
        pruned: step, reason and freed bytes of each deleted checkpoint.

    Returns:
        False if the run is still running: nothing is written, as its summary will look at the disk.

    Raises:
        ConfigError, RunError: its files cannot be read or written.
    """
    try:
        with RunFolder.open(run, resume=True) as folder:
            attempt = read_record(folder.run_json)["attempt"]
            writer = json_lines.JsonlWriter(folder.events)
            try:
                for step, reason, freed in pruned:
                    event = PruneEvent(time=time.time(), attempt=attempt, step=step, reason=reason, freed_bytes=freed)
                    writer.append(event_line(event))
            finally:
                writer.close()
            if folder.summary.exists():
                with contextlib.suppress(ValueError):  # a damaged one says nothing of checkpoints
                    summary = dict(json.loads(folder.summary.read_bytes()))
                    summary["checkpoint"] = checkpoint_figures(read_events(folder.events), checkpoints)
                    write_summary(folder.summary, summary)
    except RunFolderInUse:
        return False
    return True
