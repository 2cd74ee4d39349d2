"""`CommittedSaves`: what the checkpoint managers of all engines share: the way of a save, from the call to the commit.

One save, on every rank:

1. earlier saves of this manager are complete, or their failure is raised (all ranks agree);
2. rank 0 announces the parts to the monitor and hears where to write; all ranks agree;
3. all ranks copy their state, or begin to; all ranks agree;
4. each part is written in the background, into a staging folder that nobody reads;
5. the monitor commits, and deletes what neither the limit nor a policy keeps; rank 0 does what else follows a commit,
   and enforces the limit once more: it may be smaller than another engine's, or a copy may have ended that was held.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.pending import ANSWER_S
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.folder.catalog import has_written
from trinity_sync.checkpoint.folder.contents import read_tracker, step_dir
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.integrations.verl import interfaces
from trinity_sync.integrations.verl.at_exit import Saves
from trinity_sync.integrations.verl.interfaces import OpensMonitor, SaveCopies
from trinity_sync.integrations.verl.local_run import RunMonitor
from trinity_sync.integrations.verl.ranks import together
from trinity_sync.integrations.verl.reading import held_throughout, hold, step_at
from trinity_sync.protocol.parts import FULL, STATE_DICT, CommitMeta, Kind, beside_file, beside_part, is_beside
from trinity_sync.sync import Synchronizer


class CommittedSaves(Saves):
    """The base of our checkpoint managers; stands before verl's class among the bases of each, which makes `rank`,
    `world_size` and the rest. The constructor calls `_start_saves`.
    """

    rank: int
    world_size: int
    previous_global_step: int | None
    previous_saved_paths: list[str]
    trainer_file: str | None = None
    """What verl's trainer writes by itself in this process, in the step's folder, after each save; for rank 0, the
    tracker that it writes last is enough.
    """
    _copies: SaveCopies

    # ---- what differs from engine to engine

    @property
    @abstractmethod
    def _backend(self) -> str:
        """The kind of the engine, as manifests name it."""

    def _weights(self) -> list[str]:
        """The contents that a save of the weights alone consists of."""
        return [interfaces.MODEL, interfaces.METADATA]

    @abstractmethod
    def _check(self, todo: list[str]) -> None:
        """Check that these contents can be saved.

        Raises:
            ConfigError: one cannot.
        """

    @abstractmethod
    def _check_files(self, local_path: str) -> None:
        """Check that what is to be loaded is there.

        Raises:
            RunError: it is not.
        """

    @abstractmethod
    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load what verl's manager would. Collective."""

    # ---- the run

    def _start_saves(self, copies: SaveCopies, run: str | OpensMonitor, timeout_s: float) -> None:
        """Nothing is saved so far.

        Args:
            run: Ray namespace in which `open_run` has started the monitor; or what opens it when the first save says
                where checkpoints go.

        Raises:
            RunError: there is no checkpoint monitor in the namespace.
        """
        self.previous_saved_paths = []
        self._copies = copies
        self._timeout_s = timeout_s
        # What this run has saved of its newest step.
        self._step: int | None = None
        self._saved: dict[str, set[str]] = {}  # by place in the step's folder
        self._kinds: set[Kind] = set()
        self._loaded: int | None = None
        self._limit: int | None = None
        self._root: Path | None = None
        self._opens: OpensMonitor | None = None
        self._last_loaded: str | None = None
        self._saving = threading.Lock()
        self._beside: Beside | None = None
        self._announced: int | None = None
        self._synchronizer = _synchronizer(run) if isinstance(run, str) else None
        if isinstance(run, str):
            self._use(RunMonitor.in_namespace(run, timeout_s))
        else:
            self._opens = run

    def _open(self, local_path: str) -> None:
        """See that there is a monitor. Collective where it is to be opened."""
        if self._opens is not None and self._root is None:
            self._use(self._opens(local_path, self._last_loaded, self._timeout_s))
            self._names_beside = trainer_file_names(together("tell what the trainer writes", lambda: self.trainer_file))
            if self._root is not None:
                self._beside = Beside(self._monitor, self._attempt, self._root, self._timeout_s)

    def _use(self, monitor: RunMonitor) -> None:
        """Save through this monitor from now on."""
        self._monitor = monitor.client
        self._root, self._attempt = monitor.root, monitor.attempt
        self._roles, self._durable = list(monitor.roles), monitor.durable
        self._coordinator = CheckpointCoordinator(
            monitor.handle, job_id=f"rank-{self.rank}", timeout_s=self._timeout_s, attempt=self._attempt
        )
        self._commits = Commits(self._monitor, self._attempt, self._timeout_s)

    # ---- saving

    def _save(
        self, local_path: str, step: int, kind: Kind, names: list[str], max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save these contents as a part of the commit of this kind. Collective; returns when `Copies.take` does.

        Args:
            max_ckpt_to_keep: of a full checkpoint, see `register_checkpoint`; weights are saved under the last one.

        Raises:
            ConfigError, RunError: on every rank; also for what an earlier save failed of.
        """
        with self._saving:
            self._begin_save(local_path, step, kind, names, max_ckpt_to_keep)

    def _begin_save(
        self, local_path: str, step: int, kind: Kind, names: list[str], max_ckpt_to_keep: int | None
    ) -> None:
        self._open(local_path)
        self._check_earlier(step)
        if kind == FULL:
            self._limit = max_ckpt_to_keep
        if self._step != step:
            self._step, self._saved, self._kinds = step, {}, set()
        place = together(f"save step {step}", lambda: self._coordinator.place(local_path, step))[self.rank]
        saved = self._saved.get(place, set())
        todo = [name for name in names if name not in saved]
        self.previous_global_step = step
        if todo:
            self._write(local_path, step, kind, todo)
        elif kind not in self._kinds:  # all of it is written as the other kind
            if kind == FULL and self._roles:
                together(f"begin to save step {step}", lambda: self._tell_parts(local_path, step, kind, {}))
            elif self.rank == 0:
                commit = self._monitor.monitor_step(step, kind == STATE_DICT, attempt=self._attempt)
                commit.result(self._timeout_s)
        self._saved[place] = saved | set(todo)
        self._kinds.add(kind)
        self._commits.expect(step, kind)

    def saved_of(self, step: int) -> set[str]:
        """Return the contents of a step that this run has saved already, at whichever place."""
        return {name for names in self._saved.values() for name in names} if self._step == step else set()

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save the weights alone, and announce the version when they are committed. Collective; returns when they are
        copied.

        Nothing is written of weights that are on disk already (those of step 0 that nobody has trained, those that
        `load_checkpoint` has just read), nor for a second call of the same step. What is a checkpoint of this step
        already, of whichever run, stays: the weights are then committed beside it, for as long as this run needs them.

        Args:
            local_path: as for `save_checkpoint`.

        Raises:
            Exception: as `save_checkpoint`.
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
        begun: list[tuple[Path, Path]] = []
        try:
            together(f"begin to save step {step}", lambda: begun.append(self._begin(local_path, step, kind, todo)))
            writers = self._copies.take(step, todo, *begun[0], durable=self._durable)
        except Exception as error:
            if self.rank == 0 and begun:
                self._monitor.fail_step(step, str(error), attempt=self._attempt).result(self._timeout_s)
            raise
        for name, write in writers.items():
            part = self._coordinator.part(local_path, step, interfaces.part(name, self.rank))
            give_up = partial(self._copies.give_up, name)
            self._coordinator.save_async(name, write, step, name in interfaces.WEIGHTS, part=part, on_failure=give_up)

    def _check_earlier(self, step: int) -> None:
        """Nothing of before is left to be written, and nothing of it failed."""

        def check() -> None:
            self._finish_writing()
            self._commits.raise_failures()

        try:
            together(f"save step {step}, because an earlier save failed", check)
        except RunError:
            self._forget()
            raise

    def _begin(self, local_path: str, step: int, kind: Kind, todo: list[str]) -> tuple[Path, Path]:
        """Return the folder to write to, and the step's staging folder above it. Rank 0 announces the parts."""
        self._check(todo)
        folder = self._coordinator.staged(local_path, step)
        parts = {
            self._coordinator.part(local_path, step, interfaces.part(name, rank)): name
            for name in todo
            for rank in interfaces.writers(name, self.world_size)
        }
        if self._beside is not None and kind == FULL:
            place = partial(self._coordinator.part, local_path, step)
            beside = [place(name) if name is not None else None for name in self._names_beside]
            parts |= {part: part for part in beside if part is not None}
            self._beside.begin(step, beside, self.rank)
        self._tell_parts(local_path, step, kind, parts)
        staging = self._coordinator.staged(step_dir(self._root, step), step) if self._root is not None else folder
        return folder, staging

    def trainer_went_on(self) -> None:
        """Take note that the trainer does other things than to save, so that what it has written itself, beside what
        the engine saved last, is whole: it can be committed. May be called at any time, on any rank.

        Raises:
            RunError: the monitor is gone.
            WaitTimeout: it does not answer.
        """
        if self._beside is not None:
            self._beside.went_on()

    def settle_at_exit(self) -> None:
        """Tell the monitor, at the end of the program, whether what the trainer writes itself is there; see
        `Beside.settle`, and for the errors.
        """
        if self._beside is not None:
            self._beside.settle()

    def finish(self, limit_s: float | None) -> None:
        """Return when all saves are complete, at the end of the program; on other ranks than 0, when this one has
        written its share, for rank 0 may be waiting for a rank that has failed. After a signal, when the saves under
        way are committed, and copied where that is asked for: the trainer goes on, on another thread, writes its own
        files, and takes part in the collective calls of a save that has begun.

        Args:
            limit_s: see `Saves.finish`.

        Raises:
            Exception: as `wait_on_save_thread`.
            WaitTimeout: a save is not committed within the limit.
        """
        if limit_s is not None:
            with self._saving:
                pass
            if self._root is not None:
                following = self._commits.following()  # the trainer may begin another save
                self._monitor.finish_saves(limit_s).result(limit_s)
                for thread in following:
                    thread.join(limit_s)
                self._commits.raise_failures()
        elif self.rank != 0 or (self._beside is not None and self._beside.is_awaited):
            self.finish_writing()
        else:
            self.wait_on_save_thread()

    def finish_writing(self) -> None:
        """Return when this rank has written what it saved; what other ranks do, and the commit, is not waited for.

        Raises:
            Exception: what a background save of this rank raised, or of another, if that failed first.
        """
        if self._root is not None:
            self._finish_writing()

    def follow(self, path: str, then: Callable[[], None]) -> bool:
        """Copy a step's folder, in the background, when it is committed; nobody deletes it meanwhile. What is raised is
        told at the next save, or by `wait_on_save_thread`.

        Args:
            path: the folder.
            then: copies it.

        Returns:
            Whether its commit is awaited here. Where it is not, nothing is done.
        """
        if FULL not in self._kinds or step_at(self._root, path) != self._step:
            return False
        assert self._root is not None
        assert self._step is not None
        follow_with_copy(self._commits, self._root, self._step, then)
        return True

    def _tell_parts(self, local_path: str, step: int, kind: Kind, parts: dict[str, str]) -> None:
        """Announce parts, and which of the contents each is; for a full checkpoint, that those of this role are known.
        Rank 0; nothing on the others.
        """
        if self.rank != 0:
            return
        roles = self._roles if kind == FULL else []
        place = self._coordinator.place(local_path, step)
        if roles and place not in roles:
            raise ConfigError(f"{local_path} is saved, but the roles of this run are {', '.join(roles)} (open_run)")
        meta = CommitMeta(backend=self._backend, world_size=self.world_size)
        if self._limit is not None and self._limit > 0:
            meta["keep_last"] = self._limit  # for retention right after the commit, before `register_checkpoint`
        begun = self._monitor.begin(
            step,
            self._attempt,
            kind,
            [*parts, *(interfaces.announcement(role) for role in roles)],
            meta,
            weights_parts=[part for part, name in parts.items() if name in interfaces.WEIGHTS],
        )
        begun.result(self._timeout_s)
        if roles:
            known = interfaces.announcement(place)
            announced = self._monitor.notify_finished(step, part=known, attempt=self._attempt, files=[])
            announced.result(self._timeout_s)

    # ---- after a save

    def wait_on_save_thread(self) -> None:
        """Return when all background saves are complete: written by all ranks, committed, the limit enforced.

        Any rank may call it alone.

        Raises:
            Exception: what a background save of this rank raised.
            RunError: a save failed on another rank.
        """
        if self._opens is not None and self._root is None:
            return
        try:
            self.trainer_went_on()
            self._finish_writing()
            self._commits.wait()
        except Exception:
            self._forget()
            raise

    def wait_until_copied(self) -> None:
        """Return when what was saved last may change: parameters and optimizer, and where they lie. What the copy fails
        of fails the save. Raises WaitTimeout.
        """
        self._copies.wait_until_copied()

    def _finish_writing(self) -> None:
        """Wait for this rank's saves. What failed first in the group is what is raised on each rank: once a step has
        failed its folder goes, and with it what other ranks are writing to.
        """
        self.wait_until_copied()  # also where what should have written the copy has failed before
        try:
            self._coordinator.wait_all()
        except Exception as error:
            first = None if self._step is None else self._monitor.status(self._step).result(self._timeout_s)["error"]
            if first is None:
                raise
            raise RunError(f"the checkpoint of step {self._step} failed: {first}") from error

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None = None) -> None:
        """A checkpoint was committed: enforce the limit. Rank 0.

        What there is to delete is what is on disk now, whichever run wrote it. The newest full checkpoint, what is
        being saved and what somebody holds is never deleted.

        Args:
            new_path: the folder of the new checkpoint.
            max_ckpt_to_keep: how many full checkpoints stay, beside what the monitor's policies keep; None or 0: no
                limit.
        """
        if new_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            self._monitor.prune(max_ckpt_to_keep).result(self._timeout_s)
        self.previous_saved_paths = [path for path in self.previous_saved_paths if Path(path).exists()]

    def _forget(self) -> None:
        """The step failed: nothing of it counts as saved."""
        self._commits.drop()
        self._saved, self._kinds = {}, set()
        if self._beside is not None:
            self._beside.forget()

    # ---- loading

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint as verl does. Saves of this manager end first; the folder is held while it is read."""
        if local_path is None:
            return
        together("load, because an earlier save failed", self.wait_on_save_thread)
        step = step_at(self._root, local_path)
        with ExitStack() as held:
            # A rank that stops before verl's barrier would leave its peers in it.
            together(f"load {local_path}", lambda: self._prepare(local_path, held))
            self._load_as_verl(local_path, hdfs_path, del_local_after_load)
        self._last_loaded = local_path
        if step is not None:
            self._loaded, self._step, self._saved, self._kinds = step, None, {}, set()

    def _prepare(self, local_path: str, held: ExitStack) -> None:
        self._check_files(local_path)
        hold(self._root, local_path, f"rank {self.rank}", self._timeout_s, held)


def _synchronizer(ray_namespace: str) -> Synchronizer | None:
    try:
        return Synchronizer.get_actor(namespace=ray_namespace or None)
    except RunError:
        return None


# What verl's trainer writes itself, beside the files of an engine: parts of a step that the monitor waits for, which
# are in when the trainer goes on.


#: At the end of the program other ranks have so long to write a file that is being written, seconds.
_OTHERS_S = 30.0
_POLL_S = 0.2


def trainer_file_names(files: Iterable[str | None]) -> list[str | None]:
    """Name the part of each rank; None: its trainer writes nothing. Rank 0 always has one, for all that is not told.

    Args:
        files: what the trainer writes on each rank, in the step's folder; see `CommittedSaves.trainer_file`.
    """
    return [
        beside_part(None) if rank == 0 else None if file is None else beside_part(file)
        for rank, file in enumerate(files)
    ]


class Beside:
    """This rank's part, of the save that was begun last.

    Args:
        monitor: the checkpoint monitor.
        attempt: the run's attempt.
        root: the checkpoint folder.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, monitor: MonitorClient, attempt: int, root: Path, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._root = root
        self._timeout_s = timeout_s
        self._awaited: tuple[int, str] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether this rank's part is to be told of still."""
        return self._awaited is not None

    def begin(self, step: int, parts: Sequence[str | None], rank: int) -> None:
        """A save has begun: its parts by rank, with the role's place in the step's folder."""
        part = parts[rank]
        self._awaited = (step, part) if part is not None else None

    def forget(self) -> None:
        """The save has failed."""
        self._awaited = None

    def went_on(self) -> None:
        """The trainer does other things than to save: its files are whole.

        Raises:
            RunError: the monitor is gone.
            WaitTimeout: it does not answer.
        """
        if self._awaited is not None:
            (step, part), self._awaited = self._awaited, None
            finished = self._monitor.notify_finished(step, part=part, attempt=self._attempt, files=[])
            finished.result(self._timeout_s)

    def settle(self) -> None:
        """The program ends: tell the monitor whether the trainer's files are there. They are where it has come to write
        the tracker, which its rank 0 does last, and on the others where their file is whole. Else the save fails. Where
        the tracker cannot be read now, that is left to the monitor's end.

        Rank 0 tells it of all, for it may have failed in a step that the others wait in for it.

        Raises:
            RunError: the monitor is gone.
            WaitTimeout: it does not answer; or another rank does not come to write its file. The monitor's end decides.
        """
        if self._awaited is None:
            return
        step, part = self._awaited
        file = beside_file(part)
        if file is None:
            tracker = read_tracker(self._root, FULL)
            if tracker.unreadable:
                return
            there = tracker.step == step
        else:
            there = has_written(step_dir(self._root, step), file)
        if there and file is None:
            self._tell_of_all(step)
            self._awaited = None
        elif there:
            self.went_on()
        else:
            self._awaited = None
            why = f"the program ended before its trainer had written {file or 'what belongs beside the engine files'}"
            self._monitor.fail_step(step, why, attempt=self._attempt).result(self._timeout_s)

    def _tell_of_all(self, step: int) -> None:
        deadline = time.monotonic() + _OTHERS_S
        while True:
            self._monitor.notify_beside(step, attempt=self._attempt).result(self._timeout_s)
            status = self._monitor.status(step).result(self._timeout_s)
            awaited = [part for part in status["awaited"] if is_beside(part)]
            if not awaited or status["state"] == "failed":  # of which nobody waits for a part
                return
            if time.monotonic() > deadline:
                raise WaitTimeout("verl's trainer", f"write what step {step} lacks ({', '.join(awaited)})", _OTHERS_S)
            time.sleep(_POLL_S)


