"""`MegatronCheckpointManager`: verl's checkpoint manager for Megatron, with saves in the background.

A drop-in for verl's class of the same name: the same files in the same folders, read by verl's own loader. It differs
from verl's in the same points as `manager`. Loads restore the state bit for bit, also of checkpoints that verl wrote.
See `committed_saves` for the steps of a save.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from torch.distributed.checkpoint import FileSystemReader
from verl.utils import hdfs_io
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager as VerlCheckpointManager
from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

from trinity_sync.backends.meetings import Meetings, RankMeeting
from trinity_sync.backends.megatron import writer
from trinity_sync.backends.megatron.megatron_families import saved_layout
from trinity_sync.backends.megatron.writer import HUGGING_FACE, finalise
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl.committed_saves import (
    DESCRIPTION,
    EXPORT,
    METADATA,
    MODEL,
    STATE,
    CommittedSaves,
    SaveOptions,
)
from trinity_sync.integrations.verl.model_files import model_files
from trinity_sync.integrations.verl.ranks import Pairs, together, use_on_first_rank
from trinity_sync.integrations.verl.reading import held_throughout
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import FULL, STATE_DICT, FileTuple
from trinity_sync.weights.staging import TensorCopy

if TYPE_CHECKING:
    from mbridge.core.llm_bridge import LLMBridge

    from trinity_sync.backends.base import MegatronEngineProtocol


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
        lazily: a save returns while the state is still being copied. Call `wait_until_copied` before the state changes
            or moves: before the optimizer's step, a load, an offload.
        opens: opens the monitor at the first save, without actors; `ray_namespace` is not used then.
        timeout_s: limit of every wait, seconds.

    Raises:
        ConfigError: the engine trains an adapter or uses Megatron-FSDP; this manager saves neither.
        RunError: there is no checkpoint monitor in the namespace.
    """

    _copies: MegatronCopies
    checkpoint_save_contents: list[str]
    _contents_saved: Sequence[str] = ()

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
    ) -> None:
        """Save what `save_contents` asks for. Collective; returns when the state is copied. An export through
        Megatron-Bridge, or with options in ``mbridge_config``, is written before that.

        Args:
            local_path: where the files are after the commit: the step's folder in the checkpoint folder or a place in
                it, such as ``ROOT/global_step_20/actor``. None: nothing is done.
            hdfs_path: where rank 0 copies the files after the commit; None: nowhere.
            max_ckpt_to_keep: how many full checkpoints stay, of all runs; None or 0: no limit. Pinned and leased ones
                stay too. Enforced after the commit.
            save_as_hf: save the model in Hugging Face format as well.

        Raises:
            ConfigError, RunError: on every rank; also when an earlier save failed.
        """
        if local_path is None:
            return
        contents = sorted(self.checkpoint_save_contents)
        if self._step == global_step and FULL in self._kinds and contents != self._contents_saved:
            raise ConfigError(
                f"step {global_step} was saved with {', '.join(self._contents_saved)}; it is not saved again with "
                f"{', '.join(contents)}"
            )
        wanted = [
            name
            for name, is_asked in (
                (STATE, bool(self._copies.trees_left(global_step))),
                (METADATA, True),
                (EXPORT, self.should_save_hf_model or save_as_hf),
            )
            if is_asked
        ]
        if save_as_hf and self.bridge is None:
            raise ConfigError("save_as_hf needs a bridge, and the engine has none")
        names = [*self.checkpoint_save_contents]  # verl writes them in the user's order
        if save_as_hf and "hf_model" not in names:
            names.append("hf_model")
        with self._asked_for(names):
            self._save(local_path, global_step, FULL, wanted, max_ckpt_to_keep)
        self._contents_saved = contents
        if self.rank == 0:
            self._commits.follow(
                global_step, FULL, lambda _: self._follow_commit(local_path, hdfs_path, max_ckpt_to_keep)
            )

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save the model alone, and its Hugging Face export if `save_contents` asks for it; see `CommittedSaves`."""
        with self._asked_for(["model", *(name for name in self.checkpoint_save_contents if name == "hf_model")]):
            super().save_state_dict(local_path, global_step)

    @contextmanager
    def _asked_for(self, save_contents: list[str]) -> Iterator[None]:
        """Replace `save_contents` inside the block."""
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
                copy = inspect.unwrap(hdfs_io.copy)  # the original, which does not wait for the commit
                if not copy(src=local_path, dst=hdfs_path, dirs_exist_ok=True):
                    raise RunError(f"{local_path} could not be copied to {hdfs_path}")
        self.register_checkpoint(local_path, max_ckpt_to_keep)

    def _finish_writing(self) -> None:
        """As the base's; also ends when a rank has died, which the monitor notices before the other ranks do."""
        if self._step is not None and self._copies.meeting is not None:
            watching = partial(self._watch, self._step, self._copies.meeting)
            threading.Thread(target=watching, name=f"watch-{self._step}", daemon=True).start()
        super()._finish_writing()

    def _watch(self, step: int, meeting: RankMeeting) -> None:
        try:
            kind = FULL if FULL in self._kinds else STATE_DICT
            self._monitor.wait_committed(step, self._attempt, self._timeout_s, kind=kind).result(self._timeout_s)
        except Exception as error:
            meeting.give_up(error)

    # ---- what differs from other engines

    def _make_copies(self, timeout_s: float, *, lazily: bool) -> MegatronCopies:
        if self.use_megatron_fsdp:
            raise ConfigError(
                "use_megatron_fsdp is set: checkpoints of Megatron-FSDP are not made here; leave them to verl"
            )
        if self.peft_cls is not None:
            raise ConfigError("the engine trains a LoRA adapter through Megatron-Bridge: leave its checkpoints to verl")
        return MegatronCopies(self, timeout_s, saved_of=self.saved_of, lazily=lazily)

    @property
    def _backend(self) -> str:
        return "megatron"

    def _weights(self) -> list[str]:
        model = [MODEL] if self.should_save_dist_ckpt_model else []
        return [*model, DESCRIPTION, *([EXPORT] if self.should_save_hf_model else [])]

    def _check(self, todo: list[str]) -> None:
        if self.should_save_optimizer and self.optimizer is None:
            raise ConfigError("save_contents has 'optimizer', but the checkpoint manager was made without an optimizer")
        strategy = self._monitor.describe().result(self._timeout_s)["save_strategy"]
        if {STATE, MODEL} & set(todo) and strategy != "unrestricted":
            raise ConfigError(
                f"save_strategy is {strategy}; the ranks of a Megatron engine finish a checkpoint together, so it has "
                "to be unrestricted"
            )

    def _check_files(self, local_path: str) -> None:
        check_loadable(self, local_path)

    def _load_as_verl(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        """Load from a local path. verl never deletes such a path after a load."""
        load(self, local_path)


def use_in_megatron(
    engine: MegatronEngineProtocol, ray_namespace: str = "", **kwargs: Unpack[SaveOptions]
) -> MegatronCheckpointManager:
    """Put our manager into an initialised verl Megatron engine, so that the engine's `save_checkpoint` and
    `load_checkpoint` use it. On every rank.

    Args:
        engine: verl's `MegatronEngine`, with an optimizer.
        ray_namespace: the namespace of the run's actors.
        kwargs: more arguments of `MegatronCheckpointManager`.

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


_TREES = {STATE, MODEL}


class MegatronCopies:
    """The state of verl's checkpoint manager, copied for one save after another; see `SaveCopies`. `timeout_s`: limit
    of the wait for a copy, and of each stage in which the ranks write together, seconds. `meeting`: the meeting of the
    newest save's ranks; None before the first save.
    """

    def __init__(
        self,
        manager: VerlCheckpointManager,
        timeout_s: float,
        *,
        saved_of: Callable[[int], set[str]],
        lazily: bool,
    ) -> None:
        self._manager = manager
        self._lazily = lazily
        self._copying: TensorCopy | None = None
        self._trees = writer.Trees(manager)
        self._meetings = Meetings.of_default_group(timeout_s)
        self.meeting: RankMeeting | None = None
        self._files = model_files(manager.hf_config, manager.processing_class) if manager.rank == 0 else ModelFiles({})
        self._small: dict[str, bytes] | None = None
        self._saved_of = saved_of

    def trees_left(self, step: int) -> list[str]:
        """Return the trees of a full save of the step, without the model's if that is saved already."""
        manager = self._manager
        trees = (
            (writer.MODEL, manager.should_save_dist_ckpt_model and MODEL not in self._saved_of(step)),
            (writer.OPTIMIZER, manager.should_save_optimizer),
            (writer.EXTRA, manager.should_save_extra),
        )
        return [name for name, wanted in trees if wanted]

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """See `SaveCopies`. If a rank fails to describe its state, the others wait in megatron-core's own collective
        calls, up to the timeout of the process group.
        """
        found: dict[str, SaveFn] = {}
        if writer.gathers_late(self._manager.model):
            writer.gather_parameters(self._manager.model)
        for name, names in ((STATE, self.trees_left(step)), (MODEL, [writer.MODEL])):
            if name in todo:
                found[name] = self._take_trees(step, names, folder, staging, durable)
        exports = EXPORT in todo
        described = next((name for name in (METADATA, DESCRIPTION) if name in todo), None)
        if described or exports:
            together(f"describe the contents of step {step}", self._read_small)
        if exports:
            export = self._take_export(step, folder)
            if self._manager.rank == 0:
                found[EXPORT] = export
        if described and self._manager.rank == 0:
            contents = self._saved_of(step) | set(todo)
            found[described] = self._take_small(step, folder, described, contents)
        return found

    def give_up(self, name: str, error: BaseException) -> None:
        if name in _TREES and self.meeting is not None:
            self.meeting.give_up(error)

    def wait_until_copied(self) -> None:
        if self._copying is not None:
            self._copying.wait_until_copied(self._meetings.timeout_s)

    # ---- trees

    def _take_trees(self, step: int, names: list[str], folder: Path, staging: Path, durable: bool) -> SaveFn:
        pending = self._trees.plan(folder, names)

        limit = self._meetings.timeout_s
        lazily = self._lazily and not writer.has_buffers(self._manager.model)

        def copy() -> None:
            self._copying = self._trees.copy(pending, in_background=lazily)
            if not lazily:
                self._copying.wait_whole(limit)

        together(f"copy the state of step {step}", copy)
        copying = self._copying
        assert copying is not None
        meeting = self.meeting = self._meetings.begin(f"step {step}")

        def write() -> list[Path | FileTuple]:
            return finalise(pending, copying, meeting, staging, durable=durable)

        return write

    # ---- export

    def _take_export(self, step: int, folder: Path) -> SaveFn:
        """Return a writer of the export. An export by mbridge is gathered to rank 0 here and written in the background.
        One with options in ``mbridge_config``, or by Megatron-Bridge, is written here, by the bridge.
        """
        manager, place = self._manager, folder / HUGGING_FACE
        what = f"export the model of step {step}"
        dtype = str(next(manager.model[0].parameters()).dtype).removeprefix("torch.")
        # Config files that are saved already stay as they are.
        described = {METADATA, DESCRIPTION} & self._saved_of(step)
        files = self._files if described or manager.rank else self._files.with_dtype(dtype)
        if manager.vanilla_bridge and not any(manager._get_bridge_extended_args().values()):
            state = use_on_first_rank(what, manager.bridge.export_weights(manager.model), _copied)

            def write() -> list[Path]:
                files.write(place)
                _write_weights(manager.bridge, state or {}, place)
                return _files(place)

            return write
        together(f"begin to {what}", lambda: place.mkdir(parents=True, exist_ok=True))
        together(what, lambda: manager._save_model_as_hf_via_bridge(str(place)))

        def write_beside() -> list[Path]:
            files.write(place)  # replaces those that the bridge has written
            return _files(place)

        return write_beside

    # ---- small files of rank 0

    def _read_small(self) -> None:
        """Read the small files once: none changes in a run."""
        if self._manager.rank == 0 and self._small is None:
            self._small = writer.small_files(self._manager, self._files)

    def _take_small(self, step: int, folder: Path, described: str, saved: set[str]) -> SaveFn:
        left_out: tuple[str, ...] = () if self._manager.should_save_extra else (writer.CONFIG,)
        if EXPORT in saved:
            left_out += (HUGGING_FACE,)
        files = {name: data for name, data in (self._small or {}).items() if not name.startswith(left_out)}
        contents = writer.contents_file(self._manager, step, has_trees=bool(_TREES & saved))
        if described == METADATA:
            return lambda: ModelFiles(files | contents).write(folder)

        def write() -> list[Path]:
            ModelFiles(contents).write(folder)  # not reported: a full save of the step writes it again
            return ModelFiles(files).write(folder)

        return write


def _copied(tensors: Pairs) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def _write_weights(bridge: LLMBridge, state: dict[str, torch.Tensor], place: Path) -> None:
    """Write the files of `bridge.save_weights` from weights that are gathered already."""
    bridge.safetensor_io.save_hf_weight(iter(state.items()), str(place), bridge._get_hf_shared_weight_keys())
    if bridge.safetensor_io.origin_index:
        bridge.safetensor_io.save_index(str(place))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# Loads, all collective.


_RNG = "rng_state"


def check_loadable(manager: VerlCheckpointManager, local_path: str) -> None:
    """Check that the contents to load are there and fit this layout. No collective call. Raises RunError: something is
    missing, or the layout differs; says what to do.
    """
    folder = Path(local_path)
    if not folder.is_dir():
        raise RunError(f"{local_path} is not there")
    manager._raise_for_old_layout(local_path)
    wanted = [*_trees_to_load(manager), *([HUGGING_FACE] if _loads_export(manager) else [])]
    missing = [name for name in wanted if not _has(folder, name)]
    if missing:
        present = [name for name in (*writer.ALL, HUGGING_FACE) if _has(folder, name)]
        raise RunError(f"{local_path} has no {', '.join(missing)}; it has {', '.join(present) or 'nothing'}")
    _check_layout(manager, folder)


def load(manager: VerlCheckpointManager, local_path: str) -> None:
    """Load `load_contents` as verl would; the schedule only with ``use_checkpoint_opt_param_scheduler``. Each rank gets
    its own random generators back if as many ranks saved theirs, else those of its place in the model. Raises RunError:
    a file holds something that may not be loaded; nothing that is pickled runs.
    """
    folder = Path(local_path)
    with nothing_runs(folder):
        wanted = _trees_to_load(manager)
        content = manager._load_content_metadata(str(folder / (wanted or [writer.MODEL])[0]))
        if writer.MODEL in wanted:
            writer.load_model(manager, folder, content)
        elif _loads_export(manager):
            manager._load_model_as_hf_via_bridge(str(folder / HUGGING_FACE))
        if writer.OPTIMIZER in wanted:
            schedule = writer.load_optimizer(manager, folder, content)
            if manager.use_checkpoint_opt_param_scheduler and manager.lr_scheduler is not None:
                if schedule is None:
                    raise RunError(f"{folder / writer.OPTIMIZER} has no state of the learning-rate schedule")
                writer.load_schedule(manager, schedule)
        elif manager.optimizer is not None and (writer.MODEL in wanted or _loads_export(manager)):
            manager.optimizer.reload_model_params()
        if writer.EXTRA in wanted:
            _load_rng(manager, folder)


def _load_rng(manager: VerlCheckpointManager, folder: Path) -> None:
    if _shapes(folder).get(writer.RNG_OF_RANK) == (manager.world_size,):
        writer.load_rng_of_rank(manager, folder)
        return
    loaded = load_dist_checkpointing(manager._build_extra_state_dict(), str(folder / writer.EXTRA))
    manager.load_rng_states(loaded[_RNG])


def _trees_to_load(manager: VerlCheckpointManager) -> list[str]:
    trees = (
        (writer.MODEL, manager.should_load_dist_ckpt_model),
        (writer.OPTIMIZER, manager.should_load_optimizer),
        (writer.EXTRA, manager.should_load_extra),
    )
    return [name for name, wanted in trees if wanted]


def _loads_export(manager: VerlCheckpointManager) -> bool:
    """Return whether the model is loaded from the export. If both are asked for, verl takes the tree."""
    return bool(manager.should_load_hf_model and not manager.should_load_dist_ckpt_model)


def _has(folder: Path, name: str) -> bool:
    if name == HUGGING_FACE:
        return any((folder / name).glob("*.safetensors"))
    return (folder / name / ".metadata").is_file()


def _check_layout(manager: VerlCheckpointManager, folder: Path) -> None:
    layout = writer.layout(manager)
    saved = saved_layout(folder) or {}
    if writer.EXTRA in _trees_to_load(manager):
        saved = {**saved, **dict(zip(("pp", "tp"), _shapes(folder).get(_RNG, ()), strict=False))}
        if any(saved.get(name, layout[name]) != layout[name] for name in ("tp", "pp")):
            raise RunError(
                f"{folder} was saved with {_said(saved)}, this engine has {_said(layout)}: weights and optimizer may "
                "be loaded, the random generators belong to the old ranks; leave 'extra' out of load_contents to go on "
                "with new ones"
            )
    other = any(saved.get(name, layout[name]) != layout[name] for name in ("tp", "pp", "ep"))
    if other and saved.get("optimizer_format") == "dp_reshardable" and writer.OPTIMIZER in _trees_to_load(manager):
        raise RunError(
            f"{folder} was saved with {_said(saved)} and dist_ckpt_optim_fully_reshardable=False, which other values "
            f"of tp, pp and ep cannot load; this engine has {_said(layout)}. Leave 'optimizer' out of load_contents to "
            "go on with the weights alone"
        )


def _said(layout: dict[str, int | str]) -> str:
    return " ".join(f"{name}={layout[name]}" for name in ("tp", "pp", "dp", "ep") if name in layout)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each set of random generators, by name; verl's sets are by pipeline and tensor rank."""
    with nothing_runs(folder):
        keys = FileSystemReader(folder / writer.EXTRA).read_metadata().state_dict_metadata
    found = {}
    for key in keys:
        name, _, shard = key.partition("/shard_")
        found[name] = tuple(int(size) for size in shard.rpartition("_")[2].split("."))
    return found
