"""Checkpoints that verl itself wrote: step folders without a manifest, told by the names of the files in them.

They are listed and resumed from, and belong to whoever wrote them: nothing here renames, replaces or deletes one. What
is in them nobody has digested, so they are not verified. verl names a step in its tracker when it has written all of
it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from trinity_sync.checkpoint.layout import MANIFEST, TRAINER_STATE
from trinity_sync.errors import RunError

_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
_PARTS = ("model", "optim", "extra_state")
_MEGATRON = "ckpt_contents.json"


def wrote(folder: Path) -> bool:
    """Whether the files in a folder without a manifest have the names that verl gives a checkpoint's, and none is of
    this program's own trainer, whose engines write under the same names.
    """
    if (folder / TRAINER_STATE).exists():
        return False
    actor = folder / "actor"
    return (actor / _MEGATRON).is_file() or any(_SHARD.fullmatch(path.name) for path in actor.glob("model_*.pt"))


def missing(folder: Path) -> str | None:
    """The first file that is not there, relative to the folder, of the model or of what else some rank has saved; None:
    all are.
    """
    actor = folder / "actor"
    ranks = _ranks(folder)
    for part in _PARTS:
        names = [f"{part}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        absent = [name for name in names if not (actor / name).is_file()]
        if absent and (part == "model" or len(absent) < ranks):
            return f"actor/{absent[0]}"
    return None


def recognise(folder: Path) -> tuple[str, int]:
    """Engine and ranks of a checkpoint that verl's FSDP engine wrote whole.

    Raises:
        RunError: it is none.
    """
    actor, ranks = folder / "actor", _ranks(folder)
    if not ranks:
        raise RunError(f"{folder} has neither {MANIFEST} nor verl's FSDP shards below actor/")
    wanted = [f"{name}_world_size_{ranks}_rank_{rank}.pt" for name in _PARTS for rank in range(ranks)]
    absent = [name for name in wanted if not (actor / name).exists()]
    if absent:
        raise RunError(f"{folder} is not whole: actor/{absent[0]} is missing")
    try:
        version = int(json.loads((actor / "fsdp_config.json").read_text())["FSDP_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: actor/fsdp_config.json cannot be read: {error}") from error
    return ("fsdp" if version == 1 else f"fsdp{version}"), ranks


def _ranks(folder: Path) -> int:
    """Of how many ranks there are shards; 0: there are none."""
    found = (_SHARD.fullmatch(path.name) for path in sorted((folder / "actor").glob("model_*.pt")))
    return next((int(match[1]) for match in found if match), 0)
