"""One trainer rank: verl's `TrainingWorker` with hooks for versions and checkpoints. The actors of
`trainer.rank` have one each.

Which methods are collective is said at each: all ranks are to be called, in the same order.
"""

from __future__ import annotations

# First of all: what verl imports depends on it.
import trinity_sync.backends.lean_verl  # noqa: F401

# isort: split
import mmap
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from trinity_sync.actors.agent import AgentClient
from trinity_sync.actors.broadcast import Broadcast
from trinity_sync.actors.calls import this_process
from trinity_sync.actors.rank import RankInfo
from trinity_sync.actors.synchronizer import SynchronizerClient
from trinity_sync.backends.meetings import Meetings
from trinity_sync.checkpoint import CheckpointCoordinator
from trinity_sync.checkpoint.lock import writer_of
from trinity_sync.config import build
from trinity_sync.host.logs import story
from trinity_sync.host.memory import peak_memory
from trinity_sync.protocol.staged import part_name
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.sync.base import SyncMode
from trinity_sync.tracking import units
from trinity_sync.trainer.agent_saver import AgentSaver
from trinity_sync.trainer.backend_saver import BackendSaver
from trinity_sync.trainer.batch import grpo_batch, micro_batch_size, sft_batch, share
from trinity_sync.trainer.rendezvous import join_group
from trinity_sync.trainer.saver import Saver
from trinity_sync.trainer.spec import WorkerSpec
from trinity_sync.trainer.stager import WeightStager
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import map_segment
from trinity_sync.weights.staging import pin_segment


