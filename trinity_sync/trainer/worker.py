"""A trainer rank: verl's `TrainingWorker` with hooks for versions and checkpoints. The actor `TrainerRank` has one.

Collective methods say so: they are called on all ranks, in the same order.
"""

from __future__ import annotations

# first: it changes what verl imports
from trinity_sync.backends import lean_verl

# isort: split
import math
import random
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
from tensordict import TensorDict
from transformers import AutoConfig
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import AdaptiveKLController, kl_penalty
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import masked_mean
from verl.workers.config import HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import response_from_nested

from trinity_sync.actors.rank_client import Divergences, LogProbShare, LossSum, RankInfo, UntrainedTensors
from trinity_sync.backends import packed_attention
from trinity_sync.backends.adapters import adapter_off, adapter_targets
from trinity_sync.backends.base import AdapterBackend, Engine, FsdpEngine
from trinity_sync.backends.option import ATTENTION, ConfigFields
from trinity_sync.backends.saved_tensors import check_class, left_out_by
from trinity_sync.checkpoint.export import digest_left_out
from trinity_sync.checkpoint.reading import WeightsError
from trinity_sync.checkpoint.reading.verl_shards import open_hugging_face
from trinity_sync.config.schema import InRewardConfig
from trinity_sync.errors import ConfigError
from trinity_sync.host.logs import story
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.models.families import check_attention, use_deterministic_kernels
from trinity_sync.models.files import follow_indexes, local_folder
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.tracking import units
from trinity_sync.tracking.summary import SKIPPED
from trinity_sync.trainer.algorithms.base import MISMATCH
from trinity_sync.trainer.algorithms.policy_loss import as_means
from trinity_sync.trainer.base_model import check_held
from trinity_sync.trainer.member import Member, join_group
from trinity_sync.trainer.training_batch import (
    BatchSizes,
    check_fits,
    grpo_batch,
    micro_batch_size,
    sft_batch,
    share,
    with_advantages,
)
from trinity_sync.trainer.worker_spec import WorkerSpec


