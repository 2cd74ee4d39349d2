"""`FSDPCheckpointManager`: verl's checkpoint manager, with saves in the background and weights for the Synchronizer.

A drop-in for verl's class of the same name in a program of its own: the same files in the same folders, read by verl's
own loader and merger. What differs: the trainer waits for a copy of the state only; a folder becomes visible when all
ranks have written and never before; an old checkpoint goes after the new one is committed; what fails on one rank is
raised on all of them, at once or at the next call.

One save, on every rank:

1. earlier saves of this manager are complete, or their failure is raised (all ranks agree);
2. rank 0 announces the parts to the monitor and hears where to write; all ranks agree;
3. all ranks copy their state; all ranks agree;
4. each part is written in the background, into a staging folder that nobody reads;
5. the monitor commits; rank 0 then enforces the limit, and announces the version where one is to be announced.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.layout import step_dir
from trinity_sync.checkpoint.monitor import ACTOR_NAME
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import contents, files
from trinity_sync.integrations.verl.commits import Commits
from trinity_sync.integrations.verl.copies import Copies, check_export
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.integrations.verl.reading import check_files, hold, step_at
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind
from trinity_sync.sync import Synchronizer

if TYPE_CHECKING:
    from trinity_sync.backends.engines import FsdpEngine
    from trinity_sync.integrations.verl.weights import Pairs


class FSDPCheckpointManager(VerlCheckpointManager):
    """Usage, on every rank, where verl's own manager stood (see `use_in`)::

        manager = FSDPCheckpointManager(model=engine.module, optimizer=engine.optimizer, ..., ray_namespace="my-run")
        manager.save_state_dict(f"{root}/global_step_{step}/actor", step)       # for explorers
        manager.save_checkpoint(f"{root}/global_step_{step}/actor", step, max_ckpt_to_keep=3)
        manager.wait_on_save_thread()                                           # at the end

    All ranks make the same calls in the same order. The driver has started the actors (`open_run`).

    Args:
        *args: as for verl's class.
        **kwargs: as for verl's class.
        ray_namespace: the namespace of the run's actors; empty: Ray's own for this process.
        trust_remote_code: passed on when Hugging Face configs and models are made.
        timeout_s: limit of every wait, seconds.

    Raises:
        ConfigError: `save_contents` asks for an export of a model with an adapter.
        RunError: there is no checkpoint monitor in the namespace.
    """

    def __init__(
        self,
        *args: object,
        ray_namespace: str = "",
        trust_remote_code: bool = False,
        timeout_s: float = 1800.0,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, trust_remote_code=trust_remote_code, **kwargs)
        if self.should_save_hf_model:
            check_export(self)
        self.previous_saved_paths: list[str] = []
        namespace = ray_namespace or None
        try:
            handle = ray.get_actor(ACTOR_NAME, namespace=namespace)
        except ValueError:
            raise RunError(
                f"there is no {ACTOR_NAME!r} in Ray namespace {ray_namespace!r}: let the driver start it with "
                "trinity_sync.integrations.verl.open_run before the workers"
            ) from None
        try:
            self._synchronizer: Synchronizer | None = Synchronizer.get_actor(namespace=namespace)
        except RunError:
            self._synchronizer = None
        self._monitor = MonitorClient(handle)
        self._timeout_s = timeout_s
        facts = self._monitor.describe().result(timeout_s)
        self._root = Path(facts["root"]) if facts["root"] is not None else None
        self._attempt: int = facts["attempt"]
        self._roles: list[str] = facts["roles"]
        self._coordinator = CheckpointCoordinator(
            handle, job_id=f"rank-{self.rank}", timeout_s=timeout_s, attempt=self._attempt
        )
        self._commits = Commits(self._monitor, self._attempt, timeout_s)
        self._copies = Copies(self, durable=facts["fsync"])
        # What this run has saved of its newest step.
        self._step: int | None = None
        self._saved: dict[str, set[str]] = {}  # by place in the step's folder
        self._kinds: set[Kind] = set()
        self._announced: int | None = None
        self._loaded: int | None = None

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str | None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
        *,
        hdfs_path: str | None = None,
    ) -> None:
        """Save what `save_contents` asks for. Collective; returns when the state is copied.

        Args:
            local_path: where the files are after the commit: the step's folder in the checkpoint folder or a place in
                it, such as ``ROOT/global_step_20/actor``. None: nothing is done.
            max_ckpt_to_keep: how many full checkpoints stay, whoever wrote them; None or 0: no limit. A pinned or
                leased one stays beside them. Enforced after the commit.
            save_as_hf: the full model in Hugging Face format as well.
            hdfs_path: taken for verl's sake and not used, as in verl.

        Raises:
            ConfigError, RunError: on every rank; also for what an earlier save failed of.
        """
        if local_path is None:
            return
        wanted = [
            name
            for name, asked in (
                (contents.MODEL, self.should_save_model),
                (contents.METADATA, True),
                (contents.OPTIMIZER, self.should_save_optimizer),
                (contents.EXTRA, self.should_save_extra),
                (contents.EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if asked
        ]
        self._save(local_path, global_step, FULL, wanted)
        if self.rank == 0:
            self._commits.follow(global_step, FULL, lambda _: self.register_checkpoint(local_path, max_ckpt_to_keep))

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save the sharded weights alone, and announce the version when they are committed. Collective.

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
        self._save(local_path, global_step, STATE_DICT, [contents.MODEL, contents.METADATA])
        if self.rank == 0 and self._announced != global_step:
            self._commits.follow(global_step, STATE_DICT, lambda folder: self._announce(global_step, folder))

    def _save(self, local_path: str, step: int, kind: Kind, names: list[str]) -> None:
        self._check_earlier(step)
        if self._step != step:
            self._step, self._saved, self._kinds = step, {}, set()
        place = together(f"save step {step}", lambda: self._coordinator.place(local_path, step))[self.rank]
        saved = self._saved.get(place, set())
        todo = [name for name in names if name not in saved]
        self.previous_global_step = step
        if todo:
            self._write(local_path, step, kind, todo)
        elif kind == FULL and kind not in self._kinds and self._roles:
            together(f"begin to save step {step}", lambda: self._tell_parts(local_path, step, kind, {}))
        elif kind not in self._kinds and self.rank == 0:
            # All of it is written as weights; it is to count as a full checkpoint now.
            commit = self._monitor.monitor_step(step, weights=kind == STATE_DICT, attempt=self._attempt)
            commit.result(self._timeout_s)
        self._saved[place] = saved | set(todo)
        self._kinds.add(kind)
        self._commits.expect(step, kind)

    def _write(self, local_path: str, step: int, kind: Kind, todo: list[str]) -> None:
        begun: list[tuple[Path, Path]] = []
        try:
            together(f"begin to save step {step}", lambda: begun.append(self._begin(local_path, step, kind, todo)))
            writers = self._copies.take(step, todo, *begun[0])
        except Exception as error:
            if self.rank == 0 and begun:
                self._monitor.fail_step(step, str(error), attempt=self._attempt).result(self._timeout_s)
            raise
        for name, write in writers.items():
            part = self._coordinator.part(local_path, step, contents.part(name, self.rank))
            self._coordinator.save_async(name, write, step, name in contents.WEIGHTS, part=part)

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
        if contents.MODEL in todo and self.model is None:
            raise ConfigError("save_contents has 'model', but the checkpoint manager was made without a model")
        if contents.OPTIMIZER in todo and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        if contents.EXPORT in todo:
            files.auto_class(files.unwrapped(self.model).config)
        folder = self._coordinator.staged(local_path, step)
        parts = {
            self._coordinator.part(local_path, step, contents.part(name, rank)): name
            for name in todo
            for rank in contents.writers(name, self.world_size)
        }
        self._tell_parts(local_path, step, kind, parts)
        staging = self._coordinator.staged(step_dir(self._root, step), step) if self._root is not None else folder
        return folder, staging

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
        begun = self._monitor.begin(
            step,
            self._attempt,
            kind,
            [*parts, *(contents.announcement(role) for role in roles)],
            {"backend": "fsdp" if fsdp_version(self.model) == 1 else "fsdp2", "world_size": self.world_size},
            weights_parts=[part for part, name in parts.items() if name in contents.WEIGHTS],
        )
        begun.result(self._timeout_s)
        if roles:
            known = contents.announcement(place)
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
        try:
            self._finish_writing()
            self._commits.wait()
        except Exception:
            self._forget()
            raise

    def _finish_writing(self) -> None:
        """Wait for this rank's saves. What failed first in the group is what is raised on each rank: once a step has
        failed its folder goes, and with it what other ranks are writing to.
        """
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
            max_ckpt_to_keep: how many full checkpoints stay; None or 0: no limit.
        """
        if new_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep and max_ckpt_to_keep > 0:
            self._monitor.prune(max_ckpt_to_keep).result(self._timeout_s)
        self.previous_saved_paths = [path for path in self.previous_saved_paths if Path(path).exists()]

    def _announce(self, step: int, location: str | None = None) -> None:
        if self.rank == 0 and self._synchronizer is not None and self._announced != step:
            if location is None and self._root is not None and step_dir(self._root, step).is_dir():
                location = str(step_dir(self._root, step))
            self._synchronizer.set_model_state_dict(None, step, attempt=self._attempt, location=location)
        self._announced = step

    def _forget(self) -> None:
        """The step failed: nothing of it counts as saved."""
        self._commits.drop()
        self._saved, self._kinds = {}, set()

    # ---- weights in memory

    def upload_state_dict(self, global_step: int) -> None:
        """Hand the full state dict to the Synchronizer. Collective; a barrier at the end.

        Raises:
            RunError: on every rank, where rank 0 could not.
        """

        def publish(tensors: Pairs) -> None:
            if self._synchronizer is None:
                raise RunError("there is no Synchronizer in the namespace to upload to; open_run starts one")
            self._synchronizer.set_model_state_dict(tensors, global_step, attempt=self._attempt)

        use_on_first_rank(f"upload version {global_step}", files.full_tensors(self.model), publish)

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
        if step is not None:
            self._loaded, self._step, self._saved, self._kinds = step, None, {}, set()

    def _prepare(self, local_path: str, held: ExitStack) -> None:
        wanted = {
            contents.MODEL: self.should_load_model,
            contents.OPTIMIZER: self.should_load_optimizer,
            contents.EXTRA: self.should_load_extra,
        }
        check_files(local_path, [self._file(name) for name, load in wanted.items() if load])
        hold(self._root, local_path, f"rank {self.rank}", self._timeout_s, held)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load with verl's own code, which would run what is pickled in the files."""
        with nothing_runs(local_path):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _file(self, name: str) -> str:
        return contents.file(name, self.world_size, self.rank)


def use_in(engine: FsdpEngine, ray_namespace: str = "", **kwargs: Any) -> FSDPCheckpointManager:
    """Put our manager into an initialised verl FSDP engine, so that its own `save_checkpoint` and `load_checkpoint`
    go through it. On every rank.

    Args:
        engine: verl's `FSDPEngine`.
        ray_namespace: the namespace of the run's actors.
        kwargs: what else `FSDPCheckpointManager` takes.
    """
    manager = FSDPCheckpointManager(
        model=engine.module,
        optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler,
        processing_class=engine.model_config.get_processor(),
        checkpoint_config=engine.checkpoint_config,
        trust_remote_code=engine.model_config.trust_remote_code,
        ray_namespace=ray_namespace,
        **kwargs,
    )
    engine.checkpoint_manager = manager
    return manager
