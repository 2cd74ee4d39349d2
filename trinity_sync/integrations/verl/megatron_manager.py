"""`MegatronCheckpointManager`: verl's checkpoint manager of Megatron engines, with saves in the background.

A drop-in for verl's class of the same name: the same files in the same folders, read by verl's own loader. What differs
is what `manager` says of FSDP's: the trainer waits for a copy of the state only, a folder becomes visible whole or not
at all, and what fails on one rank is raised on all of them. Loads go on bit for bit (see `megatron_loading`), of what
verl itself has saved as well. See `saves` for the way of a save.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.utils import hdfs_io
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager as VerlCheckpointManager

from trinity_sync.backends.meetings import Meeting
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import contents
from trinity_sync.integrations.verl.interfaces import OpensMonitor
from trinity_sync.integrations.verl.megatron_copies import Copies
from trinity_sync.integrations.verl.megatron_loading import check_loadable, load
from trinity_sync.integrations.verl.reading import held_throughout
from trinity_sync.integrations.verl.saves import CommittedSaves
from trinity_sync.protocol.parts import FULL, STATE_DICT

if TYPE_CHECKING:
    from trinity_sync.backends.engines import MegatronEngine


class MegatronCheckpointManager(CommittedSaves, VerlCheckpointManager):
    """Usage, on every rank, where verl's own manager stood (see `use_in_megatron`)::

        use_in_megatron(engine, ray_namespace="my-run")
        engine.save_checkpoint(f"{root}/global_step_{step}/actor", global_step=step, max_ckpt_to_keep=3)
        engine.checkpoint_mananager.wait_on_save_thread()                       # at the end

    All ranks make the same calls in the same order. The driver has started the actors (`open_run`).

    Args:
        *args: as for verl's class.
        **kwargs: as for verl's class.
        ray_namespace: the namespace of the run's actors; empty: Ray's own for this process.
        lazily: a save returns while the state is still being copied, and whoever changes it (the optimizer's step, a
            load, what moves it elsewhere) calls `wait_until_copied` before.
        opens: opens the monitor at the first save, without any actors; `ray_namespace` is not used then.
        timeout_s: limit of every wait, seconds.

    Raises:
        ConfigError: the engine trains with an adapter or through Megatron-FSDP, whose checkpoints are not made here.
        RunError: there is no checkpoint monitor in the namespace.
    """

    _copies: Copies
    checkpoint_save_contents: list[str]

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
        _check_engine(self)
        copies = Copies(self, timeout_s, saved_of=self.saved_of, lazily=lazily)
        self._start_saves(copies, opens or ray_namespace, timeout_s)
        self._contents_saved: list[str] = []

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
    ) -> None:
        """Save what `save_contents` asks for. Collective; returns when the state is copied. An export by
        Megatron-Bridge, or with options in ``mbridge_config``, is written before.

        Args:
            local_path: where the files are after the commit: the step's folder in the checkpoint folder or a place in
                it, such as ``ROOT/global_step_20/actor``. None: nothing is done.
            hdfs_path: where rank 0 copies them after the commit; None: nowhere.
            max_ckpt_to_keep: how many full checkpoints stay, whoever wrote them; None or 0: no limit. A pinned or
                leased one stays beside them. Enforced after the commit.
            save_as_hf: the model in Hugging Face format as well.

        Raises:
            ConfigError, RunError: on every rank; also for what an earlier save failed of.
        """
        if local_path is None:
            return
        asked = sorted(self.checkpoint_save_contents)
        if self._step == global_step and FULL in self._kinds and asked != self._contents_saved:
            raise ConfigError(
                f"step {global_step} was saved with {', '.join(self._contents_saved)}; it is not saved again with "
                f"{', '.join(asked)}"
            )
        wanted = [
            name
            for name, is_asked in (
                (contents.STATE, bool(self._copies.trees_left(global_step))),
                (contents.METADATA, True),
                (contents.EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if is_asked
        ]
        if save_as_hf and self.bridge is None:
            raise ConfigError("save_as_hf needs a bridge, and the engine has none")
        with self._asked_for([*asked, *(["hf_model"] if save_as_hf and "hf_model" not in asked else [])]):
            self._save(local_path, global_step, FULL, wanted, max_ckpt_to_keep)
        self._contents_saved = asked
        if self.rank == 0:
            self._commits.follow(
                global_step, FULL, lambda _: self._follow_commit(local_path, hdfs_path, max_ckpt_to_keep)
            )

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save the model alone, and its Hugging Face export where that is asked for; see `CommittedSaves`."""
        with self._asked_for(["model", *(name for name in self.checkpoint_save_contents if name == "hf_model")]):
            super().save_state_dict(local_path, global_step)

    @contextmanager
    def _asked_for(self, save_contents: list[str]) -> Iterator[None]:
        """Save these contents for the length of the block."""
        before: list[str] = self.checkpoint_save_contents
        self.checkpoint_save_contents = save_contents
        try:
            yield
        finally:
            self.checkpoint_save_contents = before

    def _follow_commit(self, local_path: str, hdfs_path: str | None, max_ckpt_to_keep: int | None) -> None:
        if hdfs_path is not None:
            with held_throughout(self._root, local_path, "the copy to hdfs_path"):
                hdfs_io.makedirs(hdfs_path, exist_ok=True)
                copy = inspect.unwrap(hdfs_io.copy)  # not what waits for the commit, which is there
                if not copy(src=local_path, dst=hdfs_path, dirs_exist_ok=True):
                    raise RunError(f"{local_path} could not be copied to {hdfs_path}")
        self.register_checkpoint(local_path, max_ckpt_to_keep)

    def _finish_writing(self) -> None:
        """Also where a rank has died, for which the others would wait: the monitor knows of it first."""
        if self._step is not None and self._copies.meeting is not None:
            watching = partial(self._watch, self._step, self._copies.meeting)
            threading.Thread(target=watching, name=f"watch-{self._step}", daemon=True).start()
        super()._finish_writing()

    def _watch(self, step: int, meeting: Meeting) -> None:
        try:
            kind = FULL if FULL in self._kinds else STATE_DICT
            self._monitor.wait_committed(step, self._attempt, self._timeout_s, kind=kind).result(self._timeout_s)
        except Exception as error:
            meeting.give_up(error)

    # ---- what differs from other engines

    @property
    def _backend(self) -> str:
        return "megatron"

    def _weights(self) -> list[str]:
        model = [contents.MODEL] if self.should_save_dist_ckpt_model else []
        return [*model, contents.DESCRIPTION, *([contents.EXPORT] if self.should_save_hf_model else [])]

    def _check(self, todo: list[str]) -> None:
        if self.should_save_optimizer and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        strategy = self._monitor.describe().result(self._timeout_s)["save_strategy"]
        if {contents.STATE, contents.MODEL} & set(todo) and strategy != "unrestricted":
            raise ConfigError(
                f"save_strategy is {strategy}; the ranks of a Megatron engine finish a checkpoint together, so it has "
                "to be unrestricted"
            )

    def _check_files(self, local_path: str) -> None:
        check_loadable(self, local_path)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """verl deletes nothing after a load that it can make: the path has to be local."""
        load(self, local_path)


