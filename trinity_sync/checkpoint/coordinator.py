"""`CheckpointCoordinator`: through it a rank saves, in the background or on the calling thread.

One per rank, made with the handle of the run's `CheckpointMonitor`. For each save it asks the monitor for a turn, runs
the save, digests and fsyncs the files while they are in the page cache, and reports the part finished or failed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from trinity_sync.actors.monitor_client import CommitReport, Facts, MonitorClient
from trinity_sync.actors.pending import ANSWER_S, CallChannel, PendingCall
from trinity_sync.checkpoint.folder.contents import file_entry, staging_dir, step_dir
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.logs import log_failure
from trinity_sync.host.origin import error_line
from trinity_sync.host.threads import PATIENCE, BackgroundWork, in_background
from trinity_sync.protocol.parts import STATE_DICT, FileEntry, FileTuple

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Writes the part's files and returns them as entries, tuples of their fields, or paths (absolute, or relative to the
# staging folder). If it returns anything that is not a list, the monitor takes the files in the step's folder.
SaveFn: TypeAlias = Callable[[], Iterable[str | os.PathLike[str] | FileEntry | FileTuple] | object]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Save:
    """One save in the background."""

    step: int
    ended: Future[None]
    work: BackgroundWork


@dataclass(frozen=True, slots=True)
class _Part:
    """A save, as it is reported to the monitor."""

    step: int
    name: str | None
    is_state_dict: bool
    ticket: str


class CheckpointCoordinator:
    """Saves of one process.

    Usage::

        coordinator = CheckpointCoordinator(monitor, attempt=0)
        coordinator.save_async("model", lambda: write(snapshot), step, is_state_dict=True, part="model-rank-00000")
        ...                                  # training goes on
        coordinator.wait_all()               # raises the error of a background save

    Args:
        checkpoint_monitor: handle of the actor, from `CheckpointMonitor.get_actor`, or of one in a local process.
        node_id: names the node to the save strategies; default: Ray's node id, or the host's name.
        job_id: names this process to them; default: Ray's worker id, or the host's name and the process's number.
        timeout_s: limit of every wait in seconds: for the turn, for the monitor's answers, for an earlier save.
        attempt: the run's attempt; None: the monitor's.
        root: the checkpoint folder as this node sees it; None: the monitor's path.
    """

    def __init__(
        self,
        checkpoint_monitor: ActorHandle | CallChannel,
        *,
        node_id: str | None = None,
        job_id: str | None = None,
        timeout_s: float = 1800.0,
        attempt: int | None = None,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        self._monitor = MonitorClient(checkpoint_monitor)
        if not node_id or not job_id:
            node, process = self._monitor.caller()
            node_id, job_id = node_id or node, job_id or process
        self._node_id, self._job_id = node_id, job_id
        self._life = _life()
        self._timeout_s = timeout_s
        self._attempt = attempt
        self._root = Path(root) if root is not None else None
        self._facts: Facts | None = None
        self._watch: tuple[PendingCall[None], PendingCall[None]] | None = None
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}
        self._untold: list[BaseException] = []

    def save_async(
        self,
        name: str,
        save_fn: SaveFn,
        global_step: int,
        is_state_dict: bool = False,
        *,
        part: str | None = None,
        hands_over: bool = False,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Run `save_fn` in the background. It has to write a snapshot, since training goes on. Its pieces of work
        (`host.threads.piece`) yield to training until another call waits for the save.

        Args:
            name: saves of one name never overlap: the earlier one is waited for first.
            save_fn: writes the files, see `SaveFn`.
            global_step: the step.
            is_state_dict: the save writes weights.
            part: the part's name; None: the part is only counted.
            hands_over: `save_fn` hands the named part over to another writer, which takes its turn when `save_fn`
                returns and reports the part. Until then this process answers for the part; it takes no turn of its own.
            on_failure: called with the error that ends the save, also if `save_fn` never had its turn.

        Raises:
            Exception: the error of the earlier save of this name. This save is not started, and its part is reported
                failed.
            WaitTimeout: the earlier save does not end; likewise.
        """
        if hands_over and part is None:
            raise ValueError(f"the save {name!r} hands its part over, so the part needs a name")
        saving = _Part(global_step, part, is_state_dict, secrets.token_hex(16))
        try:
            self._finish_earlier(name)
        except BaseException as error:
            self._report_failed(saving, error, f"its save was not started, as an earlier one named {name!r} failed: ")
            raise
        # At once: from here on the monitor knows the part's process, and notices its death before the first byte.
        turn = self._ask_for_turn(saving, collective=hands_over)

        work = BackgroundWork(PATIENCE * self._timeout_s)

        def run() -> None:
            try:
                with work:
                    self._save(saving, save_fn, turn, queues=not hands_over, reports=not hands_over)
            except BaseException as error:
                with self._lock:
                    self._untold.append(error)
                on_failure(error)
                raise

        self._saves[name] = _Save(global_step, in_background(run, f"save-{name}-{global_step}"), work)

    def save_sync(
        self,
        save_fn: SaveFn,
        global_step: int,
        is_state_dict: bool = False,
        *,
        part: str | None = None,
        queues: bool = False,
    ) -> None:
        """Run `save_fn` on the calling thread, for saves with collective barriers; arguments as for `save_async`.

        Args:
            queues: wait for the turn of the save strategy. Not for collective saves: a waiting rank would block its
                peers in the barrier.

        Raises:
            Exception: the error of `save_fn`, after it was reported.
        """
        saving = _Part(global_step, part, is_state_dict, secrets.token_hex(16))
        self._save(saving, save_fn, self._ask_for_turn(saving, collective=not queues), queues=queues, reports=True)

    def announce(self, global_step: int, parts: Iterable[str], is_state_dict: bool = False) -> None:
        """Name parts before the first of them is written: the step is not committed without them, even if fewer parts
        are registered. Raises RunError if the step has failed.
        """
        self._answered(self._monitor.announce(global_step, list(parts), weights=is_state_dict, attempt=self._attempt))

    def fail(self, global_step: int, part: str | None, error: BaseException) -> None:
        """Report that this process cannot save its part, which it has not begun. None: the whole step fails."""
        self._report_failed(_Part(global_step, part, False, secrets.token_hex(16)), error)

    def wait_all(self) -> None:
        """Wait until no background save is running.

        Raises:
            Exception: the first error of the background saves since the last call, with the others as notes.
            WaitTimeout: a save does not end.
        """
        if errors := self._ended():
            for other in errors[1:]:
                errors[0].add_note(f"another background save failed as well: {error_line(other)}")
            raise errors[0]

    def settle(self) -> None:
        """Wait until no background save is running. Errors were reported to the monitor and are not raised: the next
        save may begin. Raises WaitTimeout.
        """
        self._ended()

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
    ) -> None:
        """Add expected parts to the step and ask for its commit. Does not wait for the parts.

        The trainer calls it once a step, after it has started the save in the workers.

        Args:
            global_step: the step.
            is_state_dict: commit it as weights only, else as a full checkpoint.
            state_dict_thread_count: number of parts of the weights that are not announced by name.
            checkpoint_thread_count: number of parts of the full checkpoint that are not announced by name.
        """
        if state_dict_thread_count or checkpoint_thread_count:
            registered = self._monitor.register_thread_count(
                global_step,
                state_dict_thread_count=state_dict_thread_count,
                checkpoint_thread_count=checkpoint_thread_count,
                attempt=self._attempt,
            )
            await registered.answer(self._timeout_s)
        await self._monitor.monitor_step(global_step, is_state_dict, attempt=self._attempt).answer(self._timeout_s)

    def wait_committed(
        self, global_step: int, is_state_dict: bool = False, *, timeout_s: float | None = None
    ) -> CommitReport:
        """Wait until the step (`is_state_dict`: its weights) is committed, its trackers have moved and retention has
        run. Any process may call it.

        Args:
            global_step: the step.
            is_state_dict: wait for the weights only.
            timeout_s: limit in seconds; None: the coordinator's.

        Returns:
            The commit: its `path`, `digest`, `bytes` and more.

        Raises:
            RunError: the step failed; says why.
            WaitTimeout: names what is missing.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        kind = STATE_DICT if is_state_dict else None
        committed = self._monitor.wait_committed(global_step, self._attempt, limit, kind=kind)
        return committed.result(limit + ANSWER_S)

    @property
    def durable(self) -> bool:
        """Whether files are fsynced."""
        return self._ask_facts()["fsync"]

    def is_saved(self, part: str, global_step: int) -> bool:
        """Whether the part is committed, or about to be. `save_async`, and `save_sync` with `queues`, then write
        nothing. Collective saves agree on this first, and report the part all the same.
        """
        return self._answered(self._monitor.has_part(global_step, part, attempt=self._attempt))

    def staged(self, local_path: str | os.PathLike[str], global_step: int) -> Path:
        """Return where to write the files that are to be at `local_path` after the commit.

        Args:
            local_path: the folder of the step in the checkpoint folder, or a place in it, as verl names it
                (``ROOT/global_step_20/actor``).
            global_step: the step.

        Raises:
            ConfigError: the path is not in the step's folder, or the monitor has no checkpoint folder.
        """
        target, (_, attempt) = self._step_dir(local_path, global_step), self._destination()
        return staging_dir(target.parent, global_step, attempt) / self.place(local_path, global_step)

    def place(self, local_path: str | os.PathLike[str], global_step: int) -> str:
        """Return the place in the step's folder: ``actor`` for ``ROOT/global_step_20/actor``, empty for the folder
        itself. It distinguishes the parts of several roles, see `part`. Raises ConfigError as `staged`.
        """
        target = self._step_dir(local_path, global_step)
        path = Path(local_path).absolute()
        if not path.is_relative_to(target):
            raise ConfigError(
                f"{path} cannot be saved as step {global_step}: it has to be {target} or a place in it, because the "
                "checkpoint monitor commits that folder"
            )
        place = path.relative_to(target).as_posix()
        return "" if place == "." else place

    def part(self, local_path: str | os.PathLike[str], global_step: int, name: str) -> str:
        """Return the name of a part at a place in the step's folder, such as ``actor/model-rank-00000``."""
        place = self.place(local_path, global_step)
        return f"{place}/{name}" if place else name

    def _step_dir(self, local_path: str | os.PathLike[str], global_step: int) -> Path:
        root, _ = self._destination()
        if root is None:
            raise ConfigError(f"{local_path} cannot be saved: the checkpoint monitor was started without a folder")
        return step_dir(root, global_step)

    def _destination(self) -> tuple[Path | None, int]:
        """Return the checkpoint folder (None: the monitor has none) and the attempt."""
        facts = self._ask_facts()
        root = self._root or (Path(facts["root"]) if facts["root"] is not None else None)
        attempt = self._attempt if self._attempt is not None else facts["attempt"]
        return root.absolute() if root is not None else None, attempt

    # ---- one save

    def _save(self, part: _Part, save_fn: SaveFn, turn: PendingCall[None], *, queues: bool, reports: bool) -> None:
        try:
            self._answered(turn)
            written: object = ()
            if not (queues and part.name is not None and self.is_saved(part.name, part.step)):
                written = save_fn()
            if not reports:
                ended = self._monitor.notify_handed_over(part.ticket, part.step)
            else:
                ended = self._monitor.notify_finished(
                    part.step,
                    part.is_state_dict,
                    part=part.name,
                    attempt=self._attempt,
                    files=self._entries(part.step, written),
                    ticket=part.ticket,
                )
            self._answered(ended)
        except BaseException as error:
            self._report_failed(part, error)
            raise

    def _ask_for_turn(self, part: _Part, collective: bool) -> PendingCall[None]:
        """Return the call that is answered when it is this part's turn."""
        self._let_watch()
        return self._monitor.notify_started(
            self._node_id,
            self._job_id,
            step=part.step,
            part=part.name,
            weights=part.is_state_dict,
            attempt=self._attempt,
            ticket=part.ticket,
            life=self._life,
            collective=collective,
            timeout_s=self._timeout_s,
        )

    def _report_failed(self, part: _Part, error: BaseException, reason: str = "") -> None:
        log_failure(f"the save of step {part.step}", error)
        why, ticket = f"{reason}{error_line(error)}", part.ticket
        with contextlib.suppress(RunError):  # without its monitor the step fails anyway
            self._answered(self._monitor.notify_failed(part.step, part.name, why, attempt=self._attempt, ticket=ticket))

    def _entries(self, step: int, written: object) -> list[FileEntry] | None:
        if isinstance(written, (str, os.PathLike, FileEntry)):
            return [self._entry(step, written)]
        # Save functions for the seed's coordinator return any value; only a list names files.
        return [self._entry(step, item) for item in written] if isinstance(written, Iterable) else None

    def _entry(self, step: int, written: str | os.PathLike[str] | FileEntry | FileTuple) -> FileEntry:
        if isinstance(written, FileEntry):
            return written
        if isinstance(written, tuple):
            return FileEntry(*written)
        root, attempt = self._destination()
        if root is None:
            raise RunError(f"{written} was saved, but the checkpoint monitor has no checkpoint folder")
        staging = staging_dir(root, step, attempt)
        path = staging / written
        for folder in (staging, step_dir(root, step)):
            if path.is_relative_to(folder):
                return file_entry(folder, path.relative_to(folder).as_posix(), durable=self.durable)
        raise RunError(f"{path} was saved for step {step}, but it lies outside the step's staging folder {staging}")

    # ---- earlier saves

    def _finish_earlier(self, name: str) -> None:
        save = self._saves.get(name)
        if save is None:
            return
        self._join(name, save, time.monotonic() + self._timeout_s)
        del self._saves[name]
        save.ended.result()

    def _ended(self) -> list[BaseException]:
        """Wait for all saves; return the errors since the last call."""
        deadline = time.monotonic() + self._timeout_s
        for save in self._saves.values():
            save.work.hurry()
        for name, save in list(self._saves.items()):
            self._join(name, save, deadline)
        self._saves = {name: save for name, save in self._saves.items() if not save.ended.done()}
        with self._lock:
            errors, self._untold = self._untold, []
        return errors

    def _join(self, name: str, save: _Save, deadline: float) -> None:
        save.work.hurry()
        wait([save.ended], max(0.0, deadline - time.monotonic()))
        if not save.ended.done():
            raise WaitTimeout(f"the save {name!r}", f"finish writing step {save.step}", self._timeout_s)

    # ---- talking to the monitor

    def _let_watch(self) -> None:
        """Let the monitor notice this process's death, through its call of `lifeline`."""
        with self._lock:
            if self._watch is None:
                lifeline = self._monitor.lifeline(self._node_id, self._job_id, self._life)
                watching = self._monitor.watch(self._node_id, self._job_id, self._life, lifeline.owned)
                self._watch = (lifeline, watching)

    def _ask_facts(self) -> Facts:
        if self._facts is None:
            self._facts = self._answered(self._monitor.describe())
        return self._facts

    def _answered(self, call: PendingCall[T]) -> T:
        return call.result(self._timeout_s + ANSWER_S)


@functools.cache
def _life() -> str:
    """Identify this process: a restarted rank keeps its name, and the death of the first process may be noticed
    later.
    """
    return f"{os.getpid()}-{secrets.token_hex(4)}"
