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

import copy
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager
from verl.utils.fs import is_non_local
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.actors.monitor import MonitorClient
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.checkpoint.holds import lease_checkpoint
from trinity_sync.checkpoint.layout import MANIFEST, step_dir, step_of
from trinity_sync.checkpoint.monitor import ACTOR_NAME
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import files
from trinity_sync.integrations.verl.commits import Commits
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.integrations.verl.state import StateCopy, sharded
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind
from trinity_sync.sync import Synchronizer

#: What a save may consist of. The first two are weights, on all ranks and on rank 0.
_MODEL, _METADATA, _OPTIMIZER, _EXTRA, _EXPORT = "model", "metadata", "optim", "extra_state", "hf_model"
_WEIGHTS = (_MODEL, _METADATA)
_OF_FIRST_RANK = (_METADATA, _EXPORT)


class FSDPCheckpointManager(VerlCheckpointManager):
    """Usage, on every rank, where verl's own manager stood (see `use_in`)::

        manager = FSDPCheckpointManager(model=engine.module, optimizer=engine.optimizer, ..., ray_namespace="my-run")
        manager.save_state_dict(f"{root}/global_step_{step}/actor", step)       # for explorers
        manager.save_checkpoint(f"{root}/global_step_{step}/actor", step, max_ckpt_to_keep=3)
        manager.wait_on_save_thread()                                           # at the end

    All ranks make the same calls in the same order. The driver has started the actors (`open_run`).

    Args:
        args, kwargs: as for verl's class.
        ray_namespace: of the run's actors; empty: Ray's own for this process.
        trust_remote_code: passed on when Hugging Face configs and models are made.
        timeout_s: limit of every wait, seconds.

    Raises:
        RunError: there is no checkpoint monitor in the namespace.
    """

    def __init__(
        self,
        *args: Any,
        ray_namespace: str = "",
        trust_remote_code: bool = False,
        timeout_s: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, trust_remote_code=trust_remote_code, **kwargs)
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
        self._durable: bool = facts["fsync"]
        self._roles: list[str] = facts["roles"]
        self._coordinator = CheckpointCoordinator(
            handle, job_id=f"rank-{self.rank}", timeout_s=timeout_s, attempt=self._attempt
        )
        self._commits = Commits(self._monitor, self._attempt, timeout_s)
        self._metadata: dict[str, bytes] | None = None
        self._copy = StateCopy()
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
        contents = [
            name
            for name, wanted in (
                (_MODEL, self.should_save_model),
                (_METADATA, True),
                (_OPTIMIZER, self.should_save_optimizer),
                (_EXTRA, self.should_save_extra),
                (_EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if wanted
        ]
        self._save(local_path, global_step, FULL, contents)
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
            as `save_checkpoint`.
        """
        if local_path is None:
            return
        if self._step is None and global_step in (0, self._loaded):
            together(f"announce version {global_step}", lambda: self._announce(global_step))
            return
        self._save(local_path, global_step, STATE_DICT, [_MODEL, _METADATA])
        if self.rank == 0 and self._announced != global_step:
            self._commits.follow(global_step, STATE_DICT, lambda folder: self._announce(global_step, folder))

    def _save(self, local_path: str, step: int, kind: Kind, contents: list[str]) -> None:
        self._check_earlier(step)
        if self._step != step:
            self._step, self._saved, self._kinds = step, {}, set()
        place = together(f"save step {step}", lambda: self._coordinator.place(local_path, step))[self.rank]
        saved = self._saved.get(place, set())
        todo = [name for name in contents if name not in saved]
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
        begun: list[Path] = []
        try:
            together(f"begin to save step {step}", lambda: begun.append(self._begin(local_path, step, kind, todo)))
            writers = self._snapshot(step, todo, begun[0])
        except Exception as error:
            if self.rank == 0 and begun:
                self._monitor.fail_step(step, str(error), attempt=self._attempt).result(self._timeout_s)
            raise
        for name, write in writers.items():
            part = self._coordinator.part(local_path, step, self._part(name, self.rank))
            self._coordinator.save_async(name, write, step, name in _WEIGHTS, part=part)

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

    def _begin(self, local_path: str, step: int, kind: Kind, todo: list[str]) -> Path:
        """Where to write. Rank 0 announces the parts."""
        if _MODEL in todo and self.model is None:
            raise ConfigError("save_contents has 'model', but the checkpoint manager was made without a model")
        if _OPTIMIZER in todo and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        if _EXPORT in todo:
            files.auto_class(files.unwrapped(self.model).config)
        folder = self._coordinator.staged(local_path, step)
        parts = {
            self._coordinator.part(local_path, step, self._part(name, rank)): name
            for name in todo
            for rank in self._writers(name)
        }
        self._tell_parts(local_path, step, kind, parts)
        return folder

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
            [*parts, *(_announcement(role) for role in roles)],
            {"backend": "fsdp" if fsdp_version(self.model) == 1 else "fsdp2", "world_size": self.world_size},
            weights_parts=[part for part, name in parts.items() if name in _WEIGHTS],
        )
        begun.result(self._timeout_s)
        if roles:
            announced = self._monitor.notify_finished(step, part=_announcement(place), attempt=self._attempt, files=[])
            announced.result(self._timeout_s)

    def _snapshot(self, step: int, todo: list[str], folder: Path) -> dict[str, SaveFn]:
        """Copy what this rank is to write; what writes it, by name. Collective."""
        together(f"copy the state of step {step}", lambda: self._copy_state(step, todo))
        staging = self._coordinator.staged(step_dir(self._root, step), step) if self._root is not None else folder
        writers: dict[str, SaveFn] = {
            name: self._copy.writer(self._file(name), folder, staging, durable=self._durable)
            for name in todo
            if name not in _OF_FIRST_RANK
        }
        if self.rank == 0 and _METADATA in todo:
            writers[_METADATA] = lambda: files.write_files(self._metadata or {}, folder)
        if _EXPORT in todo:
            tensors = files.full_tensors(self.model)
            export = use_on_first_rank(f"gather the model of step {step}", tensors, self._export)
            if export is not None:
                empty, weights = export
                writers[_EXPORT] = lambda: files.write_export(empty, weights, folder / "huggingface")
        return writers

    def _copy_state(self, step: int, todo: list[str]) -> None:
        live: dict[str, Any] = {}
        with sharded(self.model, offload=torch.cuda.is_available()) if self.model is not None else nullcontext():
            if _MODEL in todo:
                # Collective in FSDP1, so it comes before everything that may fail on one rank.
                live[_MODEL] = self._chosen(self.model.state_dict())
            if _OPTIMIZER in todo:
                live[_OPTIMIZER] = self.optimizer.state_dict()
        if _EXTRA in todo:
            scheduler = copy.deepcopy(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None
            live[_EXTRA] = {"lr_scheduler": scheduler, "rng": self.get_rng_state()}
        self._copy.take({self._file(name): value for name, value in live.items()}, f"the state of step {step}")
        if _METADATA in todo and self.rank == 0 and self._metadata is None:
            # Made once, and on the thread that uses config and tokenizer: neither changes in a run.
            self._metadata = files.metadata(self)

    def _export(self, tensors: Any) -> tuple[Any, dict[str, Any]]:
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        return files.empty_model(self.model, dtype, self.trust_remote_code), state

    def _chosen(self, state: dict[str, Any]) -> dict[str, Any]:
        if not (self.should_save_lora_only and self._has_lora()):
            return state
        chosen = {name: value for name, value in state.items() if "lora_" in name or ".adapter_" in name}
        if not chosen:
            raise ConfigError("save_lora_only is set and the model has adapters, but none of its tensors is one")
        return chosen

    def _writers(self, name: str) -> range:
        return range(1 if name in _OF_FIRST_RANK else self.world_size)

    @staticmethod
    def _part(name: str, rank: int) -> str:
        return name if name in _OF_FIRST_RANK else f"{name}-rank-{rank:05d}"

    # ---- after a save

    def wait_on_save_thread(self) -> None:
        """Return when all background saves are complete: written by all ranks, committed, the limit enforced.

        Any rank may call it alone.

        Raises:
            what a background save of this rank raised, else RunError for what failed on another one.
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
            new_path: of the new one.
            max_ckpt_to_keep: how many full checkpoints stay; None or 0: no limit.
        """
        if new_path not in self.previous_saved_paths:
            self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep and max_ckpt_to_keep > 0:
            self._monitor.retain(max_ckpt_to_keep).result(self._timeout_s)
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

        def publish(tensors: Any) -> None:
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
        step = self._step_of(local_path)
        with ExitStack() as held:
            # A rank that stops before verl's barrier would leave its peers in it.
            together(f"load {local_path}", lambda: self._hold(local_path, held))
            self._load_as_verl(local_path, hdfs_path, del_local_after_load)
        if step is not None:
            self._loaded, self._step, self._saved, self._kinds = step, None, {}, set()

    def _hold(self, local_path: str, held: ExitStack) -> None:
        self._check_files(local_path)
        step = self._step_of(local_path)
        # What verl itself wrote has no manifest; nobody deletes it.
        if step is not None and self._root is not None and (step_dir(self._root, step) / MANIFEST).exists():
            lease = lease_checkpoint(self._root, step, holder=f"rank {self.rank}", seconds=self._timeout_s)
            held.enter_context(lease)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """By verl's own code, which would run what is pickled in the files."""
        with nothing_runs(local_path):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _check_files(self, local_path: str) -> None:
        """This rank's files are there."""
        if is_non_local(local_path):
            return
        wanted = {
            _MODEL: self.should_load_model,
            _OPTIMIZER: self.should_load_optimizer,
            _EXTRA: self.should_load_extra,
        }
        names = [self._file(name) for name, load in wanted.items() if load]
        missing = [name for name in names if not (Path(local_path) / name).is_file()]
        if missing:
            others = sorted({path.name.split("_rank_")[0] for path in Path(local_path).glob("model_world_size_*.pt")})
            found = f"; what is there is {', '.join(others)}" if others else ""
            raise RunError(f"{local_path} has no {', '.join(missing)}{found}")

    def _file(self, name: str) -> str:
        return f"{name}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _step_of(self, local_path: str) -> int | None:
        """The step of a checkpoint in our folder; None for any other place."""
        if self._root is None:
            return None
        path = Path(local_path).absolute()
        for folder in (path, *path.parents):
            step = step_of(folder.name)
            if step is not None and folder == step_dir(self._root, step):
                return step if folder.is_dir() else None
        return None


def _announcement(role: str) -> str:
    """A part without files: that the parts of this role are known. A full checkpoint waits for that of each role."""
    return f"{role}/announced"


def use_in(engine: Any, ray_namespace: str = "", **kwargs: Any) -> FSDPCheckpointManager:
    """Put our manager into an initialised verl FSDP engine, so that its own `save_checkpoint` and `load_checkpoint`
    go through it. On every rank.

    Args:
        engine: verl's `FSDPEngine`.
        ray_namespace: of the run's actors.
        kwargs: for `FSDPCheckpointManager`.
    """
    engine.checkpoint_manager = FSDPCheckpointManager(
        model=engine.module,
        optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler,
        processing_class=engine.model_config.get_processor(),
        checkpoint_config=engine.checkpoint_config,
        trust_remote_code=engine.model_config.trust_remote_code,
        ray_namespace=ray_namespace,
        **kwargs,
    )
    return engine.checkpoint_manager
