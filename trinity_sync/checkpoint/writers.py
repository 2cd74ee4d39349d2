"""The monitor's calls for those who write parts, and how it notices their deaths; base of `CheckpointMonitor`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from trinity_sync.actors.changes import Changes
from trinity_sync.actors.hosting import Host
from trinity_sync.checkpoint.execution import Execution
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.verl_folders import has_written
from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.protocol.commit import CommitBook
from trinity_sync.protocol.files import FileEntry
from trinity_sync.protocol.parts import FULL, STATE_DICT, FileTuple, beside_file, is_beside

_TICK_S = 0.5
#: After a restart, a writer that does not show up again within this time died meanwhile.
_REATTACH_S = 10.0


class Writers:
    """What the writers of parts call. Made on the actor's event loop.

    Args:
        book: decides.
        execution: carries out what it decides.
        changes: announced when something was done.
        host: what hosts the actor.
        root: the checkpoint folder; None: nothing is written.
        strategy: one of `trinity_sync.protocol.turns.SAVE_STRATEGIES`.
        timeout_s: limit of the wait for a turn, where the writer names none.
    """

    def __init__(
        self,
        book: CommitBook,
        execution: Execution,
        changes: Changes,
        host: Host,
        *,
        root: Path | None,
        strategy: str,
        timeout_s: float,
    ) -> None:
        self._book = book
        self._execution = execution
        self._changes = changes
        self._host = host
        self._root = root
        self._strategy = strategy
        self._timeout_s = timeout_s
        self._watched: dict[tuple[str, str, str], asyncio.Event] = {}
        self._clock_watch = asyncio.ensure_future(self._watch_clock())

    # ---- the seed's calls, with our additions

    async def register_thread_count(
        self,
        step: int,
        *,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        attempt: int | None = None,
    ) -> None:
        """Add to the numbers of parts that the step waits for."""
        self._execution.apply(
            self._book.register(
                step,
                weights=state_dict_thread_count,
                checkpoint=checkpoint_thread_count,
                report=self._host.call_id(),
                attempt=attempt,
            )
        )
        await self._execution.note(step)

    async def announce(self, step: int, parts: Sequence[str], *, weights: bool, attempt: int | None = None) -> None:
        """Wait for parts of these names before the step is committed; see `CommitBook.announce`."""
        await self._after_commit(step)
        self._book.announce(step, parts, weights=weights, attempt=attempt)
        await self._execution.note(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False, *, attempt: int | None = None) -> None:
        """Have the step committed, as weights only or as a full checkpoint, as soon as its parts are in."""
        self._execution.apply(self._book.mark(step, STATE_DICT if is_state_dict else FULL, attempt=attempt))
        await self._execution.note(step)

    async def has_part(self, step: int, part: str, *, attempt: int | None = None) -> bool:
        """Tell whether the part is in, so that there is nothing to write for it."""
        return attempt in (None, self._book.attempt) and self._book.has(step, part)

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        part: str | None = None,
        weights: bool | None = None,
        attempt: int | None = None,
        ticket: str | None = None,
        life: str = "",
        collective: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Take note that a save is about to write; return when the save strategy lets it.

        Args:
            node_id, job_id: the writer's node and process.
            step, part, weights, ticket, life: given by a `CheckpointCoordinator`, which also lets itself be watched.
            collective: the save holds barriers with its peers and does not queue.

        Raises:
            RunError: the step has failed meanwhile, or was committed without the part.
            WaitTimeout: its turn did not come.
        """
        if step is not None and part not in self._book.awaited(step):
            await self._after_commit(step)
        name = ticket or self._host.call_id()
        self._execution.apply(
            self._book.started(
                name,
                node_id,
                job_id,
                step=step,
                part=part,
                weights=weights,
                life=life,
                collective=collective,
                anonymous=ticket is None,
                attempt=attempt,
            )
        )
        if step is not None and not self._book.turn(name):
            await self._execution.note(step)
        try:
            await self._changes.wait(
                lambda: self._book.turn(name) is not False,
                lambda: ("the checkpoint monitor", f"give the writer {job_id} its turn ({self._strategy})"),
                self._timeout_s if timeout_s is None else timeout_s,
            )
        except WaitTimeout:
            self._execution.apply(self._book.cancel(name))
            raise
        if self._book.turn(name) is None:
            raise RunError(f"step {step} failed before the writer {job_id} had its turn: {self._reason(step)}")
        if step is not None:
            await self._execution.note(step)

    async def notify_finished(
        self,
        step: int,
        is_state_dict: bool = False,
        *,
        part: str | None = None,
        attempt: int | None = None,
        files: Iterable[FileEntry | FileTuple] | None = None,
        digest: str | None = None,
        ticket: str | None = None,
    ) -> None:
        """Take note that a part is written.

        Args:
            is_state_dict: it is a weights part (for a part that `begin` named, what `begin` said holds).
            part: the part's name; None: it is only counted.
            files: the files that were written; None: what is found in the step's folder at the commit, which then is
                one of all that is saved of the step.
            digest: the version digest of the weights.
            ticket: the ticket of its `notify_started`.

        Raises:
            RunError: the step was committed without the part.
        """
        told = None
        if files is not None:
            told = [(entry if isinstance(entry, FileEntry) else FileEntry(*entry)).as_tuple() for entry in files]
        try:
            decisions = self._book.finished(
                step,
                weights=is_state_dict,
                part=part,
                report=self._host.call_id() if ticket is None else ticket,
                files=told,
                digest=digest,
                ticket=ticket,
                attempt=attempt,
            )
        except RunError:
            self._execution.apply(self._book.cancel(ticket))
            raise
        self._execution.apply(decisions)
        await self._execution.note(step)

    async def notify_beside(self, step: int, *, attempt: int | None = None) -> None:
        """Take note that what verl's trainer writes itself, beside the files of its engines, is there: for every engine
        that has announced its parts of the step. Files that other processes of the trainer write are looked at.
        """
        for part in filter(is_beside, self._book.awaited(step)):
            if self._root is None or has_written(step_dir(self._root, step), beside_file(part)):
                self._execution.apply(self._book.finished(step, part=part, files=[], attempt=attempt))
        await self._execution.note(step)

    async def notify_failed(
        self, step: int, part: str | None, error: str, *, attempt: int | None = None, ticket: str | None = None
    ) -> None:
        """Take note that a part could not be written: nothing of the step is committed any more."""
        self._execution.apply(self._book.failed(step, part, error, ticket=ticket, attempt=attempt))
        await self._execution.note(step)

    async def notify_handed_over(self, ticket: str, step: int) -> None:
        """Take note that another writer answers for the part from now on; it has its turn already."""
        self._execution.apply(self._book.cancel(ticket))
        await self._execution.note(step)

    async def writer_lost(self, node_id: str, job_id: str | None = None, error: str = "its process died") -> None:
        """Take somebody's word that a writer's process (without a `job_id`: every one of the node) is gone."""
        self._execution.apply(self._book.writer_lost(node_id, job_id, error=error))

    async def _after_commit(self, step: int) -> None:
        """Wait until no commit of the step is under way: it takes the staging folder away."""
        await self._changes.wait(
            lambda: self._book.status(step).state != "committing" and not self._execution.finishing(step),
            lambda: ("the checkpoint monitor", f"commit what is there of step {step}"),
            self._timeout_s,
        )

    # ---- watching the writers

    async def lifeline(self, node_id: str, job_id: str, life: str) -> None:
        """Never returns while the writer lives: what it would return belongs to the writer; see `watch`."""
        await self._watched.setdefault((node_id, job_id, life), asyncio.Event()).wait()

    async def watch(self, node_id: str, job_id: str, life: str, owned: Sequence[object]) -> None:
        """Notice the writer's death by what it owns: its call of `lifeline`, see `Host.outlived`."""
        writer = (node_id, job_id, life)
        released = self._watched.setdefault(writer, asyncio.Event())
        try:
            if await self._host.outlived(owned):
                self._execution.apply(self._book.writer_lost(node_id, job_id, life))
        finally:
            released.set()
            self._watched.pop(writer, None)

    async def _watch_clock(self) -> None:
        started = time.monotonic()
        restored = self._book.writers()
        while True:
            await asyncio.sleep(_TICK_S)
            self._execution.apply(self._book.tick())
            if restored and time.monotonic() - started > _REATTACH_S:
                for writer in restored - self._watched.keys():
                    self._execution.apply(
                        self._book.writer_lost(*writer, error="it died while the checkpoint monitor was away")
                    )
                restored = set()

    def _reason(self, step: int | None) -> str:
        error = self._book.status(step).error if step is not None else None
        return error or "its writer was given up"
