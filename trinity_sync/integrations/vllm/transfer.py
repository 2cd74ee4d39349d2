"""The worker's half of a load into vLLM, made by vLLM's weight-transfer registry in each worker process.

A version arrives (`sync.arrivals`) on a request over the `worker_link`, while the engine generates. vLLM's own session
(start, update, finish) then puts it into the model layer by layer, and a last request drops it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.package_source import loaded_modules, source_checksums
from trinity_sync.integrations.vllm.worker_link import WorkerAddress, serve
from trinity_sync.sync.arrivals import (
    Arrival,
    ArrivalReport,
    Arrivals,
    MappedArrivals,
    ReceivedArrivals,
    Shapes,
    Share,
    engine_memory,
)
from trinity_sync.sync.base import ExplorerSide, LayoutCache, PartMaps, SyncMode, Transport
from trinity_sync.sync.pieces import BroughtParts, DirectFetcher, PieceSource, WantedPart
from trinity_sync.weights.packing import TOGETHER
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import from_torch, rounds, to_torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


_CHECKED_BYTES = 1 << 20
"""Bytes of each tensor that are read back, at most."""

_SOURCES = source_checksums(loaded_modules("trinity_sync"))
"""Read now: the files may change while this process runs."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The fields of the explorer's `WorkerAddress`."""

    path: str
    key: str
    host: str | None = None
    port: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A request to put a version into the model."""

    version: str | None  # that has arrived, as text; None: the session is given up
    giver: str | None = None  # key of the address of the explorer that sent it


class TrinityTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Puts versions into a worker's model. Arguments as of vLLM's `WeightTransferEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._arrivals: Arrivals | None = None
        self._giver: str | None = None
        self._brought: dict[str, BroughtParts] = {}  # by giver; for workers on another machine than it
        self._filled = False  # a version is in the model, and the session has to be finished

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to an explorer, and answer its requests in a thread. It replaces the explorer before, whose versions
        are never loaded for it. An address at which no process answers changes nothing.
        """
        giver, before = init_info.key, (self._giver, self._arrivals)
        address = WorkerAddress(init_info.path, init_info.key, init_info.host, init_info.port)
        self._giver, self._arrivals = giver, None
        try:
            rank, ended = self.parallel_config.rank, partial(self._given_up, giver)
            serve(address, rank, _SOURCES, self, self._use_device, ended)
        except BaseException:
            self._giver, self._arrivals = before
            raise

    def start_weight_update(self) -> None:
        """Begin a session. Any program can request one, so the model does not change before a version is loaded. An
        unfinished session is undone.
        """
        self._give_back()

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """As `receive_weights`. After an error, layers that wait for weights get their memory back: otherwise the
        engine would die.
        """
        try:
            super().update_weights(dict(update_info))
        except BaseException:
            self._give_back()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put the version that has arrived into the model; RunError: it is another one, or from another explorer."""
        if update_info.version is None:
            raise RunError("the update was given up")
        self._check_giver(update_info.giver)
        self._arrived().check(update_info.version)
        begin(self.model)
        self._load(update_info.version)
        self._filled = True

    def finish_weight_update(self) -> None:
        """End the session."""
        if not self._filled:
            raise RunError("no version was put into the model in this session")
        self._filled = False
        finish(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: the end of the process frees everything."""

    def _give_back(self) -> None:
        self._filled = False
        give_back(self.model)

    def _use_device(self) -> None:
        """Have the calling thread use the worker's device, which each thread sets for itself."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    # -- requests over the link; `WorkerClient` is the other end

    def expect(
        self,
        giver: str,
        names: Sequence[str],
        node: str,
        tensors: Shapes,
        layouts: LayoutCache,
        maps: PartMaps | None,
        sync: Mapping[str, object],
        verify: str,
        timeout_s: float,
    ) -> None:
        """Prepare for versions of these tensors. `names`: of all workers. `maps`: with the same `layouts`; None: the
        workers receive, by the mode of `sync`.
        """
        self._check_giver(giver)
        self._check_dtypes(tensors)
        rank, workers = self.parallel_config.rank, self.parallel_config.world_size
        if maps is not None:
            self._arrivals = MappedArrivals(tensors, layouts, maps, verify, Share(rank, workers))
            return
        side = ExplorerSide(name=names[rank], node=node, agents={}, layouts=layouts, timeout_s=timeout_s)
        self._arrivals = ReceivedArrivals(tensors, layouts, _transport(sync, side), verify)

    def _check_dtypes(self, tensors: Shapes) -> None:
        """Check that the model holds tensors in fp32 that arrive in fp32; vLLM would round them silently."""
        held = {name: from_torch(one.dtype) for name, one in self.model.named_parameters()}
        ends = {_end(name): dtype for name, dtype in held.items()}
        own = from_torch(self.model_config.dtype)
        rounded = [
            name for name, (dtype, _) in tensors.items() if rounds(dtype, held.get(name) or ends.get(_end(name)) or own)
        ]
        if rounded:
            raise ConfigError(
                f"vLLM would round {listed(sorted(rounded))}: they are sent in fp32, and the worker holds them in "
                f"{own}; set explorer.dtype=fp32, or leave them out of sync.keep_fp32"
            )

    def fetch(
        self,
        giver: str,
        source: PieceSource,
        wanted: Sequence[WantedPart],
        together: int,
        stall_s: float,
    ) -> Sequence[str]:
        """Bring parts to this machine, by worker 0 for all; return their files, and one of `together` bytes. `stall_s`:
        limit for the explorer to send something, seconds.
        """
        self._check_giver(giver)
        if self.parallel_config.rank:
            return ()
        if giver not in self._brought:
            fetcher = DirectFetcher(source, bytes.fromhex(giver), stall_s)
            self._brought[giver] = BroughtParts([fetcher], partial(engine_memory, "vllm"))
        brought = self._brought[giver]
        coming = [brought.bring(one) for one in wanted]
        return [*(one.result() for one in coming), str(brought.reserve(TOGETHER, together).path(0, TOGETHER))]

    def take(self, giver: str, arrival: Arrival) -> ArrivalReport:
        """Have a version arrive."""
        self._check_giver(giver)
        return self._arrived().take(arrival)

    def show(self, giver: str, version: str) -> list[str]:
        """Return the tensors that differ from those that arrived, of those that the model holds as they came."""
        self._check_giver(giver)
        arrivals = self._arrived()
        self._check_memory(arrivals)
        held = dict(self.model.named_parameters())
        differing = []
        for name, (dtype, shape) in arrivals.shapes.items():
            here = held.get(name)
            if here is None or tuple(here.shape) != shape or here.dtype != to_torch(dtype):
                continue  # another name, a share, or the form that this processor computes with
            if here.dim() > 1 and self.parallel_config.world_size > 1:
                continue  # a share of what was padded can have the shape of the whole
            most = max(1, _CHECKED_BYTES * len(here) // max(1, here.nbytes)) if here.dim() > 1 else None
            there = here[:most] if most else here
            if not torch.equal(_bytes(there.cpu()), _bytes(arrivals.read(name, most))):  # of NaN, too
                differing.append(name)
        return differing

    def _check_memory(self, arrivals: Arrivals) -> None:
        """Check that the model does not use the version's memory, to which later versions are written."""
        lent = {one.untyped_storage().data_ptr() for one in arrivals.memory() if one.nbytes}
        held = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        kept = [name for name, one in held if one.untyped_storage().data_ptr() in lent]
        if kept:
            raise RunError(f"vLLM did not copy {listed(sorted(kept))}, but uses them where the version lies")

    def let_go(self, giver: str) -> None:
        """Drop the version's bytes."""
        self._check_giver(giver)
        if self._arrivals is not None:
            self._arrivals.let_go()

    def _given_up(self, giver: str) -> None:
        """Free the versions of an explorer that is gone."""
        if brought := self._brought.pop(giver, None):
            brought.close()
        if self._giver == giver:
            self._arrivals = None

    def _check_giver(self, giver: str | None) -> None:
        if giver != self._giver:
            raise RunError("another explorer gives this engine its versions now")

    def _arrived(self) -> Arrivals:
        if self._arrivals is None:
            raise RunError("no explorer has described its versions yet")
        return self._arrivals

    def _load(self, version: str) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        tensors = self._arrived().tensors(version)
        with disable_mtp_completeness_check():
            self.model.load_weights(tensors)
        if waiting := unfilled(self.model):
            raise RunError(f"the version does not fill {listed(waiting)} of {type(self.model).__name__}")


