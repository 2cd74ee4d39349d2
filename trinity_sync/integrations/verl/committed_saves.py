"""Saves of verl's checkpoint managers through the checkpoint monitor: `CommittedSaves`, the base of our managers.

One save, on every rank:

1. all ranks agree that earlier saves of this manager are complete, or all raise why one failed;
2. rank 0 announces the parts to the monitor, which names the staging folder; all ranks agree;
3. all ranks copy their state, or begin to; all ranks agree;
4. each rank writes its parts in the background, into the staging folder;
5. the monitor commits the step and runs retention; rank 0 then does what follows the commit, and enforces the limit
   again: it may be smaller than another engine's limit, or a copy that held an old checkpoint may have ended.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypedDict

from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.pending import ANSWER_S
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.checkpoint.folder.catalog import has_written
from trinity_sync.checkpoint.folder.contents import read_tracker, step_dir
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.integrations.verl.at_exit import Saves
from trinity_sync.integrations.verl.local_run import RunMonitor, is_in_memory
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.reading import held_throughout, hold, step_at
from trinity_sync.integrations.verl.vendor import say
from trinity_sync.protocol.parts import FULL, STATE_DICT, CommitMeta, Kind, beside_file, beside_part, is_beside
from trinity_sync.sync import Synchronizer

# The contents of a save, by name. Each content is a part of the step, for each rank that writes it.
MODEL, METADATA, OPTIMIZER, EXTRA, EXPORT = "model", "metadata", "optim", "extra_state", "hf_model"
STATE = "state"
"""The trees that the ranks of a Megatron engine write together, without a model that is saved already."""
DESCRIPTION = "description"
"""The metadata of a weights-only save of a Megatron engine."""
WEIGHTS = (MODEL, METADATA, DESCRIPTION)
OF_FIRST_RANK = (METADATA, EXPORT, DESCRIPTION)

OpensMonitor: TypeAlias = Callable[[str, str | None, float], RunMonitor]
"""Opens the monitor of a program that does not name its checkpoint folder at its start. Collective. Arguments: the path
of the first save, the path that was loaded last, and the limit of each wait in seconds. See `local_run.open_monitor`.
"""


class SaveOptions(TypedDict, total=False):
    """The arguments of our checkpoint managers in addition to verl's; see `FSDPCheckpointManager`."""

    opens: OpensMonitor | None
    lazily: bool
    timeout_s: float


def content_part(name: str, rank: int) -> str:
    """Name the part of one content of a rank."""
    return name if name in OF_FIRST_RANK else f"{name}-rank-{rank:05d}"


def _announcement(role: str) -> str:
    """A part without files: the parts of this role are known. A full checkpoint waits for one of each role."""
    return f"{role}/announced"


class SaveCopies(Protocol):
    """Copies one rank's state, save after save, and writes the copies."""

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """Copy this rank's contents; the copies of the save before are dropped. Collective. Raises RunError: on every
        rank, when one rank failed. Returns a writer for each content of this rank, by name. Errors of a copy in the
        background are raised there.
        """

    def give_up(self, name: str, error: BaseException) -> None:
        """This content will not be written: release the ranks that would write it together with this rank. May be
        called on any thread.
        """

    def wait_until_copied(self) -> None:
        """Block until the state may change. Raises WaitTimeout."""


class SaveFolder(NamedTuple):
    """A checkpoint folder, or that of the states in memory, as one manager uses it."""

    monitor: RunMonitor
    coordinator: CheckpointCoordinator
    commits: Commits


