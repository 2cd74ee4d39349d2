"""One trainer rank: verl's `TrainingWorker` with hooks for versions and checkpoints. The actors of
`trainer.rank` have one each.

Which methods are collective is said at each: all ranks are to be called, in the same order.
"""

from __future__ import annotations

# First of all: what verl imports depends on it.
import trinity_sync.backends.lean_verl  # noqa: F401

# isort: split
import random
import time
import warnings
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict
from transformers import AutoConfig
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from trinity_sync.actors.rank import Divergences, LossSum, RankInfo, Recomputed, Untrained
from trinity_sync.backends import log_probs, packed_attention
from trinity_sync.backends.engines import Engine
from trinity_sync.backends.lora import adapter_targets
from trinity_sync.backends.packing import ATTENTION
from trinity_sync.backends.saved import check_class, left_out_by
from trinity_sync.checkpoint.export_checks import digest_left_out
from trinity_sync.checkpoint.reading.hugging_face import open_hugging_face
from trinity_sync.config.training_schema import InRewardConfig
from trinity_sync.host.logs import story
from trinity_sync.models.attention import check_attention
from trinity_sync.models.deterministic import use_deterministic_kernels
from trinity_sync.models.hub import local_folder
from trinity_sync.models.indexed_file import follow_indexes
from trinity_sync.models.unfilled import unfilled_model
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.tracking import units
from trinity_sync.trainer.base_model import check_held
from trinity_sync.trainer.batch import (
    Batching,
    check_fits,
    grpo_batch,
    micro_batch_size,
    sft_batch,
    share,
    with_advantages,
)
from trinity_sync.trainer.divergence import adapted, divergences
from trinity_sync.trainer.log_probs import recomputed
from trinity_sync.trainer.measurements import loss_sum, training_log_probs
from trinity_sync.trainer.member import Member
from trinity_sync.trainer.reference import BaseOfAdapter, ReferenceModel, reference_digest, reference_spec
from trinity_sync.trainer.rendezvous import join_group
from trinity_sync.trainer.spec import WorkerSpec
from trinity_sync.trainer.step_metrics import step_metrics


