"""The node agent's share of a full checkpoint: one slot for the training state of each rank of the node, and the files
written from it.

A rank copies its state into its segment, leaves files with holes in the staging folder, and hands over. From then on
the agent answers for the part: it fills the holes, digests, fsyncs and reports, and it does so even if the rank dies.
That yields to training, until the next save waits for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trinity_sync.actors.agent import Coordinator, StatePart
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.host.yielding import PATIENCE, Yielding
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.image import write_image
from trinity_sync.weights.slots import SlotArena


class StateSlots:
    """The state segments of a node, one per rank, and who writes from them.

    Args:
        run_key, root, fallback: arguments of `SlotArena.create`.
        durable: fsync the files.
        timeout_s: limit until a part has its turn, seconds.
    """

    def __init__(self, run_key: str, root: str, fallback: Path, *, durable: bool, timeout_s: float) -> None:
        self._run_key, self._root, self._fallback = run_key, root, fallback
        self._durable = durable
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._arenas: dict[str, SlotArena] = {}
        self._sizes: dict[str, int] = {}
        self._writes: dict[str, tuple[Future[None], Yielding]] = {}
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="state")

    def reserve(self, part: str, nbytes: int) -> tuple[str, list[str]]:
        """Return the file of a part's segment, of at least `nbytes`, and notes for the user. Made once and reused.

        Raises:
            SegmentError: there is no room.
            RunError: the segment is too small, and still being written from.
        """
        with self._lock:
            arena = self._arenas.get(part)
            if arena is not None and self._sizes[part] >= nbytes:
                return str(arena.path(0, part)), []
            if arena is not None:
                if not self._idle(part):
                    raise RunError(f"the state of {part} grew to {nbytes} bytes while it was being written")
                self._arenas.pop(part).close()
            arena = SlotArena.create(
                f"{self._run_key}-state-{part}", 1, {part: nbytes}, root=self._root, fallback=self._fallback
            )
            self._arenas[part], self._sizes[part] = arena, nbytes
            return str(arena.path(0, part)), list(arena.notes)

    def take(self, given: StatePart, coordinator: Coordinator) -> None:
        """Become the writer of a part; returns when it is its turn, and the files are written behind the caller's back.

        Raises:
            RunError: the part before it is still being written, or the step has failed.
            WaitTimeout: its turn does not come.
        """
        begun = threading.Event()
        with self._lock:
            if not self._idle(given.part):
                raise RunError(f"{given.part} of an earlier step is still being written")
            work = Yielding(PATIENCE * self._timeout_s)
            future = self._threads.submit(self._write, given, coordinator, begun, work)
            self._writes[given.part] = future, work
        future.add_done_callback(lambda _: begun.set())
        if not begun.wait(self._timeout_s):
            raise WaitTimeout(
                "the checkpoint monitor", f"give {given.part} of step {given.step} its turn", self._timeout_s
            )
        if future.done() and (error := future.exception()) is not None:
            raise RunError(f"{given.part} of step {given.step} was not written: {error}") from error

    def wait_written(self, part: str, timeout_s: float, *, hurry: bool) -> None:
        """Wait until the segment of a part may be used again. What became of the files, the monitor was told.

        Args:
            hurry: training waits too, so that there is nothing to yield to.

        Raises:
            WaitTimeout: it is still being written from.
        """
        if part not in self._writes:
            return
        future, work = self._writes[part]
        if hurry:
            work.hurry()
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout_s):
            raise WaitTimeout("the node agent", f"write {part}", timeout_s)

    def close(self) -> None:
        """Give the memory back."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    def _idle(self, part: str) -> bool:
        return part not in self._writes or self._writes[part][0].done()

    def _write(self, given: StatePart, coordinator: Coordinator, begun: threading.Event, work: Yielding) -> None:
        segment = self._arenas[given.part].map(0, given.part) if given.part in self._arenas else b""

        def write() -> list[FileTuple]:
            begun.set()
            with work:
                return [
                    (path, *write_image(Path(given.folder) / path, extents, segment, durable=self._durable))
                    for path, extents in given.files
                ]

        coordinator.save_sync(write, given.step, part=given.part, queues=True)
