"""Versions for a program's own vLLM engine: it has an `AsyncLLM`, and the synchronizer of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trinity_sync.errors import RunError, WaitLimit
from trinity_sync.integrations.vllm.control import AsyncControl, OnUpdate
from trinity_sync.integrations.vllm.target import WorkerTarget
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.arrivals import SharedSegment
from trinity_sync.sync.base import ExplorerSide, LayoutCache
from trinity_sync.sync.memory import MemoryMode
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import whole
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import from_torch, state_digest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from trinity_sync.sync import Synchronizer

_PART, _HERE = "state", "here"
_BUCKET_BYTES = 4 << 20


class EngineWeights:
    """The weights of an `AsyncLLM` that was started with ``weight_transfer_config={"backend": "trinity"}``.

    Made and called outside the thread of the engine's event loop, such as by `asyncio.to_thread`, since each call
    blocks.

    Args:
        llm: the engine; its workers are on this node.
        loop: the engine's event loop.
        name: the engine's name in errors.
        on_update: handling of running requests when a version is loaded: ``wait`` (they finish first), ``keep`` or
            ``abort``.
        timeout_s: limit of each wait, seconds, besides the time for its bytes.
        min_rate_mbps: slowest rate at which these may move, Mbit/s; None: they get no time.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str = "vllm",
        on_update: OnUpdate = "wait",
        timeout_s: float = 600.0,
        min_rate_mbps: float | None = 100.0,
    ) -> None:
        timeout_s = WaitLimit(timeout_s, min_rate_mbps, ("timeout_s", "min_rate_mbps"))
        self._control = AsyncControl(llm, loop, name, timeout_s)
        self._workers = llm.vllm_config.parallel_config.world_size
        self._name = name
        self._on_update = on_update
        self._timeout_s = timeout_s
        self._layouts = LayoutCache({}, timeout_s)
        self._target: WorkerTarget | None = None
        self._segment = SharedSegment()

    def take_newest(self, synchronizer: Synchronizer) -> int:
        """Load the newest version of a run into the engine, from memory or from its checkpoint.

        Returns:
            The version's step, the engine's weight version from now on.

        Raises:
            RunError: there is no version, or it does not fit the engine. If the engine's weights have changed, it stays
                paused until another version is loaded completely.
        """
        tensors, step = synchronizer.get_model_state_dict()
        if not isinstance(tensors, dict):
            folder = tensors or synchronizer.get_latest_model_path()
            if folder is None:
                raise RunError(f"{self._name} cannot take a version: none was published yet, or none can be had here")
            tensors, step = _read(Path(folder), step)  # may be a newer version
        self.take(tensors, step)
        return step

    def take(self, tensors: Mapping[str, torch.Tensor], step: int) -> str:
        """Load weights into the engine; errors as of `take_newest`.

        Args:
            tensors: all tensors of the model on the CPU, under the names of ``save_pretrained``.
            step: the version's step.

        Returns:
            The version digest (hex) of these tensors.
        """
        shards = [whole(name, from_torch(tensor.dtype), tensor.shape) for name, tensor in tensors.items()]
        layout = PartLayout.build(_PART, shards, _BUCKET_BYTES)
        self._layouts.learn(layout)
        arena = self._segment.laid_out(layout)
        stage(layout, tensors, arena.map(0, _PART))
        path = str(arena.path(0, _PART))
        info = PartInfo(part=_PART, node=_HERE, path=path, nbytes=layout.nbytes, layout=layout.digest, buckets=None)
        digest = state_digest(tensors, None)
        lease = Lease(
            id=0,
            reader=self._name,
            version=Version(0, step),
            slot=0,
            expires=float("inf"),
            parts={_PART: info},
            digest=digest,
            location=None,
        )
        if self._target is None:
            self._target = self._make_target({shard.name: (shard.dtype, shard.shape) for shard in shards})
        self._target.check(lease)
        self._target.take(lease, None, lambda: None)
        return digest

    @property
    def paused_s(self) -> float:
        """Length of the engine's last pause for a version, seconds."""
        return self._target.paused_s if self._target is not None else 0.0

    def close(self) -> None:
        """Disconnect the workers and free the memory. The engine keeps its weights."""
        if self._target is not None:
            self._target.close()
        self._segment.close()

    def _make_target(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> WorkerTarget:
        side = ExplorerSide(name=self._name, node=_HERE, agents={}, layouts=self._layouts, timeout_s=self._timeout_s)
        return WorkerTarget(
            self._control,
            workers=self._workers,
            tensors=shapes,
            mode=MemoryMode(),
            side=side,
            verify="full",
            on_update=self._on_update,
            start_timeout_s=self._timeout_s,
        )


def _read(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights in a folder, and their step: that of the manifest, else `step`."""
    from trinity_sync.checkpoint.reading import open_weights

    weights = open_weights(folder)
    found = step if weights.manifest is None else weights.manifest.step
    return {name: weights.read(name) for name in weights}, found