class TrinityWorker(Member, TrainingWorker):
    """A rank of the trainer group.

    Args:
        spec: what to build.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._compared: tuple[int, TensorDict] | None = None
        if spec.deterministic:
            use_deterministic_kernels()
        # verl's own call would name gloo twice on a CPU, which torch refuses, and sets no timeout. It leaves a group
        # alone that is there.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        join_group(backend, spec.timeout_s)
        spec.backend.prepare()
        log_probs.install()
        follow_indexes()
        super().__init__(worker_config(spec))

    def initialise(self) -> RankInfo:
        """Build model, optimizer and scheduler. Collective.

        Raises:
            ConfigError: transformers does not have `model.attn_implementation` for this model; or an adapter is trained
                on another base than the model's folder has.
        """
        check_attention(self.engine.model_config.hf_config.to_dict(), self._spec.attn_implementation)
        check_class(self.engine.model_config)
        folder = local_folder(self._spec.model_path)
        left_out = left_out_by(self.engine.model_config, folder)  # on each rank, so that all of them refuse
        torch.manual_seed(self._spec.seed)  # of a new adapter, the same on all ranks
        self.reset()
        self._reference = self._make_reference()
        if self._spec.temperature != 1 or self._spec.algorithm.needs_entropy:
            for engine in self._engines():
                self._spec.backend.divide_in_fp32(engine)
        self.set_loss_fn(self._spec.algorithm.loss(self._spec.backend.strategy))
        seed = self._spec.seed + self.engine.get_data_parallel_rank()  # ranks that share a layer draw the same
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        merged = self._spec.what == "merged"
        view = self._spec.backend.view(self.engine, self._spec.wire_dtype, self._spec.keep_fp32, merged=merged)
        told, info = self.rank == 0, self.hold(self._spec, view, self.rank)
        if self._spec.lora:
            base = check_held(folder, view.base(), self._spec.wire_dtype, told=told)
            info = replace(info, base=base, adapter=view.adapter_config() if told else None)
        if told and self._spec.reference is not None:
            info = replace(info, reference=reference_digest(self._spec.reference))
        if told and (names := left_out.drafts + left_out.tower):
            digest = digest_left_out(open_hugging_face(folder), names)
            info = replace(info, left_out=Untrained(str(folder), names, digest, left_out.tower))
        return info

    def _make_reference(self) -> ReferenceModel | BaseOfAdapter | None:
        """What the policy is compared with; None: nothing. Collective."""
        spec = self._spec
        if spec.reference is not None:
            config = worker_config(reference_spec(spec, spec.reference))
            return ReferenceModel(config, spec.reference, self.engine.model_config.hf_config.vocab_size)
        return BaseOfAdapter(self.engine) if spec.algorithm.needs_reference else None

    def _engines(self) -> list[Engine]:
        return [self.engine, *([self._reference.engine] if isinstance(self._reference, ReferenceModel) else [])]

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
        data = self._data_of(step, batch, advantages)
        tu.assign_non_tensor(
            data,
            mini_batch_size=len(batch) // spec.mini_batches,
            epochs=spec.epochs,
            seed=spec.seed + step,
            dataloader_kwargs={"shuffle": False},
        )
        rate = self.engine.optimizer.param_groups[0]["lr"]  # verl gives that of the next step
        output = self.train_mini_batch(data)
        self._saver.prepare()
        story.info("trained step %d in %s", step, units.seconds(time.perf_counter() - started))
        if output is None:
            return {}
        return {**step_metrics(tu.get(output, "metrics"), recomputed=spec.algorithm.recomputes), "lr": rate}

    def divergences(self, step: int, batch: SampleBatch) -> Divergences | None:
        """Measure how far this rank's share of a step is from the reference, which is then trained on; None: another
        pipeline stage can. Collective.

        Args:
            step: the trainer's global step.
            batch: the whole batch, the same on every rank.
        """
        rows, batching = self._share_of(batch)
        data = self._samples(step, batch, rows, batching)
        self._compared = step, data
        return divergences(data, rows, self._in_reward().estimator)

    def adapted(self, coefficient: float, divergence: float, samples: int) -> float:
        """Compute the next coefficient of the divergence; see `trainer.divergence.adapted`."""
        return adapted(coefficient, divergence, samples, self._in_reward())

    def _in_reward(self) -> InRewardConfig:
        asked = self._spec.algorithm.in_reward
        assert asked is not None, "who calls it has looked"
        return asked

    def _data_of(self, step: int, batch: SampleBatch | PairBatch, advantages: np.ndarray | None) -> TensorDict:
        """This rank's share of a step, as the engine takes it; where it was compared with the reference, that."""
        rows, batching = self._share_of(batch)
        if isinstance(batch, PairBatch):
            prompts, responses = [batch.prompt_ids(i) for i in rows], [batch.response_ids(i) for i in rows]
            return sft_batch(prompts, responses, learnt=[batch.learnt_of(i) for i in rows], **batching)
        assert advantages is not None, "samples come with advantages"
        compared, self._compared = self._compared, None
        data = compared[1] if compared and compared[0] == step else self._samples(step, batch, rows, batching)
        return with_advantages(data, advantages[rows])

    def _share_of(self, batch: SampleBatch | PairBatch) -> tuple[np.ndarray, Batching]:
        """Which sequences of a step this rank has, and how they meet."""
        spec = self._spec
        ranks = self.engine.get_data_parallel_size()
        check_fits(batch.lengths, spec.max_tokens, spec.backend.ranks_per_sequence)
        balanced = batch.lengths if spec.balance_tokens else None
        mine = share(len(batch), self.engine.get_data_parallel_rank(), ranks, spec.mini_batches, balanced=balanced)
        local = len(mine) // spec.mini_batches
        return mine, Batching(
            micro_batch=micro_batch_size(local, spec.micro_batch_size),
            global_mini_batch=len(batch) // spec.mini_batches,
            max_tokens=spec.max_tokens,
            packed=self.model_config.use_remove_padding,
        )

    def _samples(self, step: int, batch: SampleBatch, rows: np.ndarray, batching: Batching) -> TensorDict:
        """These samples without advantages, with the log-probs that the algorithm wants. Collective."""
        spec = self._spec
        data = grpo_batch(
            [batch.prompt_ids(i) for i in rows],
            [batch.response_ids(i) for i in rows],
            [batch.log_probs_of(i) for i in rows],
            None,
            temperature=spec.temperature,
            entropy=spec.algorithm.needs_entropy,
            staleness=[batch.spans.staleness(i, step) for i in rows],
            **batching,
        )
        if spec.algorithm.recomputes:
            data = recomputed(self.engine, data)
        return data if self._reference is None else self._reference.compared(data)

    def measure_loss(self, batch: PairBatch) -> LossSum | None:
        """Measure the loss of this rank's share of a batch; see `loss_sum`. Collective."""
        return loss_sum(self.engine, self._spec, batch)

    def recompute(self, batch: SampleBatch) -> Recomputed | None:
        """Compute the log-probs of this rank's share of samples; see `training_log_probs`. Collective."""
        return training_log_probs(self.engine, self._spec, batch)

    def begin_at(self, step: int) -> None:
        """Go to the place in the learning-rate schedule after `step`, with the optimizer as it is. Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that no optimizer's step came first
            for _ in range(step):
                self.engine.lr_scheduler_step()


def worker_config(spec: WorkerSpec) -> TrainingWorkerConfig:
    """Make what verl builds the engine of, packing sequences where the model takes it.

    Raises:
        ConfigError: it is to be, and does not, or the adapter that is asked for is not one of this model; names the
            key.
    """
    engine, optimizer = spec.backend.engine_configs(spec.engine, spec.optimizer)
    model = AutoConfig.from_pretrained(local_folder(spec.model_path), trust_remote_code=spec.trust_remote_code)
    packed = spec.backend.packs(model.to_dict(), spec.attn_implementation, spec.remove_padding)
    attention = spec.attn_implementation
    if packed and attention == "sdpa":
        packed_attention.register()
        attention = ATTENTION
    lora = dict(spec.lora)
    if lora:
        trusted = spec.trust_remote_code
        bare = unfilled_model(model, torch.bfloat16, "meta", attn_implementation="eager", trust_remote_code=trusted)
        lora["target_modules"] = list(adapter_targets(bare, lora, spec.backend.strategy).names)
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=spec.model_path,
            use_remove_padding=packed,
            trust_remote_code=spec.trust_remote_code,
            enable_gradient_checkpointing=spec.gradient_checkpointing,
            # the second: verl would set all of it in the config too
            override_config={"attn_implementation": attention, "model_config": {}},
            **lora,
        ),
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