class CommittedSaves(Saves):
    """The base of our checkpoint managers. Stands before verl's class among the bases, which sets `rank` and
    `world_size`; see `FSDPCheckpointManager` for the arguments.
    """

    rank: int
    world_size: int
    previous_global_step: int | None
    previous_saved_paths: list[str]
    trainer_file: str | None = None
    """The file that verl's trainer writes in this process into the step's folder, after each save. Rank 0 needs none:
    the tracker, which its trainer writes last, is enough.
    """
    _copies: SaveCopies

    def __init__(
        self,
        *args: object,
        ray_namespace: str = "",
        opens: OpensMonitor | None = None,
        lazily: bool = False,
        timeout_s: float = 1800.0,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.previous_saved_paths = []
        self._copies = self._make_copies(timeout_s, lazily=lazily)
        self._timeout_s = timeout_s
        self._saving = threading.Lock()  # held during a save's collective calls
        # The newest step of `_save`, its contents by place in the step's folder, and the commits it was saved for.
        self._step: int | None = None
        self._saved: dict[str, set[str]] = {}
        self._kinds: set[Kind] = set()
        self._loaded: int | None = None  # the step of the last load
        self._announced: int | None = None  # the newest version that was announced
        self._limit: int | None = None  # verl's max_ckpt_to_keep of the newest full save
        # Of a program without a checkpoint folder at its start: `_open` fills them at the first save.
        self._opens = opens
        self._folders: dict[bool, SaveFolder] = {}  # by whether it holds states in memory
        self._in_memory: bool | None = None
        self._last_loaded: str | None = None  # a path
        self._root: Path | None = None
        self._trainer_files: TrainerFiles | None = None
        self._synchronizer = None if opens is not None else _synchronizer(ray_namespace)
        if opens is None:
            self._folders[False] = self._folder(RunMonitor.in_namespace(ray_namespace, timeout_s))
            self._use(self._folders[False])

    # ---- what differs from engine to engine

    @abstractmethod
    def _make_copies(self, timeout_s: float, *, lazily: bool) -> SaveCopies:
        """Make the copies of this engine's state. Raises ConfigError if this manager cannot save the engine."""

    @property
    @abstractmethod
    def _backend(self) -> str:
        """The kind of the engine, for manifests."""

    def _weights(self) -> list[str]:
        """The contents of a weights-only save."""
        return [MODEL, METADATA]

    @abstractmethod
    def _check(self, todo: list[str]) -> None:
        """Raise ConfigError if one of these contents cannot be saved."""

    @abstractmethod
    def _check_files(self, local_path: str) -> None:
        """Raise RunError if a file that is to be loaded is missing."""

    @abstractmethod
    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load as verl's manager does. Collective."""

    # ---- the run

    def _open(self, local_path: str) -> None:
        """Use the folder of a save; the first save there opens its monitor. Collective then."""
        in_memory = is_in_memory(local_path)
        if self._opens is None or in_memory == self._in_memory:
            return
        if in_memory not in self._folders:
            self._folders[in_memory] = self._folder(self._opens(local_path, self._last_loaded, self._timeout_s))
            files = together("name the files that the trainer writes", lambda: self.trainer_file)
            self._trainer_parts = name_trainer_parts(files)
        self._use(self._folders[in_memory])
        self._in_memory = in_memory
        if self._root is not None:
            self._trainer_files = TrainerFiles(self._monitor, self._attempt, self._root, self._timeout_s)

    def _folder(self, monitor: RunMonitor) -> SaveFolder:
        coordinator = CheckpointCoordinator(
            monitor.handle, job_id=f"rank-{self.rank}", timeout_s=self._timeout_s, attempt=monitor.attempt
        )
        return SaveFolder(monitor, coordinator, Commits(monitor.client, monitor.attempt, self._timeout_s))

    def _use(self, folder: SaveFolder) -> None:
        monitor, self._coordinator, self._commits = folder
        self._monitor = monitor.client
        self._root, self._attempt = monitor.root, monitor.attempt
        self._roles, self._durable = list(monitor.roles), monitor.durable

    # ---- saving

    def _save(
        self, local_path: str, step: int, kind: Kind, names: list[str], max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save these contents for a commit of this kind. Collective; returns when `SaveCopies.take` does. Raises
        ConfigError, RunError: on every rank; also when an earlier save failed.
        """
        with self._saving:
            self._begin_save(local_path, step, kind, names, max_ckpt_to_keep)

    def _begin_save(
        self, local_path: str, step: int, kind: Kind, names: list[str], max_ckpt_to_keep: int | None
    ) -> None:
        if self._opens is None or self._in_memory is not None:
            self._check_earlier(step)  # in the folder of the earlier save
        self._open(local_path)
        if self._in_memory and False in self._folders:
            checked = self._folders[False].commits.raise_failures
            together(f"save step {step}, because an earlier save failed", checked)
        if kind == FULL:
            self._limit = max_ckpt_to_keep
        if self._step != step:
            self._step, self._saved, self._kinds = step, {}, set()
        place = together(f"save step {step}", lambda: self._coordinator.place(local_path, step))[self.rank]
        saved = self._saved.get(place, set())
        todo = [name for name in names if name not in saved]
        self.previous_global_step = step
        if todo and self._in_memory:
            try:
                self._write(local_path, step, kind, todo)
            except ConfigError:
                raise
            except RunError as error:  # on every rank
                self._forget()
                self._tell_lost(error)
                return
        elif todo:
            self._write(local_path, step, kind, todo)
        elif kind not in self._kinds:  # all of it is saved as the other kind
            if kind == FULL and self._roles:
                together(f"begin to save step {step}", lambda: self._announce_parts(local_path, step, kind, {}))
            elif self.rank == 0:
                commit = self._monitor.monitor_step(step, kind == STATE_DICT, attempt=self._attempt)
                commit.result(self._timeout_s)
        self._saved[place] = saved | set(todo)
        self._kinds.add(kind)
        self._commits.expect(step, kind)

    def saved_of(self, step: int) -> set[str]:
        """Return the contents of a step that this manager has saved, at any place."""
        return {name for names in self._saved.values() for name in names} if self._step == step else set()

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save the weights alone and announce the version after the commit. Collective; returns when they are copied.

        Weights that are on disk already are not written again: those of step 0, those that `load_checkpoint` has just
        read, and those of a second call for the same step. An existing checkpoint of this step, of any run, is not
        replaced: the weights are committed next to it, and deleted when this run does not need them any more. Raises
        ConfigError, RunError: as `save_checkpoint`.
        """
        if local_path is None:
            return
        if self._step is None and global_step in (0, self._loaded):
            together(f"announce version {global_step}", lambda: self._announce(global_step))
            return
        self._save(local_path, global_step, STATE_DICT, self._weights())
        if self.rank == 0 and self._announced != global_step:
            self._commits.follow(global_step, STATE_DICT, lambda folder: self._announce(global_step, folder))

    def _announce(self, step: int, location: str | None = None) -> None:
        if self.rank == 0 and self._synchronizer is not None and self._announced != step:
            if location is None and self._root is not None and step_dir(self._root, step).is_dir():
                location = str(step_dir(self._root, step))
            self._synchronizer.set_model_state_dict(None, step, attempt=self._attempt, location=location)
        self._announced = step

    def _write(self, local_path: str, step: int, kind: Kind, todo: list[str]) -> None:
        folders: list[tuple[Path, Path]] = []
        try:
            together(f"begin to save step {step}", lambda: folders.append(self._begin(local_path, step, kind, todo)))
            writers = self._copies.take(step, todo, *folders[0], durable=self._durable)
        except Exception as error:
            if self.rank == 0 and folders:
                self._monitor.fail_step(step, str(error), attempt=self._attempt).result(self._timeout_s)
            raise
        for name, write in writers.items():
            part = self._coordinator.part(local_path, step, content_part(name, self.rank))
            give_up = partial(self._copies.give_up, name)
            self._coordinator.save_async(name, write, step, name in WEIGHTS, part=part, on_failure=give_up)

    def _check_earlier(self, step: int) -> None:
        """Wait until earlier saves are written; raise on every rank if one failed, except of a state in memory."""

        def check() -> None:
            self._finish_writing()
            self._commits.raise_failures()

        try:
            together(f"save step {step}, because an earlier save failed", check)
        except RunError as error:
            self._forget()
            if not self._in_memory:
                raise
            self._tell_lost(error)

    def _tell_lost(self, error: Exception) -> None:
        if self.rank == 0:
            say(f"a state in memory is lost: {error}")

    def _begin(self, local_path: str, step: int, kind: Kind, todo: list[str]) -> tuple[Path, Path]:
        """Return the folder of the files and the step's staging folder above it. Rank 0 announces the parts."""
        self._check(todo)
        folder = self._coordinator.staged(local_path, step)
        parts = {
            self._coordinator.part(local_path, step, content_part(name, rank)): name
            for name in todo
            for rank in range(1 if name in OF_FIRST_RANK else self.world_size)
        }
        if self._trainer_files is not None and kind == FULL:
            place = partial(self._coordinator.part, local_path, step)
            trainer_parts = [place(name) if name is not None else None for name in self._trainer_parts]
            parts |= {part: part for part in trainer_parts if part is not None}
            self._trainer_files.begin(step, trainer_parts, self.rank)
        self._announce_parts(local_path, step, kind, parts)
        staging = self._coordinator.staged(step_dir(self._root, step), step) if self._root is not None else folder
        return folder, staging

    def trainer_went_on(self) -> None:
        """Report that the trainer has left its save, so its own files of the newest step are whole. On any rank, at any
        time.
        """
        if self._trainer_files is not None:
            self._trainer_files.went_on()

    def settle_at_exit(self) -> None:
        if self._trainer_files is not None:
            self._trainer_files.settle()

    def finish(self, limit_s: float | None) -> None:
        """Wait for the saves of this manager; see `Saves.finish`.

        At the end of the program rank 0 waits for commits. Other ranks wait for their own parts only, as rank 0 may be
        waiting for a rank that has failed. After a signal, every rank waits for commits and the copies that follow
        them, while the trainer goes on in another thread: it writes its own files and takes part in the collective
        calls of a save that has begun. Raises Exception: as `wait_on_save_thread`.
        """
        if limit_s is not None:
            with self._saving:
                pass
            for folder in [*self._folders.values()] if self._root is not None else []:
                following = folder.commits.following()  # the trainer may begin another save
                folder.monitor.client.finish_saves(limit_s).result(limit_s)
                for thread in following:
                    thread.join(limit_s)
                folder.commits.raise_failures()
        elif self.rank != 0 or (self._trainer_files is not None and self._trainer_files.is_awaited):
            self.finish_writing()
        else:
            self.wait_on_save_thread()

    def finish_writing(self) -> None:
        """Wait until this rank's parts are written; does not wait for other ranks or the commit. Raises the first error
        of the step, of any rank.
        """
        if self._root is not None:
            self._finish_writing()

    def follow(self, path: str, then: Callable[[], None]) -> bool:
        """Call `then` in the background when the full checkpoint at `path` is committed; the checkpoint is leased
        meanwhile. Errors are raised by the next save or by `wait_on_save_thread`. Returns False if this manager is not
        saving that step; nothing is done then.
        """
        if FULL not in self._kinds or step_at(self._root, path) != self._step:
            return False
        assert self._root is not None
        assert self._step is not None
        follow_with_copy(self._commits, self._root, self._step, then)
        return True

    def _announce_parts(self, local_path: str, step: int, kind: Kind, parts: dict[str, str]) -> None:
        """On rank 0, announce the parts (part -> content), and for a full checkpoint that this role is complete."""
        if self.rank != 0:
            return
        roles = self._roles if kind == FULL else []
        place = self._coordinator.place(local_path, step)
        if roles and place not in roles:
            raise ConfigError(f"{local_path} is saved, but the roles of this run are {', '.join(roles)} (open_run)")
        meta = CommitMeta(backend=self._backend, world_size=self.world_size)
        if self._limit is not None and self._limit > 0:
            meta["keep_last"] = self._limit  # for retention right after the commit, before `register_checkpoint`
        announced = self._monitor.begin(
            step,
            self._attempt,
            kind,
            [*parts, *map(_announcement, roles)],
            meta,
            weights_parts=[part for part, name in parts.items() if name in WEIGHTS],
        )
        announced.result(self._timeout_s)
        if roles:
            complete = self._monitor.notify_finished(step, part=_announcement(place), attempt=self._attempt, files=[])
            complete.result(self._timeout_s)

    # ---- after a save

    def wait_on_save_thread(self) -> None:
        """Wait until all background saves are written by all ranks and committed, and the limit is enforced. Any rank
        may call it alone. Raises Exception: the first error of a background save of this rank.
        """
        if self._opens is not None and self._root is None:
            return
        try:
            self.trainer_went_on()
            self._finish_writing()
            for in_memory, folder in self._folders.items():
                try:
                    folder.commits.wait()
                except RunError as error:
                    if not in_memory:
                        raise
                    self._tell_lost(error)
        except Exception:
            self._forget()
            raise

    def wait_until_copied(self) -> None:
        """Block until parameters and optimizer may change or move. Errors of the copy fail the save. Raises
        WaitTimeout.
        """
        self._copies.wait_until_copied()

    def _finish_writing(self) -> None:
        """Wait for this rank's saves. Raises the first error of the group on each rank: later errors only say that the
        folder of the failed step is gone.
        """
        self.wait_until_copied()  # a writer that failed early has not waited
        try:
            self._coordinator.wait_all()
        except Exception as error:
            first = None if self._step is None else self._monitor.status(self._step).result(self._timeout_s)["error"]
            if first is None:
                raise
            raise RunError(f"the checkpoint of step {self._step} failed: {first}") from error

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None = None) -> None:
        """Enforce the limit after a commit. Rank 0.

        Checkpoints of all runs in the folder count. The newest full checkpoint, steps that are being saved, and leased
        or pinned checkpoints are never deleted.
        """
        if new_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            # A later save may use the other folder already.
            monitor = self._folders[is_in_memory(new_path)].monitor.client if self._folders else self._monitor
            monitor.prune(max_ckpt_to_keep).result(self._timeout_s)
        self.previous_saved_paths = [path for path in self.previous_saved_paths if Path(path).exists()]

    def _forget(self) -> None:
        """Count nothing of the failed step as saved."""
        self._commits.drop()
        self._saved, self._kinds = {}, set()
        if self._trainer_files is not None:
            self._trainer_files.forget()

    # ---- loading

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint as verl does, after this manager's saves have ended; the step is leased meanwhile."""
        if local_path is None:
            return
        together("load, because an earlier save failed", self.wait_on_save_thread)
        step = step_at(self._root, local_path)
        with ExitStack() as lease:
            # Before verl's barrier: a rank that failed there would leave its peers in it.
            together(f"load {local_path}", lambda: self._prepare(local_path, lease))
            self._load_as_verl(local_path, hdfs_path, del_local_after_load)
        self._last_loaded = local_path
        if step is not None:
            self._loaded, self._step, self._saved, self._kinds = step, None, {}, set()

    def _prepare(self, local_path: str, lease: ExitStack) -> None:
        self._check_files(local_path)
        hold(self._root, local_path, f"rank {self.rank}", self._timeout_s, lease)


def _synchronizer(ray_namespace: str) -> Synchronizer | None:
    try:
        return Synchronizer.get_actor(namespace=ray_namespace or None)
    except RunError:
        return None


# Files that verl's trainer writes itself: parts that the monitor waits for. They are reported when the trainer goes on.


_OTHERS_S = 30.0
"""Limit, at the end of the program, for other ranks to finish their trainer's file, seconds."""
_POLL_S = 0.2


def name_trainer_parts(files: Iterable[str | None]) -> list[str | None]:
    """Name the part of each rank's trainer file; None: its trainer writes nothing. Rank 0 always has a part."""
    return [
        beside_part(None) if rank == 0 else None if file is None else beside_part(file)
        for rank, file in enumerate(files)
    ]


class TrainerFiles:
    """This rank's part of the trainer's files, for the newest save. `timeout_s`: limit of each wait, seconds."""

    def __init__(self, monitor: MonitorClient, attempt: int, root: Path, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._root = root
        self._timeout_s = timeout_s
        self._awaited: tuple[int, str] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether this rank's part is not reported yet."""
        return self._awaited is not None

    def begin(self, step: int, parts: Sequence[str | None], rank: int) -> None:
        """Await this rank's part of a new save; `parts` are those of all ranks."""
        part = parts[rank]
        self._awaited = (step, part) if part is not None else None

    def forget(self) -> None:
        """Report nothing of the failed save."""
        self._awaited = None

    def went_on(self) -> None:
        """Report that the trainer has left its save, so its files are whole. Raises RunError, WaitTimeout."""
        if self._awaited is not None:
            (step, part), self._awaited = self._awaited, None
            finished = self._monitor.notify_finished(step, part=part, attempt=self._attempt, files=[])
            finished.result(self._timeout_s)

    def settle(self) -> None:
        """At the end of the program, report whether the trainer's files are whole, or fail the save.

        On rank 0 they are whole if the tracker, which the trainer writes last, names the step; on other ranks if the
        rank's file is whole. Rank 0 reports for all ranks, since it may have failed in a step for which the others
        wait. An unreadable tracker is left to the end of the monitor. Raises RunError, WaitTimeout.
        """
        if self._awaited is None:
            return
        step, part = self._awaited
        file = beside_file(part)
        if file is None:
            tracker = read_tracker(self._root, FULL)
            if tracker.unreadable:
                return
            is_whole = tracker.step == step
        else:
            is_whole = has_written(step_dir(self._root, step), file)
        if is_whole and file is None:
            self._report_all(step)
            self._awaited = None
        elif is_whole:
            self.went_on()
        else:
            self._awaited = None
            why = f"the program ended before its trainer had written {file or 'its files next to those of the engine'}"
            self._monitor.fail_step(step, why, attempt=self._attempt).result(self._timeout_s)

    def _report_all(self, step: int) -> None:
        deadline = time.monotonic() + _OTHERS_S
        while True:
            self._monitor.notify_beside(step, attempt=self._attempt).result(self._timeout_s)
            status = self._monitor.status(step).result(self._timeout_s)
            awaited = [part for part in status["awaited"] if is_beside(part)]
            if not awaited or status["state"] == "failed":
                return
            if time.monotonic() > deadline:
                raise WaitTimeout("verl's trainer", f"write what step {step} lacks ({', '.join(awaited)})", _OTHERS_S)
            time.sleep(_POLL_S)


# Waiting for commits in the background, with work that follows them.


class Commits:
    """Commits that one process waits for. `timeout_s`: limit of each wait, seconds."""

    def __init__(self, monitor: MonitorClient, attempt: int, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._open: dict[tuple[int, Kind], None] = {}

    def expect(self, step: int, kind: Kind) -> None:
        """Let `wait` wait for this commit."""
        self._open[step, kind] = None

    def follow(self, step: int, kind: Kind, then: Callable[[str | None], None]) -> None:
        """Call `then` with the folder, in the background, when the step is committed. Errors of both are kept for
        `raise_failures` and `wait`.
        """

        def run() -> None:
            try:
                then(self._wait_for_trainer(step, kind))
            except Exception as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=f"commit-{kind}-{step}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def following(self) -> list[threading.Thread]:
        """Return the threads of `follow`."""
        return list(self._threads)

    def raise_failures(self) -> None:
        """Raise the first error since the last call. Does not wait."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait for all commits and the work that follows them. Raises the first error. Raises RunError, WaitTimeout."""
        waiting, self._open = list(self._open), {}
        for step, kind in waiting:
            try:
                self._wait_for(step, kind)
            except Exception as error:
                self._errors.append(error)
        for thread in self._threads:
            thread.join(self._timeout_s)
            if thread.is_alive():
                raise WaitTimeout("the work after a commit", "end", self._timeout_s)
        self.raise_failures()

    def drop(self) -> None:
        """Forget commits and errors of saves whose failure was raised already."""
        self._open.clear()
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._threads.clear()
        self._errors.clear()

    def _wait_for_trainer(self, step: int, kind: Kind) -> str | None:
        """As `_wait_for`, without a limit while only the trainer's own files are missing."""
        while True:
            try:
                return self._wait_for(step, kind)
            except WaitTimeout:
                status = self._monitor.status(step).result(self._timeout_s + ANSWER_S)
                if status["awaited"] and all(map(is_beside, status["awaited"])):
                    continue
                if status["own"] not in (kind, FULL):
                    raise
                return self._wait_for(step, kind)  # the commit came as the wait ended

    def _wait_for(self, step: int, kind: Kind) -> str | None:
        call = self._monitor.wait_committed(step, self._attempt, self._timeout_s, kind=kind)
        # The monitor ends the wait itself, and names what is missing.
        return call.result(self._timeout_s + ANSWER_S)["path"]


def follow_with_copy(commits: Commits, root: Path, step: int, copy: Callable[[], None]) -> None:
    """Call `copy` in the background when the step's full checkpoint is committed, under a lease of the checkpoint."""

    def copy_under_lease(_: str | None) -> None:
        with held_throughout(root, str(step_dir(root, step)), "the copy to a remote place"):
            copy()

    commits.follow(step, FULL, copy_under_lease)