class TrinityWorker(TrainingWorker):
    """A rank of the trainer group.

    Args:
        spec: what to build.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        # verl's own call would name gloo twice on a CPU, which torch refuses, and sets no timeout. It leaves a group
        # alone that is there.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        join_group(backend, spec.timeout_s)
        spec.backend.prepare()
        super().__init__(_worker_config(spec))
        self._sync = build("sync", spec.sync, SyncMode)  # type: ignore[type-abstract]
        self._segments: dict[int, mmap.mmap] = {}
        self._saver: Saver
        self._stager: WeightStager

    def initialise(self) -> RankInfo:
        """Build model, optimizer and scheduler. Collective."""
        self.reset()
        self.set_loss_fn(self._spec.algorithm.loss(self._spec.backend.strategy))
        seed = self._spec.seed + self.engine.get_data_parallel_rank()  # ranks that share a layer draw the same
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self._backend: Any = self._spec.backend.view(self.engine, self._spec.wire_dtype)
        shards = self._backend.shards()
        self._part = part_name(self.rank)
        self._layout = PartLayout.build(self._part, shards, self._spec.bucket_bytes)
        story.info("up: %s, holds %s of the weights", self._spec.backend.strategy, units.size(self._layout.nbytes))
        return RankInfo(
            rank=self.rank,
            part=self._part,
            layout=self._layout if shards else None,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            saved={name: saved[:2] for name, saved in self._backend.saved().items()} if self.rank == 0 else None,
        )

    def attach(
        self,
        agent: AgentClient,
        paths: dict[int, str],
        synchronizer: SynchronizerClient,
        make_coordinator: Callable[..., CheckpointCoordinator],
        timeout_s: float,
    ) -> None:
        """Connect to the node's agent, its slots, the synchronizer and the checkpoint monitor.

        Args:
            agent: of this node.
            paths: slot -> this rank's file in it; empty for a rank that holds nothing of its own.
            synchronizer: the run's synchronizer.
            make_coordinator: makes the coordinator through which this rank saves, of `node_id` and `job_id`.
            timeout_s: limit of the waits for a background save, seconds.
        """
        # While this process lives, so does the call: in a free run no other may be under way when it dies.
        self._lifeline = synchronizer.lifeline()
        synchronizer.watch(this_process(f"trainer rank {self.rank}"), [self._lifeline.reference])
        self._segments = {
            slot: map_segment(Path(path), self._layout.nbytes, writable=True) for slot, path in paths.items()
        }
        for segment in self._segments.values():
            pin_segment(segment)
        self._stager = WeightStager(
            self._backend,
            self._layout,
            self._segments,
            agent,
            self._part,
            timeout_s=timeout_s,
        )
        coordinator = make_coordinator(node_id=ray.get_runtime_context().get_node_id(), job_id=f"rank-{self.rank}")
        meetings = Meetings.of_default_group(timeout_s)
        if self._spec.backend.writes_own_files:
            self._saver = BackendSaver(self._backend, coordinator, meetings, self._part, lazy=self._spec.lazy_snapshot)
            return
        self._saver = AgentSaver(
            self._backend,
            agent,
            coordinator,
            meetings,
            self._part,
            writes_metadata=self.rank == 0,
            form=self._spec.checkpoint_format,
            lazy=self._spec.lazy_snapshot,
        )

    # -- training

    def train_step(self, step: int, batch: SampleBatch | PairBatch, advantages: np.ndarray | None) -> dict[str, float]:
        """One training step on this rank's share of the batch. Collective.

        Args:
            step: the trainer's global step.
            batch: the whole batch, the same on every rank.
            advantages: one per sequence (GRPO), None for pairs.
        """
        started = time.perf_counter()
        spec = self._spec
        ranks = self.engine.get_data_parallel_size()
        mine = share(len(batch), self.engine.get_data_parallel_rank(), ranks, spec.mini_batches)
        local = len(mine) // spec.mini_batches
        settings = {
            "micro_batch": micro_batch_size(local, spec.micro_batch_size),
            "global_mini_batch": len(batch) // spec.mini_batches,
        }
        prompts, responses = [batch.prompt_ids(i) for i in mine], [batch.response_ids(i) for i in mine]
        if isinstance(batch, PairBatch):
            data = sft_batch(prompts, responses, **settings)
        else:
            assert advantages is not None, "samples come with advantages"
            old = [batch.log_probs_of(i) for i in mine]
            data = grpo_batch(prompts, responses, old, advantages[mine], temperature=spec.temperature, **settings)
        tu.assign_non_tensor(
            data,
            mini_batch_size=len(batch) // spec.mini_batches,
            epochs=spec.epochs,
            seed=spec.seed + step,
            dataloader_kwargs={"shuffle": False},
        )
        output = self.train_mini_batch(data)
        self._saver.prepare()
        story.info("trained step %d in %s", step, units.seconds(time.perf_counter() - started))
        return _plain(tu.get(output, "metrics")) if output is not None else {}

    # -- versions

    def stage(self, version: Version, slot: int, lazily: bool = False) -> float:
        """Copy this rank's shards into the slot and tell the agent; see `WeightStager.stage`. Collective where the
        engine offloads.

        Returns:
            Seconds in which the trainer was blocked so far.
        """
        blocked = self._stager.stage(version, slot, lazily=lazily)
        how = "began to stage" if lazily else "staged"
        story.info("%s version %s into slot %d: stood still %s", how, version, slot, units.seconds(blocked))
        return blocked

    def send(self, broadcast: Broadcast) -> int:
        """Send this rank's staged part to the explorers of a broadcast; bytes sent."""
        return self._sync.send(broadcast, self._part, self._layout, self._segments[broadcast.slot])

    # -- checkpoints

    def save(self, step: int, folder: str) -> float:
        """Begin to save the training state into `folder`, part ``rank-…`` of the step. Collective. What it fails of
        fails the step at the monitor, and is not raised.

        Returns:
            Seconds in which the trainer was blocked so far.
        """
        blocked = self._saver.save(step, Path(folder))
        story.info("began to save step %d: stood still %s", step, units.seconds(blocked))
        return blocked

    def save_blocked(self, step: int) -> float:
        """Seconds in which the trainer was blocked for the save of `step`, with what the optimizer's step waited."""
        return self._saver.blocked_s(step)

    def load(self, folder: str) -> None:
        """Restore the training state from a full checkpoint's folder. Collective."""
        started = time.perf_counter()
        self._backend.load(Path(folder) / "actor")
        story.info("restored %s in %s", folder, units.seconds(time.perf_counter() - started))

    def begin_at(self, step: int) -> None:
        """Go to the place in the learning-rate schedule after `step`, with the optimizer as it is. Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that no optimizer's step came first
            for _ in range(step):
                self.engine.lr_scheduler_step()

    def writer_of(self, folder: str) -> str | None:
        """See `trinity_sync.checkpoint.lock.writer_of`: the driver is told whether this rank sees the folder."""
        return writer_of(Path(folder))

    def finish_saves(self) -> None:
        """Wait until this rank's saves are in other hands, which hurry; raises what one of them raised."""
        self._saver.finish()

    def memory(self) -> dict[str, int]:
        """Peak resident bytes of this process."""
        return {"peak_rss": peak_memory(), "pid": os.getpid()}


def _worker_config(spec: WorkerSpec) -> TrainingWorkerConfig:
    engine, optimizer = spec.backend.engine_configs(spec.engine, spec.optimizer)
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=spec.model_path,
            use_remove_padding=False,
            trust_remote_code=spec.trust_remote_code,
            enable_gradient_checkpointing=spec.gradient_checkpointing,
            override_config={"attn_implementation": spec.attn_implementation},
        ),
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics as floats: lists (one entry per mini-batch or micro-batch) by their mean, verl's Metric by its
    aggregate.
    """
    return {name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float:
    if isinstance(value, list | tuple):
        return float(np.mean([_number(item) for item in value]))
    if hasattr(value, "aggregate"):
        return _number(value.aggregate())
    return float(value)