class TrinityWorker(Member, TrainingWorker):
    """A rank of the trainer group."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._compared: tuple[int, TensorDict] | None = None
        if spec.deterministic:
            use_deterministic_kernels()
        # In place of verl's own call, which is skipped if a group exists: on a CPU it names gloo twice, which torch
        # refuses, and it sets no timeout.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        join_group(backend, spec.backend_timeout_s)
        spec.backend.prepare()
        lean_verl.install()
        follow_indexes()
        super().__init__(worker_config(spec))

    def initialise(self) -> RankInfo:
        """Build model, optimizer and scheduler. Collective."""
        check_attention(self.engine.model_config.hf_config.to_dict(), self._spec.attn_implementation)
        check_class(self.engine.model_config)
        folder = local_folder(self._spec.model_path)
        left_out = left_out_by(self.engine.model_config, folder)  # on each rank, so that all refuse
        torch.manual_seed(self._spec.seed)  # so that a new adapter is the same on all ranks
        self.reset()
        self._reference = self._make_reference()
        if self._spec.temperature != 1 or self._spec.algorithm.needs_entropy:
            for engine in self._engines():
                self._spec.backend.divide_in_fp32(engine)
        self.set_loss_fn(self._spec.algorithm.loss(self._spec.backend.strategy))
        seed = self._spec.seed + self.engine.get_data_parallel_rank()  # ranks that share a layer need the same
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        merged = self._spec.what == "merged"
        view = self._spec.backend.view(self.engine, self._spec.wire_dtype, self._spec.keep_fp32, merged=merged)
        first, info = self.rank == 0, self.hold(self._spec, view, self.rank)
        if self._spec.adapter is not None:
            view = cast("AdapterBackend", view)
            base = check_held(folder, view.base(), self._spec.wire_dtype, digested=first)
            info = replace(info, base=base, adapter=view.adapter_config() if first else None)
        if first and self._spec.reference is not None:
            info = replace(info, reference=reference_digest(self._spec.reference))
        if first and (names := left_out.drafts + left_out.tower):
            digest = digest_left_out(open_hugging_face(folder), names)
            info = replace(info, left_out=UntrainedTensors(str(folder), names, digest, left_out.tower))
        return info

    def _make_reference(self) -> ReferenceModel | BaseOfAdapter | None:
        """Return the reference of the policy; None: the algorithm needs none. Collective."""
        spec = self._spec
        if spec.reference is not None:
            config = worker_config(reference_spec(spec, spec.reference))
            return ReferenceModel(config, spec.reference, self.engine.model_config.hf_config.vocab_size)
        return BaseOfAdapter(self.engine) if spec.algorithm.needs_reference else None

    def _engines(self) -> list[Engine]:
        return [self.engine, *([self._reference.engine] if isinstance(self._reference, ReferenceModel) else [])]

    # -- training

    def train_step(self, step: int, batch: SampleBatch | PairBatch, advantages: np.ndarray | None) -> dict[str, float]:
        """Train on this rank's share of a batch; return the metrics. Collective."""
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
        rate = self.engine.optimizer.param_groups[0]["lr"]  # verl's own metric is the next step's
        output = self.train_mini_batch(data)
        self._saver.prepare()
        story.info("trained step %d in %s", step, units.seconds(time.perf_counter() - started))
        if output is None:
            return {}
        return {**step_metrics(tu.get(output, "metrics"), recomputed=spec.algorithm.recomputes), "lr": rate}

    def divergences(self, step: int, batch: SampleBatch) -> Divergences | None:
        """Measure the divergence of this rank's share of a step from the reference, before training on it; None on
        pipeline stages before the last. Collective.
        """
        rows, batching = self._share_of(batch)
        data = self._samples(step, batch, rows, batching)
        self._compared = step, data
        return divergences(data, rows, self._in_reward.estimator)

    def adapted(self, coefficient: float, divergence: float, samples: int) -> float:
        """Return the next coefficient of the divergence; see `adapted`."""
        return adapted(coefficient, divergence, samples, self._in_reward)

    @property
    def _in_reward(self) -> InRewardConfig:
        config = self._spec.algorithm.in_reward
        assert config is not None, "called only if rewards have a penalty"
        return config

    def _data_of(self, step: int, batch: SampleBatch | PairBatch, advantages: np.ndarray | None) -> TensorDict:
        """Return this rank's share of a step for the engine; uses the share that `divergences` prepared, if it did."""
        rows, batching = self._share_of(batch)
        if isinstance(batch, PairBatch):
            prompts, responses = [batch.prompt_ids(i) for i in rows], [batch.response_ids(i) for i in rows]
            return sft_batch(prompts, responses, learnt=[batch.learnt_of(i) for i in rows], **batching)
        assert advantages is not None, "samples come with advantages"
        compared, self._compared = self._compared, None
        data = compared[1] if compared and compared[0] == step else self._samples(step, batch, rows, batching)
        return with_advantages(data, advantages[rows])

    def _share_of(self, batch: SampleBatch | PairBatch) -> tuple[np.ndarray, BatchSizes]:
        """Return the sequences of a step that this rank has, and their batching."""
        spec = self._spec
        ranks = self.engine.get_data_parallel_size()
        check_fits(batch.lengths, spec.max_tokens, spec.backend.ranks_per_sequence)
        balanced = batch.lengths if spec.balance_tokens else None
        mine = share(len(batch), self.engine.get_data_parallel_rank(), ranks, spec.mini_batches, balanced=balanced)
        local = len(mine) // spec.mini_batches
        return mine, BatchSizes(
            micro_batch=micro_batch_size(local, spec.micro_batch_size),
            global_mini_batch=len(batch) // spec.mini_batches,
            max_tokens=spec.max_tokens,
            packed=self.model_config.use_remove_padding,
        )

    def _samples(self, step: int, batch: SampleBatch, rows: np.ndarray, batching: BatchSizes) -> TensorDict:
        """Return samples without advantages, with the log-probs that the algorithm needs. Collective."""
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

    def recompute(self, batch: SampleBatch) -> LogProbShare | None:
        """Compute the log-probs of this rank's share of samples; see `training_log_probs`. Collective."""
        return training_log_probs(self.engine, self._spec, batch)

    def begin_at(self, step: int) -> None:
        """Advance the learning-rate schedule to after `step`; the optimizer is unchanged. Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an optimizer's step first
            for _ in range(step):
                self.engine.lr_scheduler_step()


def worker_config(spec: WorkerSpec) -> TrainingWorkerConfig:
    """Make verl's config of the engine. Sequences are packed if the model allows it."""
    engine, optimizer = spec.backend.engine_configs(spec.engine, spec.optimizer)
    model = AutoConfig.from_pretrained(local_folder(spec.model_path), trust_remote_code=spec.trust_remote_code)
    packed = spec.backend.packs(model.to_dict(), spec.attn_implementation, spec.remove_padding)
    attention = spec.attn_implementation
    if packed and attention == "sdpa":
        packed_attention.register()
        attention = ATTENTION
    lora: ConfigFields = {}
    if (adapter := spec.adapter) is not None:
        trusted = spec.trust_remote_code
        bare = unfilled_model(model, torch.bfloat16, "meta", attn_implementation="eager", trust_remote_code=trusted)
        lora = {
            "lora_rank": adapter.rank,
            "lora_alpha": adapter.alpha,
            "target_modules": list(adapter_targets(bare, adapter, spec.backend.strategy).names),
            "lora_adapter_path": adapter.path,
        }
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=spec.model_path,
            use_remove_padding=packed,
            trust_remote_code=spec.trust_remote_code,
            enable_gradient_checkpointing=spec.gradient_checkpointing,
            # model_config: verl would also set these overrides in the model's config
            override_config={"attn_implementation": attention, "model_config": {}},
            **lora,
        ),
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )


