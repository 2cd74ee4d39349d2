"""The loss of pairs that are not learnt: verl's, of log-probs that the engine infers. In each trainer rank."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from trinity_sync.actors.rank import LossSum
from trinity_sync.backends.engines import Engine
from trinity_sync.samples.batch import PairBatch
from trinity_sync.trainer.batch import Batching, check_fits, micro_batch_size, sft_batch, share
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
    check_fits(batch.lengths, spec.max_tokens, spec.backend.ranks_per_sequence)
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    rows = _filled(batch, ranks, spec.micro_batch_size)
    mine = share(len(rows), rank, ranks, 1)
    # what fills up is not learnt
    learnt = [batch.learnt_of(rows[place]) & (place < len(batch)) for place in mine]
    data = sft_batch(
        [batch.prompt_ids(rows[place]) for place in mine],
        [batch.response_ids(rows[place]) for place in mine],
        learnt=learnt,
        **Batching(
            micro_batch=micro_batch_size(len(mine), spec.micro_batch_size),
            global_mini_batch=len(rows),
            max_tokens=spec.max_tokens,
            packed=engine.model_config.use_remove_padding,
        ),
    )
    log_probs = inferred(engine, data)
    if log_probs is None:
        return None
    return LossSum(share=rank, loss=_summed(log_probs, data), tokens=sum(int(marks.sum()) for marks in learnt))


def _filled(batch: PairBatch, ranks: int, micro_batch: int) -> np.ndarray:
    """Return the rows of a batch, and the shortest again and again until all ranks have as many micro-batches."""
    each = min(-(-len(batch) // ranks), micro_batch)
    rows = np.arange(len(batch))
    return np.append(rows, np.full(-len(batch) % (ranks * each), np.argmin(batch.lengths)))


def _summed(log_probs: torch.Tensor, data: TensorDict) -> float:
    """verl's loss of all tokens that are learnt, not divided by their number; added up in float64."""
    data = data.copy()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=1)
    loss, _ = sft_loss(None, {"log_probs": log_probs.double()}, data)
    return float(loss)
