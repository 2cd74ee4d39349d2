"""Setting a checkpoint folder back to the step that a resume goes on from. Later checkpoints are set aside."""

from __future__ import annotations

import time
from pathlib import Path

from trinity_sync.checkpoint.catalog import check_ours, scan
from trinity_sync.checkpoint.deletion_notes import unlink_notes
from trinity_sync.checkpoint.layout import abandoned_dir
from trinity_sync.checkpoint.recovery import recover
from trinity_sync.checkpoint.tracker_files import write_committed, write_tracker
from trinity_sync.host.durable import sync_folder
from trinity_sync.protocol.parts import FULL, STATE_DICT


def check_start(root: Path, step: int, *, of_verl: bool = False) -> None:
    """Check that a resume may go on after a step: all later ones, which it sets aside, are this program's own.

    Args:
        of_verl: verl itself may have written here. Else what looks as if it had is ours, without its manifest.

    Raises:
        RunError: a later one was written by a newer version of this program, by another run, or by verl.
    """
    others = ("newer", "foreign", "verl") if of_verl else ("newer", "foreign")
    check_ours([info for info in scan(root) if info.step > step], others)


def set_start(root: Path, step: int, attempt: int, *, of_verl: bool = False) -> list[Path]:
    """Prepare a resume: `attempt` goes on after `step`. Later folders become ``abandoned-*``, trackers are set back.

    Args:
        step: the step that the resume starts from; 0: from the initial weights.
        attempt: the new attempt; what is staged of others is removed.
        of_verl: as for `check_start`.

    Returns:
        The new paths of the abandoned folders.

    Raises:
        RunError: as `check_start`; nothing has been touched then.
    """
    check_start(root, step, of_verl=of_verl)
    recover(root, clock=time.time)
    unlink_notes(root, attempt)
    infos = scan(root)
    # What the resume starts from may be verl's own.
    full = [info.step for info in infos if info.kind == FULL or (info.step == step and info.state == "verl")]
    # Trackers first: a crash in between leaves them naming something that is there.
    if root.is_dir():
        write_committed(root, max((of for of in full if of <= step), default=0))
    for kind, steps in ((STATE_DICT, [info.step for info in infos if info.manifest is not None] + full), (FULL, full)):
        write_tracker(root, kind, max((of for of in steps if of <= step), default=None))
    abandoned = []
    for info in infos:
        if info.step > step:
            before = info.attempt if info.attempt is not None or attempt == 0 else attempt - 1
            path = abandoned_dir(root, info.step, before)
            info.path.rename(path)
            abandoned.append(path)
    if abandoned:
        sync_folder(root)
    return abandoned
