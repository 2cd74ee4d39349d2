"""Checkpoint folders for the tests of this room."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.checkpoint.folder import commits
from trinity_sync.checkpoint.folder.contents import MANIFEST, Manifest, file_entry, step_dir, versions_dir
from trinity_sync.protocol.parts import FULL, FileEntry, Kind

WEIGHTS = {"actor/weights_rank-00000.safetensors": "version"}


def beside(root: Path, step: int, attempt: int) -> Path:
    """Where weights are whose place is taken."""
    return step_dir(versions_dir(root, attempt), step)


def stage(root: Path, step: int, files: Mapping[str, str], *, attempt: int = 0) -> list[FileEntry]:
    """Write files into the staging folder of a step; returns their entries."""
    folder = commits.prepare_staging(root, step, attempt)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [file_entry(folder, name) for name in files]


def commit(
    root: Path,
    step: int,
    files: Mapping[str, str] | None = None,
    *,
    kind: Kind = FULL,
    attempt: int = 0,
    partial: bool = False,
    created: float = 0.0,
    metrics: Mapping[str, float] | None = None,
    reported: bool = True,
) -> Manifest:
    """Stage and commit a step."""
    entries = stage(root, step, {"actor/model.pt": f"weights {step}"} if files is None else files, attempt=attempt)
    draft = Manifest(
        step=step,
        attempt=attempt,
        kind=kind,
        created=created,
        metrics=metrics or {},
        files=tuple(entries) if reported else (),
    )
    return commits.commit_folder(root, draft, partial=partial)


def names(folder: Path) -> set[str]:
    """All files below a folder but its monitor's lock, the note of its last commit and its mark, relative."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return files - {".monitor.lock", ".committed", ".run.json"}


def verls(root: Path, step: int = 30, *, ranks: int = 2, version: int = 2, place: str = "actor") -> Path:
    """A checkpoint as verl writes it; its SFT trainer has the step's folder itself for a place."""
    folder = root / f"global_step_{step}"
    actor = folder / place
    actor.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        for name in ("model", "optim", "extra_state"):
            (actor / f"{name}_world_size_{ranks}_rank_{rank}.pt").write_text("x")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    return folder


def unreadable(path: Path) -> None:
    """Let reads of a file fail with EIO: it becomes a link to the memory of the reader, which has no address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def newer(folder: Path, version: object = 2) -> None:
    """Let a manifest be one of a later version of this program, which may have any contents."""
    (folder / MANIFEST).write_text(json.dumps({"format": version, "parts": []}))


def refuse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to rename a path fail with EIO, as a disk that is failing does."""
    real = os.rename

    def rename(source: Any, target: Any, **options: Any) -> None:
        if Path(source) == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        real(source, target, **options)

    monkeypatch.setattr(os, "rename", rename)