def _check_engine(manager: VerlCheckpointManager) -> None:
    if manager.use_megatron_fsdp:
        raise ConfigError(
            "use_megatron_fsdp is set: checkpoints of Megatron-FSDP are not made here; leave them to verl"
        )
    if manager.peft_cls is not None:
        raise ConfigError("the engine trains a LoRA adapter through Megatron-Bridge: leave its checkpoints to verl")


def use_in_megatron(engine: MegatronEngine, ray_namespace: str = "", **kwargs: Any) -> MegatronCheckpointManager:
    """Put our manager into an initialised verl Megatron engine, so that its own `save_checkpoint` and `load_checkpoint`
    go through it. On every rank.

    Args:
        engine: verl's `MegatronEngine`, with an optimizer.
        ray_namespace: the namespace of the run's actors.
        kwargs: what else `MegatronCheckpointManager` takes.

    Raises:
        ConfigError, RunError: as `MegatronCheckpointManager`.
    """
    theirs = engine.checkpoint_mananager
    manager = MegatronCheckpointManager(
        config=theirs.config,
        checkpoint_config=theirs.checkpoint_config,
        model_config=theirs.model_config,
        transformer_config=theirs.transformer_config,
        role=theirs.role,
        model=theirs.model,
        arch=theirs.arch,
        hf_config=theirs.hf_config,
        param_dtype=theirs.param_dtype,
        share_embeddings_and_output_weights=theirs.share_embeddings_and_output_weights,
        processing_class=theirs.processing_class,
        optimizer=theirs.optimizer,
        optimizer_scheduler=theirs.lr_scheduler,
        use_distributed_optimizer=theirs.use_distributed_optimizer,
        use_checkpoint_opt_param_scheduler=theirs.use_checkpoint_opt_param_scheduler,
        use_dist_checkpointing=theirs.use_dist_checkpointing,
        use_megatron_fsdp=theirs.use_megatron_fsdp,
        bridge=theirs.bridge,
        provider=theirs.provider,
        peft_cls=theirs.peft_cls,
        ray_namespace=ray_namespace,
        **kwargs,
    )
    engine.checkpoint_mananager = manager
    return manager
