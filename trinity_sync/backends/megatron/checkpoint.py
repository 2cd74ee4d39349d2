"""Full checkpoints of the Megatron engine, in verl's folders (`model/`, `optimizer/`, `extra/`, `ckpt_contents.json`).

All of them in each save, see `trees`; `integrations.verl` saves what verl's configuration names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing

from trinity_sync.backends.engines import MegatronEngine
from trinity_sync.backends.meetings import Meeting
from trinity_sync.backends.megatron import trees
from trinity_sync.backends.megatron.resume import saved_layout
from trinity_sync.backends.megatron.writer import Pending, finalise
from trinity_sync.backends.optimizer_settings import settings_kept
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.errors import RunError
from trinity_sync.models.files import ModelFiles
from trinity_sync.models.hub import local_folder
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.copying import Copying

_CONTENTS = "ckpt_contents.json"


class Checkpoints:
    """Saves and loads the training state of an engine. All methods are collective.

    Args:
        engine: verl's, initialised.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._manager = engine.checkpoint_mananager  # verl spells it so
        self._manager.use_dist_checkpointing = True
        self._trees = trees.Trees(self._manager)
        # read before anything is trained: what becomes of the folder then does not matter
        self._files = ModelFiles.read(local_folder(engine.model_config.local_path)) if dist.get_rank() == 0 else None

    def begin(
        self, folder: Path, meeting: Meeting, *, in_background: bool, durable: bool
    ) -> tuple[Copying, Callable[[], list[Path | FileTuple]]]:
        """Copy the state between two steps, or beginning between them.

        Args:
            folder: the checkpoint's.
            meeting: the meeting of the save's ranks.
            in_background: the state does not change before the copy is waited for.
            durable: see `SelfWritingBackend.begin_save`.

        Returns:
            The copy, and what writes it: to be called on a background thread of every rank; returns this rank's files.
            It has to be done before the next `begin`, which uses the memory again.
        """
        pending = self._trees.plan(folder, trees.ALL)
        copying = self._trees.copy(pending, in_background=in_background)
        return copying, lambda: self._write(folder, pending, copying, meeting, durable)

    def _write(
        self, folder: Path, pending: list[Pending], copying: Copying, meeting: Meeting, durable: bool
    ) -> list[Path | FileTuple]:
        large, small = finalise(pending, meeting, lambda: copying.wait_whole(meeting.timeout_s), durable=durable)
        if dist.get_rank() == 0:
            small += self._write_metadata(folder)
        known = [(path.relative_to(folder).as_posix(), size, digest) for path, size, digest in large]
        return [*known, *small]

    def _write_metadata(self, folder: Path) -> list[Path]:
        assert self._files is not None, "rank 0 writes"
        made = self._files.write(folder / "model" / "huggingface")
        self._manager._save_transformer_config(str(folder))
        contents = self._manager._build_checkpoint_manifest(str(folder), 0, saved_any_dist_ckpt=True)
        contents["layout"] = trees.layout(self._manager)
        (folder / _CONTENTS).write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
        return [*made, folder / "transformer_config.json", folder / _CONTENTS]

    def load(self, folder: Path, *, restore_rng: bool = True) -> None:
        """Restore model, optimizer and the place in the schedule, whose settings stay as they are; with `restore_rng`,
        in the layout of the save, the random generators too.

        Any layout of the same model can load an optimizer that was saved as ``fully_reshardable``.

        Raises:
            RunError: a file holds what it may not; nothing that is pickled in one runs.
        """
        with nothing_runs(folder):
            self._load(folder, restore_rng)

    def _load(self, folder: Path, restore_rng: bool) -> None:
        manager = self._manager
        content = dist_checkpointing.load_content_metadata(checkpoint_dir=str(folder / trees.MODEL))
        trees.load_model(manager, folder, content)
        with settings_kept(manager.optimizer):
            schedule = trees.load_optimizer(manager, folder, content)
        if schedule is None:
            raise RunError(f"{folder / trees.OPTIMIZER} has no state of the learning-rate schedule")
        trees.load_schedule(manager, schedule)
        if restore_rng and _ranks(saved_layout(folder)) == _ranks(trees.layout(manager)):
            trees.load_rng_of_rank(manager, folder)


def _ranks(of: Mapping[str, int | str] | None) -> dict[str, int | str]:
    return {name: of[name] for name in ("tp", "pp", "dp", "ep")} if of else {}