# Log-probs and divergences of a step's samples before training on them.


def divergences(data: TensorDict, rows: np.ndarray, estimator: str) -> Divergences | None:
    """Measure the divergence of a rank's share of a step from the reference, by verl's estimators."""
    if "ref_log_prob" not in data:
        return None
    padded = data.select("response_mask", "old_log_probs", "ref_log_prob").to_padded_tensor()
    mask = padded["response_mask"]
    of_tokens = kl_penalty(padded["old_log_probs"], padded["ref_log_prob"], kl_penalty=estimator) * mask
    means = masked_mean(of_tokens, mask=mask, axis=-1)
    return Divergences(rows, of_tokens.double().sum(-1).numpy(), means.float().numpy())


def adapted(coefficient: float, divergence: float, samples: int, config: InRewardConfig) -> float:
    """Return the coefficient of the next step by verl's adaptive controller (Ziegler et al., "Fine-Tuning Language
    Models from Human Preferences", 2019).
    """
    controller = AdaptiveKLController(coefficient, config.target_kl, config.horizon)
    controller.update(current_kl=divergence, n_steps=samples)
    return float(controller.value)


def recomputed(engine: Engine, data: TensorDict) -> TensorDict:
    """Return a rank's share of a step with the engine's own log-probs as `old_log_probs`. Collective."""
    return with_log_probs(engine, data, "old_log_probs")


def with_log_probs(
    engine: Engine, data: TensorDict, name: str, inside: AbstractContextManager[None] | None = None
) -> TensorDict:
    """Return a rank's share of a step with an engine's log-probs of the response tokens: with the dtypes, the
    temperature and the micro-batches of training, without dropout. Collective.
    """
    data = data.copy()
    log_probs = inferred(engine, data, inside)
    if log_probs is not None:
        data[name] = response_from_nested(log_probs, data["response_mask"])
    return data


