"""Checkpoints that verl itself wrote: step folders without a manifest, or with one of weights that were committed
before, told by the names of the files in them.

They are listed and resumed from, and belong to whoever wrote them: nothing here renames, replaces or deletes one. What
is in them nobody has digested, so they are not verified. verl names a step in its tracker when it has written all of
it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection
from pathlib import Path

from trinity_sync.checkpoint.layout import MANIFEST, TRAINER_STATE
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import missing_rank_files

_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
_PARTS = ("model", "optim", "extra_state")
_STATE = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_MEGATRON = "ckpt_contents.json"
_METADATA = ".metadata"
_DISTRIBUTED = (f"/{_METADATA}", ".distcp")
_CHUNKS = rb"__\d+_\d+\.distcp"


def wrote(folder: Path) -> bool:
    """Return whether verl wrote a folder that has no manifest: the files have the names that verl gives a checkpoint's.

    None may be of this program's own trainer, whose engines write under the same names.
    """
    if (folder / TRAINER_STATE).exists():
        return False
    return any(_ranks(place) or (place / _MEGATRON).is_file() for place in _places(folder))


def wrote_over(folder: Path, weights: Collection[str]) -> bool:
    """Return whether verl has saved in full where weights had been committed alone.

    Args:
        folder: the step folder.
        weights: the committed files, relative to the folder.
    """
    found = (path for place in _places(folder) for path in place.iterdir())
    return any(
        (path.name == _MEGATRON or _STATE.fullmatch(path.name)) and path.relative_to(folder).as_posix() not in weights
        for path in found
    )


def missing(folder: Path, roles: Collection[str] = ()) -> str | None:
    """Return the first thing that a full checkpoint of verl's lacks, relative to the folder; None: it is whole.

    That is a role of `roles`, or the file of a rank of which another one is there.
    """
    for role in roles:
        if not _ranks(folder / role) and not (folder / role / _MEGATRON).is_file():
            return role
    files = [path.relative_to(folder).as_posix() for place in _places(folder) for path in place.glob("*.pt")]
    return next(iter(missing_rank_files(files)), None)


def missing_files(folder: Path, files: Collection[str]) -> list[str]:
    """Return the files that these need: of other ranks, by name, and those that a ``.metadata`` of torch's names.

    Args:
        folder: the step folder.
        files: paths relative to it.

    Raises:
        OSError: a ``.metadata`` file cannot be read.
    """
    missing = missing_rank_files(files)
    for place in sorted({path.rpartition("/")[0] for path in files if path.endswith(_DISTRIBUTED)}):
        named = {f"{place}/{_METADATA}"}
        if named.issubset(files):  # a pickle, which is not loaded: it holds the names of files as they are
            found = re.findall(_CHUNKS, (folder / place / _METADATA).read_bytes())
            named = {f"{place}/{name.decode()}" for name in found}
        missing += sorted(named.difference(files))
    return missing


def has_written(folder: Path, file: str | None) -> bool:
    """Return whether verl's trainer has written all of a file that `torch.save` writes beside those of an engine; None:
    nothing is asked for. What was broken off lacks the end of the archive.
    """
    return file is None or zipfile.is_zipfile(folder / file)


def recognise(folder: Path) -> tuple[str, int]:
    """Return engine and number of ranks of a checkpoint that verl's FSDP engine wrote whole, in ``actor``.

    Raises:
        RunError: it is no such checkpoint.
    """
    actor = folder / "actor"
    ranks = _ranks(actor)
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


def _places(folder: Path) -> list[Path]:
    """List where verl's trainers let an engine save: in a folder of its role (``actor``), or in the step's (SFT)."""
    return [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]


def _ranks(place: Path) -> int:
    """Return of how many ranks there are shards; 0: there are none."""
    found = (_SHARD.fullmatch(path.name) for path in sorted(place.glob("model_*.pt")))
    return next((int(match[1]) for match in found if match), 0)
