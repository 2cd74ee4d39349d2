"""What a rank of a Megatron engine is to write of a save, copied, and the functions that write it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trinity_sync.backends.meetings import Meeting, Meetings
from trinity_sync.backends.megatron import trees
from trinity_sync.backends.megatron.writer import finalise
from trinity_sync.checkpoint.coordinator import SaveFn
from trinity_sync.integrations.verl import contents
from trinity_sync.integrations.verl.model_files import model_files
from trinity_sync.integrations.verl.ranks import together, use_on_first_rank
from trinity_sync.integrations.verl.weights import Pairs
from trinity_sync.models.files import ModelFiles
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.copying import Copying

if TYPE_CHECKING:
    from mbridge.core.llm_bridge import LLMBridge
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager as VerlCheckpointManager

HUGGING_FACE = "model/huggingface"

_TREES = {contents.STATE, contents.MODEL}
_CONFIG, _MANIFEST = "transformer_config.json", "ckpt_contents.json"


class Copies:
    """Copies of one save after another, in memory that is kept.

    Args:
        manager: verl's checkpoint manager, with the model and what trains it.
        timeout_s: limit of the ranks' wait for each other where they write together, and for a copy, seconds.
        saved_of: tells the contents that are saved of a step already.
        lazily: see `interfaces.Copies`. Not of a model with buffers.

    Attributes:
        meeting: in which the ranks write what was copied last; None before.
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
        self._copying: Copying | None = None
        self._trees = trees.Trees(manager)
        self._meetings = Meetings.of_default_group(timeout_s)
        self.meeting: Meeting | None = None
        self._files = model_files(manager.hf_config, manager.processing_class) if manager.rank == 0 else ModelFiles({})
        self._small: dict[str, bytes] | None = None
        self._saved_of = saved_of

    def trees_left(self, step: int) -> list[str]:
        """The trees that a full save of the step consists of, without the model's where that is saved already."""
        manager = self._manager
        asked = (
            (trees.MODEL, manager.should_save_dist_ckpt_model and contents.MODEL not in self._saved_of(step)),
            (trees.OPTIMIZER, manager.should_save_optimizer),
            (trees.EXTRA, manager.should_save_extra),
        )
        return [name for name, wanted in asked if wanted]

    def take(self, step: int, todo: list[str], folder: Path, staging: Path, *, durable: bool) -> dict[str, SaveFn]:
        """See `interfaces.Copies`. A rank that fails to describe its state leaves the others waiting in megatron-core's
        own collective calls, up to the limit of the process group.
        """
        found: dict[str, SaveFn] = {}
        if trees.gathers_late(self._manager.model):
            trees.gather_parameters(self._manager.model)
        for name, names in ((contents.STATE, self.trees_left(step)), (contents.MODEL, [trees.MODEL])):
            if name in todo:
                found[name] = self._take_trees(step, names, folder, staging, durable)
        exports = contents.EXPORT in todo
        described = next((name for name in (contents.METADATA, contents.DESCRIPTION) if name in todo), None)
        if described or exports:
            together(f"describe the contents of step {step}", self._read_small)
        if exports:
            export = self._take_export(step, folder)
            if self._manager.rank == 0:
                found[contents.EXPORT] = export
        if described and self._manager.rank == 0:
            there = self._saved_of(step) | set(todo)
            found[described] = self._take_small(step, folder, described, there)
        return found

    def give_up(self, name: str, error: BaseException) -> None:
        """See `interfaces.Copies`."""
        if name in _TREES and self.meeting is not None:
            self.meeting.give_up(error)

    def wait_until_copied(self) -> None:
        """See `interfaces.Copies`."""
        if self._copying is not None:
            self._copying.wait_until_copied(self._meetings.timeout_s)

    # ---- the trees of megatron-core

    def _take_trees(self, step: int, names: list[str], folder: Path, staging: Path, durable: bool) -> SaveFn:
        pending = self._trees.plan(folder, names)

        limit = self._meetings.timeout_s
        lazily = self._lazily and not trees.has_buffers(self._manager.model)

        def copy() -> None:
            self._copying = self._trees.copy(pending, in_background=lazily)
            if not lazily:
                self._copying.wait_whole(limit)

        together(f"copy the state of step {step}", copy)
        copying = self._copying
        assert copying is not None
        meeting = self.meeting = self._meetings.begin(f"step {step}")

        def write() -> list[Path | FileTuple]:
            large, small = finalise(pending, meeting, lambda: copying.wait_whole(limit), durable=durable)
            return [*((path.relative_to(staging).as_posix(), size, digest) for path, size, digest in large), *small]

        return write

    # ---- the model in Hugging Face format

    def _take_export(self, step: int, folder: Path) -> SaveFn:
        """What mbridge writes is gathered to rank 0 here, and written in the background. With options of its own in
        ``mbridge_config``, or by Megatron-Bridge, it is written here, by the bridge itself.
        """
        manager, place = self._manager, folder / HUGGING_FACE
        what = f"export the model of step {step}"
        dtype = str(next(manager.model[0].parameters()).dtype).removeprefix("torch.")
        # Those that are saved already stay as they are.
        described = {contents.METADATA, contents.DESCRIPTION} & self._saved_of(step)
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
            files.write(place)  # over what the bridge has written of these
            return _files(place)

        return write_beside

    # ---- the small files of rank 0

    def _read_small(self) -> None:
        """Have the model's files and Megatron's config, relative path -> bytes. Made once: none changes in a run."""
        manager = self._manager
        if manager.rank != 0 or self._small is not None:
            return
        with tempfile.TemporaryDirectory() as name:
            manager._save_transformer_config(name)
            own = {path.relative_to(name).as_posix(): path.read_bytes() for path in _files(Path(name))}
        self._small = own | {f"{HUGGING_FACE}/{path}": data for path, data in self._files.contents.items()}

    def _take_small(self, step: int, folder: Path, described: str, there: set[str]) -> SaveFn:
        left_out: tuple[str, ...] = () if self._manager.should_save_extra else (_CONFIG,)
        if contents.EXPORT in there:
            left_out += (HUGGING_FACE,)
        own = {name: data for name, data in (self._small or {}).items() if not name.startswith(left_out)}
        manifest = {_MANIFEST: self._manifest(step, bool(_TREES & there))}
        if described == contents.METADATA:
            return lambda: ModelFiles(own | manifest).write(folder)

        def write() -> list[Path]:
            ModelFiles(manifest).write(folder)  # not reported: a full save of the step writes it anew
            return ModelFiles(own).write(folder)

        return write

    def _manifest(self, step: int, has_trees: bool) -> bytes:
        with tempfile.TemporaryDirectory() as name:  # verl makes folders when it names them
            found = self._manager._build_checkpoint_manifest(name, step, has_trees)
        found["layout"] = trees.layout(self._manager)
        return (json.dumps(found, indent=2, sort_keys=True) + "\n").encode()


def _copied(tensors: Pairs) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def _write_weights(bridge: LLMBridge, state: dict[str, torch.Tensor], place: Path) -> None:
    """Write what `bridge.save_weights` would, of weights that are gathered already."""
    bridge.safetensor_io.save_hf_weight(iter(state.items()), str(place), bridge._get_hf_shared_weight_keys())
    if bridge.safetensor_io.origin_index:
        bridge.safetensor_io.save_index(str(place))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
