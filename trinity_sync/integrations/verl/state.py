"""A rank's training state copied aside, so that it can be written while training goes on and changes it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.image import write_image
from trinity_sync.weights.snapshot import Snapshot, plan


class StateCopy:
    """Copies of a state, one at a time, into memory that is kept: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._snapshot: Snapshot | None = None

    def take(self, files: Mapping[str, object], what: str) -> None:
        """Copy a state; the copy before must not be needed any more.

        Args:
            files: file name -> live value for `torch.save`.
            what: for errors, such as ``"the state of step 3"``.
        """
        planned = plan(files)
        if self._memory is None or len(self._memory) < planned.nbytes:
            self._snapshot, self._memory = None, mmap.mmap(-1, max(planned.nbytes, mmap.PAGESIZE))
        self._snapshot = Snapshot(planned, self._memory, what)
        self._snapshot.copy(in_background=False)

    def writer(self, name: str, folder: Path, staging: Path, *, durable: bool) -> Callable[[], list[FileTuple]]:
        """Return what writes one file of the copy into `folder`, as `torch.save` would, and returns its entry.

        Args:
            staging: the step's staging folder, to which the entry is relative.
            durable: fsync.
        """
        snapshot, memory = self._snapshot, self._memory
        assert snapshot is not None
        assert memory is not None
        return lambda: [_write(snapshot, memory, name, folder, staging, durable)]


def _write(snapshot: Snapshot, memory: mmap.mmap, name: str, folder: Path, staging: Path, durable: bool) -> FileTuple:
    folder.mkdir(parents=True, exist_ok=True)
    # The copy is whole already, so there is nothing to wait for.
    (image,) = snapshot.file_images(folder, 0.0, {name})
    path = Path(image.path)
    size, digest = write_image(path, image.extents, memory, durable=durable)
    return path.relative_to(staging).as_posix(), size, digest