def _transport(sync: Mapping[str, object], side: ExplorerSide) -> Transport:
    try:
        from trinity_sync.config import build
    except ModuleNotFoundError as error:  # the receiver alone is installed
        told = f"{sync.get('_target_')} has workers of vLLM receive, which needs all of trinity-sync in its environment"
        raise RunError(f"{told}: {error}") from error
    return build("sync", sync, SyncMode).transport(side)  # type: ignore[type-abstract]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _end(name: str) -> str:
    """Return the last two words of a parameter's name, in which engines agree."""
    return ".".join(name.split(".")[-2:])


# ---- vLLM's layerwise reload: the end of a session that was broken off, and checks that vLLM does not make


def begin(model: torch.nn.Module) -> None:
    """Begin a session: layers wait for weights.

    vLLM converts experts to the processor's form only where it makes their kernel. With an existing kernel it would
    silently compute with weights in the wrong form, so on a CPU the kernel is made again.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None
    initialize_layerwise_reload(model)


def give_back(model: torch.nn.Module) -> None:
    """Give each layer that waits for weights its tensors back, and drop the weights that came for it.

    vLLM leaves such layers without memory, and a later session would use the weights of this one. The tensors then hold
    several versions, so the engine must not generate before a whole version is loaded.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def unfilled(model: torch.nn.Module) -> list[str]:
    """Return the parameters, within a session, of layers that still wait for weights. vLLM would leave them as they
    were, or uninitialized.
    """
    tied = set(_tied(model))
    waiting = []
    for name, layer in model.named_modules():
        if not _waits(layer) or layer in tied:
            continue
        waiting += [f"{name}.{one}" if name else one for one, _ in layer.named_parameters(recurse=False)]
    return sorted(waiting)


