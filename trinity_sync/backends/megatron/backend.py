"""The Megatron engine as `trinity_sync.backends.base.SelfWritingBackend`, one per rank, and its full checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu, unwrap_model

from trinity_sync.backends.base import Deadline, MegatronEngineProtocol
from trinity_sync.backends.fsdp_state import settings_kept
from trinity_sync.backends.meetings import RankMeeting
from trinity_sync.backends.megatron import writer
from trinity_sync.backends.megatron.bridges import Geometry, LocalShard, dtypes_of, pieces
from trinity_sync.backends.megatron.cpu import CudaMeansCpu
from trinity_sync.backends.megatron.megatron_families import saved_layout
from trinity_sync.backends.megatron.writer import finalise, gather_parameters, gathers_late
from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.backends.saved_tensors import saved_by
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.files import ModelFiles, local_folder
from trinity_sync.protocol.parts import FileTuple
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import Shard
from trinity_sync.weights.staging import TensorCopy
from trinity_sync.weights.tensors import from_torch
from trinity_sync.weights.wire import WireFormat

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer


T = TypeVar("T")

_Place: TypeAlias = "tuple[_ParamAndGradBuffer, int, int]"
"""A buffer, and the range of elements in it."""

_TIED = "output_layer.weight"


class MegatronBackend:
    """A rank's view of verl's initialised `MegatronEngineWithLMHead`.

    Versions are read from the model's own parameters (bf16). Every data-parallel rank has them all, and each
    contributes some of them. `restore_rng`: a load in the layout of the save restores the random generators too.
    """

    def __init__(
        self,
        engine: MegatronEngineProtocol,
        wire_dtype: str,
        keep_fp32: Sequence[str] | None = None,
        *,
        restore_rng: bool = True,
    ) -> None:
        self._engine = engine
        self._saved = saved_by(engine.model_config, wire_dtype, keep_fp32)
        self._wire = WireFormat.seen(wire_dtype, {name: saved.dtype for name, saved in self._saved.items()})
        self._places = _places(engine.module)
        self._pieces = self._find_pieces()
        self._checkpoints = Checkpoints(engine)
        self._restore_rng = restore_rng
        self._before_change: list[Callable[[], None]] = []
        engine.optimizer.step = partial(self._step, engine.optimizer.step)

    # -- versions

    @property
    def deadline(self) -> Deadline:
        """The optimizer writes parameters and its states in place; the next offload overwrites its host copies."""
        engine = self._engine
        return "offload" if engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled else "optimizer_step"

    def shards(self) -> Sequence[Shard]:
        return [piece.shard for _, piece in self._pieces]

    def saved(self) -> Mapping[str, SavedTensor]:
        return self._saved

    def sources(self) -> Mapping[str, torch.Tensor]:
        """Collective with `overlap_param_gather`: parameters are gathered here, instead of by the next forward pass."""
        self._gather_parameters()
        return {piece.shard.name: piece.view(self._live(parameter)) for parameter, piece in self._pieces}

    def before_change(self, callback: Callable[[], None]) -> None:
        self._before_change.append(callback)

    # -- full checkpoints

    def begin_save(
        self, folder: Path, meeting: RankMeeting, *, lazily: bool = False, durable: bool = False
    ) -> tuple[TensorCopy, Callable[[], list[Path | FileTuple]]]:
        self._gather_parameters()
        lazily = lazily and self.deadline == "optimizer_step"
        with self._on_device():
            return self._checkpoints.begin(folder, meeting, in_background=lazily, durable=durable)

    def load(self, folder: Path) -> None:
        with self._on_device():
            self._checkpoints.load(folder, restore_rng=self._restore_rng)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Have the model on its device during the block, for calls into megatron-core, and back in its place
        afterwards.
        """
        offloaded = any(buffer.param_data.untyped_storage().size() == 0 for buffer, _, _ in self._places.values())
        with nullcontext() if torch.cuda.is_available() else CudaMeansCpu():
            if offloaded:
                load_megatron_model_to_gpu(self._engine.module, load_grad=False)
            try:
                yield
            finally:
                if offloaded:
                    offload_megatron_model_to_cpu(self._engine.module)

    def _gather_parameters(self) -> None:
        if gathers_late(self._engine.module):
            with self._on_device():
                gather_parameters(self._engine.module)

    def _step(self, step: Callable[[], T]) -> T:
        for callback in self._before_change:
            callback()
        return step()

    def _live(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the parameter's current values; while the model is offloaded, they are in the host copy."""
        buffer, start, stop = self._places[parameter]
        if buffer.param_data.untyped_storage().size() == 0:
            host: torch.Tensor = buffer.param_data.cpu_data
            return host[start:stop].view(parameter.shape)
        return parameter.detach()

    def _find_pieces(self) -> list[tuple[torch.nn.Parameter, LocalShard]]:
        config, bridge = self._engine.model_config.hf_config, self._engine.bridge
        at = Geometry(
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        )
        shared = _Turns(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
        experts = _Turns(
            parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
        )
        found: list[tuple[torch.nn.Parameter, LocalShard]] = []
        for chunk in self._engine.module:
            model = unwrap_model(chunk)
            names = bridge._weight_name_mapping_mcore_local_to_global(model)
            for local, parameter in model.named_parameters():
                if local == _TIED and config.tie_word_embeddings:
                    continue  # the copy of the embedding on the last stage
                name = names[local]
                try:
                    hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
                    dtypes = dtypes_of(hf_names, from_torch(parameter.dtype), self._wire)
                    local_shards = pieces(name, hf_names, parameter.shape, dtypes, at)
                except (NotImplementedError, LookupError) as error:  # mbridge raises either, depending on the name
                    raise ConfigError(f"backend=megatron cannot publish {name} of this model: {error}") from error
                replicas = shared if getattr(parameter, "allreduce", True) else experts
                if replicas.take(parameter.numel()):
                    found += [(parameter, piece) for piece in local_shards]
        return found


class _Turns:
    """Shares parameters out evenly among replicas: each goes to the one with the fewest elements so far."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._taken = [0] * ranks

    def take(self, numel: int) -> bool:
        """Return whether the next parameter is this replica's. All replicas call it in the same order."""
        whose = self._taken.index(min(self._taken))
        self._taken[whose] += numel
        return whose == self._rank


def _places(chunks: Sequence[DistributedDataParallel]) -> dict[torch.nn.Parameter, _Place]:
    return {
        parameter: (buffer, start, stop)
        for chunk in chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for parameter, (start, stop, _) in buffer.param_index_map.items()
    }


class Checkpoints:
    """Saves and loads the training state of an engine in verl's folders (`model/`, `optimizer/`, `extra/`,
    `ckpt_contents.json`). All methods are collective.
    """

    def __init__(self, engine: MegatronEngineProtocol) -> None:
        self._engine = engine
        self._manager = engine.checkpoint_mananager  # verl spells it so
        self._manager.use_dist_checkpointing = True
        self._trees = writer.Trees(self._manager)
        # read before training, so that later changes of the folder do not matter
        self._files = ModelFiles.read(local_folder(engine.model_config.local_path)) if dist.get_rank() == 0 else None

    def begin(
        self, folder: Path, meeting: RankMeeting, *, in_background: bool, durable: bool
    ) -> tuple[TensorCopy, Callable[[], list[Path | FileTuple]]]:
        """Copy the state between two steps, or begin to; return the copy and a function that writes it.

        The function is called on a background thread of every rank and returns this rank's files. It must be done
        before the next `begin`, which reuses the memory.

        `meeting`: the meeting of the save's ranks.
        """
        pending = self._trees.plan(folder, writer.ALL)
        copying = self._trees.copy(pending, in_background=in_background)

        def write() -> list[Path | FileTuple]:
            written = finalise(pending, copying, meeting, folder, durable=durable)
            return [*written, *self._write_small(folder)]

        return copying, write

    def _write_small(self, folder: Path) -> list[Path]:
        if self._files is None:
            return []
        small = writer.small_files(self._manager, self._files)
        return ModelFiles(small | writer.contents_file(self._manager, 0, has_trees=True)).write(folder)

    def load(self, folder: Path, *, restore_rng: bool = True) -> None:
        """Restore model, optimizer and the place in the schedule, except their settings, and the random generators if
        `restore_rng` and the layout is that of the save.

        Any layout of the same model can load an optimizer that was saved as ``fully_reshardable``.
        """
        with nothing_runs(folder):
            self._load(folder, restore_rng)

    def _load(self, folder: Path, restore_rng: bool) -> None:
        manager = self._manager
        content = dist_checkpointing.load_content_metadata(checkpoint_dir=str(folder / writer.MODEL))
        writer.load_model(manager, folder, content)
        with settings_kept(manager.optimizer):
            schedule = writer.load_optimizer(manager, folder, content)
        if schedule is None:
            raise RunError(f"{folder / writer.OPTIMIZER} has no state of the learning-rate schedule")
        writer.load_schedule(manager, schedule)
        if restore_rng and _ranks(saved_layout(folder)) == _ranks(writer.layout(manager)):
            writer.load_rng_of_rank(manager, folder)


def _ranks(of: Mapping[str, int | str] | None) -> dict[str, int | str]:
    return {name: of[name] for name in ("tp", "pp", "dp", "ep")} if of else {}
