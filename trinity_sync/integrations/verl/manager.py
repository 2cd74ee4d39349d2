"""`FSDPCheckpointManager`: verl's checkpoint manager, with saves in the background and weights for the Synchronizer.

A drop-in for verl's class of the same name in a program of its own: the same files in the same folders, read by verl's
own loader and merger. What differs: the trainer waits for a copy of the state only; a folder becomes visible when all
ranks have written and never before; an old checkpoint goes after the new one is committed; what fails on one rank is
raised on all of them, at once or at the next call. See `saves` for the way of a save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlCheckpointManager
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import contents, files
from trinity_sync.integrations.verl.copies import Copies, check_export
from trinity_sync.integrations.verl.interfaces import OpensMonitor
from trinity_sync.integrations.verl.ranks import use_on_first_rank
from trinity_sync.integrations.verl.reading import check_files
from trinity_sync.integrations.verl.saves import CommittedSaves
from trinity_sync.protocol.parts import FULL

if TYPE_CHECKING:
    from trinity_sync.backends.engines import FsdpEngine
    from trinity_sync.integrations.verl.weights import Pairs


class FSDPCheckpointManager(CommittedSaves, VerlCheckpointManager):
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
        lazily: a save returns while the state is still being copied, and whoever changes it (the optimizer's step, a
            load, what moves it elsewhere) calls `wait_until_copied` before.
        opens: opens the monitor at the first save, without any actors; `ray_namespace` is not used then, and there is
            no Synchronizer.
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
        opens: OpensMonitor | None = None,
        lazily: bool = False,
        trust_remote_code: bool = False,
        timeout_s: float = 1800.0,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, trust_remote_code=trust_remote_code, **kwargs)
        if self.should_save_hf_model:
            check_export(self)
        self._start_saves(Copies(self, timeout_s, lazily=lazily), opens or ray_namespace, timeout_s)

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
        self._save(local_path, global_step, FULL, wanted, max_ckpt_to_keep)
        if self.rank == 0:
            self._commits.follow(global_step, FULL, lambda _: self.register_checkpoint(local_path, max_ckpt_to_keep))

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

    # ---- what differs from other engines

    @property
    def _backend(self) -> str:
        return "fsdp" if fsdp_version(self.model) == 1 else "fsdp2"

    def _check(self, todo: list[str]) -> None:
        if contents.MODEL in todo and self.model is None:
            raise ConfigError("save_contents has 'model', but the checkpoint manager was made without a model")
        if contents.OPTIMIZER in todo and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        if contents.EXPORT in todo:
            check_export(self)
            files.class_of(self.model)

    def _check_files(self, local_path: str) -> None:
        wanted = {
            contents.MODEL: self.should_load_model,
            contents.OPTIMIZER: self.should_load_optimizer,
            contents.EXTRA: self.should_load_extra,
        }
        names = [contents.file(name, self.world_size, self.rank) for name, load in wanted.items() if load]
        check_files(local_path, names)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load with verl's own code, which would run what is pickled in the files."""
        with nothing_runs(local_path):
            VerlCheckpointManager.load_checkpoint(self, local_path, hdfs_path, del_local_after_load)


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