# Waiting for commits beside the trainer: rank 0 lets something follow each, and any rank may ask how they went.


class Commits:
    """Commits that one process waits for.

    Args:
        monitor: the checkpoint monitor.
        attempt: the run's attempt.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, monitor: MonitorClient, attempt: int, timeout_s: float) -> None:
        self._monitor = monitor
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._open: dict[tuple[int, Kind], None] = {}

    def expect(self, step: int, kind: Kind) -> None:
        """This process has a share in the commit; `wait` waits for it."""
        self._open[step, kind] = None

    def follow(self, step: int, kind: Kind, then: Callable[[str | None], None]) -> None:
        """Call `then` with the folder, in the background, when the step is committed. What it raises, or the commit, is
        told later.
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
        """Return the threads that wait for a commit, or do what follows one."""
        return list(self._threads)

    def raise_failures(self) -> None:
        """Raise what followed a commit and failed since the last call. Does not wait."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait until all commits are done, and what follows them. Raises what failed first.

        Raises:
            RunError: a step failed, on whichever rank; says why.
            WaitTimeout: it names what is missing.
        """
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
        """The saves failed, which was told already: wait for no commit of theirs, and do not tell it again."""
        self._open.clear()
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._threads.clear()
        self._errors.clear()

    def _wait_for_trainer(self, step: int, kind: Kind) -> str | None:
        """As `_wait_for`, but what verl's trainer writes itself has all the time that it takes."""
        while True:
            try:
                return self._wait_for(step, kind)
            except WaitTimeout:
                awaited = self._monitor.status(step).result(self._timeout_s + ANSWER_S)["awaited"]
                if not awaited or not all(map(is_beside, awaited)):
                    raise

    def _wait_for(self, step: int, kind: Kind) -> str | None:
        call = self._monitor.wait_committed(step, self._attempt, self._timeout_s, kind=kind)
        # The monitor ends the wait itself, and names what is missing.
        return call.result(self._timeout_s + ANSWER_S)["path"]


def follow_with_copy(commits: Commits, root: Path, step: int, copy: Callable[[], None]) -> None:
    """Copy a step's folder to another place, in the background, when its full checkpoint is committed. It is held
    meanwhile, so that no limit of checkpoints deletes it.

    Args:
        commits: waits, and tells what is raised.
        root: the checkpoint folder.
        step: the step.
        copy: copies the folder.
    """

    def held(_: str | None) -> None:
        with held_throughout(root, str(step_dir(root, step)), "the copy to a remote place"):
            copy()

    commits.follow(step, FULL, held)