def finish(model: torch.nn.Module, config: ModelConfig) -> None:
    """End a session: layers that waited for all of their weights are filled, and an output layer that is tied to the
    embedding uses the embedding's weights.
    """
    tied = _tied(model)
    for layer in tied:  # so that vLLM does not warn at each version that their weights are missing
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()
    finalize_layerwise_reload(model, config)
    for layer, method in tied.items():  # a processor's own copy of the weight, in the form that it computes with
        method.process_weights_after_loading(layer)


def _tied(model: torch.nn.Module) -> dict[torch.nn.Module, UnquantizedEmbeddingMethod]:
    """Return the vocabulary layers whose weight is that of another, filled layer, with the method that converts the
    weight to the processor's form.
    """
    filled = set()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and _waits(layer):
            continue
        held = (
            info.kernel_tensors[0]
            if info.can_load() and info.kernel_tensors
            else dict(layer.named_parameters(recurse=False))
        )
        filled |= {id(one) for one in held.values()}
    found = {}
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not _waits(layer) or info.load_numel or not info.kernel_tensors or not info.kernel_tensors[0]:
            continue
        method = getattr(layer, "quant_method", None)
        shared = all(id(one) in filled for one in info.kernel_tensors[0].values())
        if shared and isinstance(method, UnquantizedEmbeddingMethod):
            found[layer] = method
    return found


def _waits(layer: torch.nn.Module) -> bool:
    # A layer with all of its weights has left the session; one of attention has none to wait for.
    info = get_layerwise_info(layer)
    return info.can_load() and not is_deferred_attention_layer(layer) and not _holds_padding(layer, info.load_numel)


def _holds_padding(layer: torch.nn.Module, loaded: int) -> bool:
    """Return whether a layer is (a share of) a vocabulary that may lack padding alone."""
    return isinstance(layer, VocabParallelEmbedding) and (loaded > 0 or layer.shard_indices.num_org_elements == 0)
