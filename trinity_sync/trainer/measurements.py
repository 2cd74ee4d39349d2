"""What trainer ranks measure without learning: the loss of pairs, which is verl's, and the log-probs of samples that
training computes.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import response_from_nested

from trinity_sync.actors.rank import LossSum, Recomputed
from trinity_sync.backends.engines import Engine
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.trainer.batch import Batching, check_fits, grpo_batch, micro_batch_size, sft_batch, share
from trinity_sync.trainer.log_probs import inferred
from trinity_sync.trainer.spec import WorkerSpec


def loss_sum(engine: Engine, spec: WorkerSpec, batch: PairBatch) -> LossSum | None:
    """Measure a rank's share of a batch with the masks, dtypes and micro-batches of training, without dropout and
    without a gradient. Collective.

    Args:
        engine: at work on nothing else.
        spec: what it was built from.
        batch: any number of pairs, the same on every rank.

    Returns:
        None on pipeline stages before the last.

    Raises:
        RunError: a pair does not fit into a micro-batch.
    """
    rows, mine, batching = _share(engine, spec, batch.lengths)
    # what fills up is not learnt
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


def training_log_probs(engine: Engine, spec: WorkerSpec, batch: SampleBatch) -> Recomputed | None:
    """Compute the log-probs of a rank's share of samples as training does, dropout included. No gradient is computed,
    and the random numbers of training stay as they are. Collective; arguments and what is raised as of `loss_sum`.

    Returns:
        None on pipeline stages before the last.
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
    return Recomputed(rows[mine], response_from_nested(log_probs, data["response_mask"]).values().numpy())


def _share(engine: Engine, spec: WorkerSpec, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, Batching]:
    """Which rows of a batch of any size there are: all, and the shortest again and again until all ranks have as many
    micro-batches; which of these this rank has, and how they meet.
    """
    check_fits(lengths, spec.max_tokens, spec.backend.ranks_per_sequence)
    ranks = engine.get_data_parallel_size()
    each = min(-(-len(lengths) // ranks), spec.micro_batch_size)
    rows = np.append(np.arange(len(lengths)), np.full(-len(lengths) % (ranks * each), np.argmin(lengths)))
    mine = share(len(rows), engine.get_data_parallel_rank(), ranks, 1)
    batching = Batching(
        micro_batch=micro_batch_size(len(mine), spec.micro_batch_size),
        global_mini_batch=len(rows),
        max_tokens=spec.max_tokens,
        packed=engine.model_config.use_remove_padding,
    )
    return rows, mine, batching


def _summed(log_probs: torch.Tensor, data: TensorDict) -> float:
    """verl's loss of all tokens that are learnt, not divided by their number; added up in float64."""
    data = data.copy()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=1)
    loss, _ = sft_loss(None, {"log_probs": log_probs.double()}, data)
    return float(loss)
