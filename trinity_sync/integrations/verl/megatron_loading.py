"""Loads of verl's Megatron checkpoints, ours and its own, that go on bit for bit. All of them are collective.

verl's own loader hands the optimizer a description that the load of the model has used up, cannot load torch's Adam,
and leaves the optimizer its old weights where it loads the model alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import FileSystemReader
from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

from trinity_sync.backends.megatron import trees
from trinity_sync.backends.megatron.resume import saved_layout
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.errors import RunError
from trinity_sync.integrations.verl.megatron_copies import HUGGING_FACE

if TYPE_CHECKING:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager as VerlCheckpointManager

_RNG = "rng_state"


def check_loadable(manager: VerlCheckpointManager, local_path: str) -> None:
    """Check, without a collective call, that what the manager is to load is there and can be loaded in this layout.

    Raises:
        RunError: something is missing, or the layout is another one; says what to do.
    """
    folder = Path(local_path)
    if not folder.is_dir():
        raise RunError(f"{local_path} is not there")
    manager._raise_for_old_layout(local_path)
    wanted = [*_trees_to_load(manager), *([HUGGING_FACE] if _loads_export(manager) else [])]
    missing = [name for name in wanted if not _has(folder, name)]
    if missing:
        there = [name for name in (*trees.ALL, HUGGING_FACE) if _has(folder, name)]
        raise RunError(f"{local_path} has no {', '.join(missing)}; what is there is {', '.join(there) or 'nothing'}")
    _check_layout(manager, folder)


def load(manager: VerlCheckpointManager, local_path: str) -> None:
    """Load what the manager's `load_contents` name, as verl would; the schedule with
    ``use_checkpoint_opt_param_scheduler`` only. Each rank's random generators are restored where as many ranks saved
    theirs, else those of its place in the model.

    Raises:
        RunError: a file holds what it may not; nothing that is pickled in one runs.
    """
    folder = Path(local_path)
    with nothing_runs(folder):
        wanted = _trees_to_load(manager)
        content = manager._load_content_metadata(str(folder / (wanted or [trees.MODEL])[0]))
        if trees.MODEL in wanted:
            trees.load_model(manager, folder, content)
        elif _loads_export(manager):
            manager._load_model_as_hf_via_bridge(str(folder / HUGGING_FACE))
        if trees.OPTIMIZER in wanted:
            schedule = trees.load_optimizer(manager, folder, content)
            if manager.use_checkpoint_opt_param_scheduler and manager.lr_scheduler is not None:
                if schedule is None:
                    raise RunError(f"{folder / trees.OPTIMIZER} has no state of the learning-rate schedule")
                trees.load_schedule(manager, schedule)
        elif manager.optimizer is not None and (trees.MODEL in wanted or _loads_export(manager)):
            manager.optimizer.reload_model_params()
        if trees.EXTRA in wanted:
            _load_rng(manager, folder)


def _load_rng(manager: VerlCheckpointManager, folder: Path) -> None:
    if _shapes(folder).get(trees.RNG_OF_RANK) == (manager.world_size,):
        trees.load_rng_of_rank(manager, folder)
        return
    loaded = load_dist_checkpointing(manager._build_extra_state_dict(), str(folder / trees.EXTRA))
    manager.load_rng_states(loaded[_RNG])


def _trees_to_load(manager: VerlCheckpointManager) -> list[str]:
    asked = (
        (trees.MODEL, manager.should_load_dist_ckpt_model),
        (trees.OPTIMIZER, manager.should_load_optimizer),
        (trees.EXTRA, manager.should_load_extra),
    )
    return [name for name, wanted in asked if wanted]


def _loads_export(manager: VerlCheckpointManager) -> bool:
    """Whether the model comes from the export. With both, verl takes the tree."""
    return bool(manager.should_load_hf_model and not manager.should_load_dist_ckpt_model)


def _has(folder: Path, name: str) -> bool:
    if name == HUGGING_FACE:
        return any((folder / name).glob("*.safetensors"))
    return (folder / name / ".metadata").is_file()


def _check_layout(manager: VerlCheckpointManager, folder: Path) -> None:
    here = trees.layout(manager)
    saved = saved_layout(folder) or {}
    if trees.EXTRA in _trees_to_load(manager):
        saved = {**saved, **dict(zip(("pp", "tp"), _shapes(folder).get(_RNG, ()), strict=False))}
        if any(saved.get(name, here[name]) != here[name] for name in ("tp", "pp")):
            raise RunError(
                f"{folder} was saved with {_said(saved)}, this engine has {_said(here)}: weights and optimizer may be "
                "loaded, the random generators belong to the old ranks; leave 'extra' out of load_contents to go on "
                "with new ones"
            )
    other = any(saved.get(name, here[name]) != here[name] for name in ("tp", "pp", "ep"))
    if other and saved.get("optimizer_format") == "dp_reshardable" and trees.OPTIMIZER in _trees_to_load(manager):
        raise RunError(
            f"{folder} was saved with {_said(saved)} and dist_ckpt_optim_fully_reshardable=False, which other values "
            f"of tp, pp and ep cannot load; this engine has {_said(here)}. Leave 'optimizer' out of load_contents to "
            "go on with the weights alone"
        )


def _said(layout: dict[str, int | str]) -> str:
    return " ".join(f"{name}={layout[name]}" for name in ("tp", "pp", "dp", "ep") if name in layout)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """How many of each object of random generators there are, by name: for verl's, by pipeline and tensor rank."""
    with nothing_runs(folder):
        keys = FileSystemReader(folder / trees.EXTRA).read_metadata().state_dict_metadata
    found = {}
    for key in keys:
        name, _, shard = key.partition("/shard_")
        found[name] = tuple(int(size) for size in shard.rpartition("_")[2].split("."))
    return found