def inferred(
    engine: Engine, data: TensorDict, inside: AbstractContextManager[None] | None = None, *, training: bool = False
) -> torch.Tensor | None:
    """Return an engine's log-prob of each next token of a rank's sequences: nested, float32, on the CPU; None on
    pipeline stages before the last. Collective.
    """
    request = data.copy()  # the engine adds its results
    packed = engine.model_config.use_remove_padding  # a reference may differ from the trained model
    tu.assign_non_tensor(request, calculate_entropy=False, use_remove_padding=packed)
    with engine.train_mode() if training else engine.eval_mode(), inside or nullcontext(), torch.no_grad():
        output = engine.infer_batch(request)
    if not output:
        return None
    log_probs: torch.Tensor = output["model_output"]["log_probs"].float().cpu()
    return log_probs


# References: a second engine of verl's in the trainer's ranks, or the base of the adapter.


class ReferenceModel:
    """A model that is not trained.

    Args:
        config: of verl's worker. Building it is collective.
        path: its folder or hub id, for errors.
        vocabulary: tokens of the trained model.

    Raises:
        ConfigError: it has another vocabulary, is not a causal language model, or its folder lacks tensors.
    """

    def __init__(self, config: TrainingWorkerConfig, path: str, vocabulary: int) -> None:
        worker = TrainingWorker(config)
        self.engine: Engine = worker.engine
        try:
            check_class(self.engine.model_config)
            left_out_by(self.engine.model_config, local_folder(path))  # on each rank, so that all refuse
        except ConfigError as error:
            raise ConfigError(f"algorithm.kl.reference={path} cannot be used: {error}") from error
        tokens = self.engine.model_config.hf_config.vocab_size
        if tokens != vocabulary:
            raise ConfigError(
                f"algorithm.kl.reference={path} has a vocabulary of {tokens} tokens, the trained model one of "
                f"{vocabulary}; a reference has to give the same tokens a probability"
            )
        worker.reset()

    def compared(self, data: TensorDict) -> TensorDict:
        """Return a rank's share of a step with the reference's log-probs as `ref_log_prob`. Collective."""
        return with_log_probs(self.engine, data, "ref_log_prob")


class BaseOfAdapter:
    """The base of the trained adapter: the trained engine with the adapter switched off."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def compared(self, data: TensorDict) -> TensorDict:
        """Return a rank's share of a step with the base's log-probs as `ref_log_prob`. Collective."""
        return with_log_probs(self._engine, data, "ref_log_prob", adapter_off(self._engine.module))


def reference_spec(spec: WorkerSpec, path: str) -> WorkerSpec:
    """Return the spec of a reference's engine: that of the trained model, for inference only."""
    engine = spec.backend.reference_fields(spec.engine)
    return replace(spec, model_path=path, engine=engine, adapter=None, gradient_checkpointing=False)


def reference_digest(path: str) -> str:
    """Return the digest of a reference's stored weights, hex. Reads all of them."""
    folder = local_folder(path)
    try:
        tensors = open_hugging_face(folder)
        return digest_left_out(tensors, sorted(tensors))
    except (WeightsError, OSError) as error:
        raise ConfigError(f"algorithm.kl.reference={path}: {error}") from error


# Metrics of a trainer step.


def step_metrics(metrics: Mapping[str, Any], *, recomputed: bool) -> dict[str, float]:
    """Reduce verl's metrics of a step to one number each. `metrics`: of verl's `train_mini_batch`: a number or a
    `Metric`, or a list with one entry per optimizer step. The result is the mean of a list, or the maximum if the name
    ends with ``_max``. Of ``grad_norm`` only finite entries count: an optimizer step with another one was skipped.
    Returns by name, and under `SKIPPED` the number of skipped optimizer steps.
    """
    if not recomputed:
        metrics = {name: values[:1] if name.startswith(MISMATCH) else values for name, values in metrics.items()}
    found = as_means(
        {name: _number(value, max if name.endswith("_max") else np.mean) for name, value in metrics.items()}
    )
    norms = np.atleast_1d(metrics["grad_norm"])
    taken = norms[np.isfinite(norms)]
    found["grad_norm"] = float(taken.mean()) if len(taken) else math.nan
    return {**found, SKIPPED: float(len(norms) - len(taken))}


