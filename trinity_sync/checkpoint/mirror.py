"""Copy a committed checkpoint to a second place: ``python -m trinity_sync.checkpoint.mirror FOLDER DESTINATION``.

A program of its own, started by the monitor, so that neither a slow remote store nor the library that speaks to it is
felt by the monitor. The manifest is copied last and the tracker after it: a copy that broke off is no checkpoint there.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from trinity_sync.checkpoint.layout import MANIFEST, read_manifest, write_atomic
from trinity_sync.checkpoint.store import verify
from trinity_sync.checkpoint.trackers import TRACKERS, read_tracker
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import FULL


def copy_checkpoint(folder: Path, destination: str) -> None:
    """Copy a full checkpoint and let the tracker there name it.

    Args:
        folder: a committed step folder.
        destination: a checkpoints folder: a path, or a URI of a file system that pyarrow knows (``s3://``, ``hdfs://``).

    Raises:
        RunError: the copy does not verify.
        OSError: one of the two sides refused.
    """
    if "://" in destination and not destination.startswith("file://"):
        _copy_remote(folder, destination)
    else:
        _copy_local(folder, Path(destination.removeprefix("file://")))


def _copy_local(folder: Path, root: Path) -> None:
    manifest = read_manifest(folder)
    target = root / folder.name
    for entry in manifest.files:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / entry.path, place)
    write_atomic(target / MANIFEST, (folder / MANIFEST).read_text(encoding="utf-8"))
    report = verify(target)
    if not report.ok:
        (target / MANIFEST).unlink()
        raise RunError(f"the copy in {target} does not verify: {report.problems[0]}")
    named = read_tracker(root, FULL).step
    if named is None or named < manifest.step:
        write_atomic(root / TRACKERS[FULL], str(manifest.step))


def _copy_remote(folder: Path, destination: str) -> None:
    from pyarrow import fs  # heavy, and needed for remote places only

    manifest = read_manifest(folder)
    remote, base = fs.FileSystem.from_uri(destination)
    local = fs.LocalFileSystem()
    target = f"{base}/{folder.name}"
    for path in [*(entry.path for entry in manifest.files), MANIFEST]:
        remote.create_dir(f"{target}/{path}".rpartition("/")[0], recursive=True)
        fs.copy_files(str(folder / path), f"{target}/{path}", source_filesystem=local, destination_filesystem=remote)
    with remote.open_output_stream(f"{base}/{TRACKERS[FULL]}") as stream:
        stream.write(str(manifest.step).encode())


if __name__ == "__main__":
    try:
        copy_checkpoint(Path(sys.argv[1]), sys.argv[2])
    except (RunError, OSError) as error:
        sys.exit(f"{sys.argv[1]} was not copied to {sys.argv[2]}: {error}")
