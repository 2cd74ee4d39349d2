"""A rank's training state copied aside, so that it can be written while training goes on and changes it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.image import write_image
from trinity_sync.weights.snapshot import Snapshot, plan


class StateCopy:
    """Copies of a state, one at a time, into memory that is kept: fresh pages would cost more than the copy. The live
    tensors are not: an engine that offloads makes others, and those of before are to be freed.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._snapshot: Snapshot | None = None

    def take(self, files: Mapping[str, object], what: str, *, lazily: bool = False) -> None:
        """Copy a state; the copy before must not be needed any more.

        Args:
            files: file name -> live value for `torch.save`.
            what: for errors, such as ``"the state of step 3"``.
            lazily: return at once and copy on; the state must not change before `wait_until_copied` returns.
        """
        planned = plan(files)
        if self._memory is None or len(self._memory) < planned.nbytes:
            self._snapshot, self._memory = None, mmap.mmap(-1, max(planned.nbytes, mmap.PAGESIZE))
        self._snapshot = Snapshot(planned, self._memory, what)
        self._snapshot.copy(in_background=lazily)

    def wait_until_copied(self, timeout_s: float) -> None:
        """Wait until what was taken last may change. An error of the copy is left to what writes it.

        Raises:
            WaitTimeout: the copy takes longer than `timeout_s`.
        """
        if self._snapshot is not None:
            self._snapshot.wait_until_copied(timeout_s)

    def let_go(self, name: str) -> None:
        """Keep none of a file's live tensors, as its writer does: the writer will not be called."""
        if self._snapshot is not None:
            self._snapshot.let_go(name)

    def writer(
        self, name: str, folder: Path, staging: Path, *, durable: bool, timeout_s: float
    ) -> Callable[[], list[FileTuple]]:
        """Return what writes one file of the copy into `folder`, as `torch.save` would, and returns its entry. To be
        called once.

        Args:
            staging: the step's staging folder, to which the entry is relative.
            durable: fsync.
            timeout_s: limit of the wait for the copy, seconds.
        """
        snapshot, memory = self._snapshot, self._memory
        assert snapshot is not None
        assert memory is not None

        def write() -> list[FileTuple]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (image,) = snapshot.file_images(folder, timeout_s, {name})
            finally:
                snapshot.let_go(name)
            path = Path(image.path)
            size, digest = write_image(path, image.extents, memory, durable=durable)
            return [(path.relative_to(staging).as_posix(), size, digest)]

        return write