def _number(value: Any, reduce: Callable[[list[float]], SupportsFloat]) -> float:
    if isinstance(value, list | tuple):
        return float(reduce([_number(item, reduce) for item in value]))
    if hasattr(value, "aggregate"):
        return _number(value.aggregate(), reduce)
    return float(value)


# Measurements without training.


def loss_sum(engine: Engine, spec: WorkerSpec, batch: PairBatch) -> LossSum | None:
    """Measure verl's loss of a rank's share of a batch with the masks, dtypes and micro-batches of training, without
    dropout and without a gradient. Collective. Returns None on pipeline stages before the last.
    """
    rows, mine, batching = _share(engine, spec, batch.lengths)
    # rows that only fill up do not count
    learnt = [batch.learnt_of(rows[place]) & (place < len(batch)) for place in mine]
    data = sft_batch(
        [batch.prompt_ids(rows[place]) for place in mine],
        [batch.response_ids(rows[place]) for place in mine],
        learnt=learnt,
        **batching,
    )
    log_probs = inferred(engine, data)
    if log_probs is None:
        return None
    tokens = sum(int(marks.sum()) for marks in learnt)
    return LossSum(share=engine.get_data_parallel_rank(), loss=_summed(log_probs, data), tokens=tokens)


def training_log_probs(engine: Engine, spec: WorkerSpec, batch: SampleBatch) -> LogProbShare | None:
    """Compute the log-probs of a rank's share of samples as training does, with dropout, without a gradient. The random
    numbers of training do not change. Collective; arguments and errors as of `loss_sum`. Returns None on pipeline
    stages before the last.
    """
    rows, mine, batching = _share(engine, spec, batch.lengths)
    data = grpo_batch(
        [batch.prompt_ids(rows[place]) for place in mine],
        [batch.response_ids(rows[place]) for place in mine],
        [batch.log_probs_of(rows[place]) for place in mine],
        None,
        temperature=spec.temperature,
        **batching,
    )
    with spec.backend.random_numbers_kept():
        log_probs = inferred(engine, data, training=True)
    if log_probs is None:
        return None
    return LogProbShare(rows[mine], response_from_nested(log_probs, data["response_mask"]).values().numpy())


def _share(engine: Engine, spec: WorkerSpec, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, BatchSizes]:
    """Return the rows of a batch of any size, the shortest repeated until all ranks have as many micro-batches; the
    places in them of this rank's rows; and their batching.
    """
    check_fits(lengths, spec.max_tokens, spec.backend.ranks_per_sequence)
    ranks = engine.get_data_parallel_size()
    each = min(-(-len(lengths) // ranks), spec.micro_batch_size)
    rows = np.append(np.arange(len(lengths)), np.full(-len(lengths) % (ranks * each), np.argmin(lengths)))
    mine = share(len(rows), engine.get_data_parallel_rank(), ranks, 1)
    batching = BatchSizes(
        micro_batch=micro_batch_size(len(mine), spec.micro_batch_size),
        global_mini_batch=len(rows),
        max_tokens=spec.max_tokens,
        packed=engine.model_config.use_remove_padding,
    )
    return rows, mine, batching


def _summed(log_probs: torch.Tensor, data: TensorDict) -> float:
    """Return verl's loss summed over all tokens that count, in float64."""
    data = data.copy()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=1)
    loss, _ = sft_loss(None, {"log_probs": log_probs.double()}, data)
    return float(loss)
