"""Samples and pairs as the tensors that verl's engines and losses take. Called by every trainer rank for its share of
the data.

verl packs sequences without padding: nested (jagged) tensors, one row per sequence. `loss_mask` covers the whole
sequence and marks response tokens; `rollout_log_probs`, `old_log_probs`, `advantages` and `response_mask` cover the
response only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode


def share(count: int, rank: int, ranks: int, mini_batches: int) -> np.ndarray:
    """Return the indices of the sequences that a data-parallel rank trains on, mini-batch after mini-batch.

    Mini-batch m is the m-th contiguous block of the sorted samples and is cut evenly over the ranks, so which samples
    meet in an optimizer step does not depend on the number of ranks.

    Raises:
        ValueError: `count` does not divide by `ranks` x `mini_batches`.
    """
    if count % (ranks * mini_batches):
        raise ValueError(f"{count} sequences do not divide into {mini_batches} mini-batches over {ranks} ranks")
    return np.arange(count).reshape(mini_batches, ranks, -1)[:, rank].reshape(-1)


def micro_batch_size(local: int, at_most: int) -> int:
    """Find the largest number of sequences that divides `local` and is at most `at_most`: verl takes equal
    micro-batches only.
    """
    return next(size for size in range(min(local, at_most), 0, -1) if local % size == 0)


def grpo_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    log_probs: Sequence[np.ndarray],
    advantages: np.ndarray,
    *,
    temperature: float,
    micro_batch: int,
    global_mini_batch: int,
    entropy: bool = False,
    staleness: Sequence[np.ndarray] | None = None,
) -> TensorDict:
    """Make a rank's share of a GRPO step for `trainer.algorithms.policy_loss`. The sampler's log-probs are in it twice:
    as `rollout_log_probs`, and as `old_log_probs`, which `recomputed` replaces.

    Args:
        prompts: int64 token ids per sequence, at least one.
        responses: int64 token ids per sequence, at least one, end-of-sequence included.
        log_probs: float32 log-probs of the response tokens under the sampler.
        advantages: float64, one per sequence, given to each of its response tokens.
        temperature: the sampler's temperature.
        micro_batch: sequences per forward and backward.
        global_mini_batch: sequences per optimizer step over all ranks.
        entropy: have the engine compute the entropy of each token's distribution beside its log-prob.
        staleness: int64, of each response token, in steps; None: it is not known.
    """
    lengths = [len(response) for response in responses]
    sampled = _jagged([torch.from_numpy(item) for item in log_probs])
    tensors = {
        **_sequences(prompts, responses),
        "prompts": _jagged([torch.from_numpy(prompt) for prompt in prompts]),
        "responses": _jagged([torch.from_numpy(response) for response in responses]),
        "response_mask": _jagged([torch.ones(length, dtype=torch.int64) for length in lengths]),
        "rollout_log_probs": sampled,
        "old_log_probs": sampled,
        "advantages": _jagged(
            [
                torch.full((length,), float(value), dtype=torch.float32)
                for length, value in zip(lengths, advantages, strict=True)
            ]
        ),
    }
    if staleness is not None:
        tensors["staleness"] = _jagged([torch.from_numpy(item) for item in staleness])
    return _with_settings(
        tensors,
        temperature=temperature,
        micro_batch=micro_batch,
        global_mini_batch=global_mini_batch,
        entropy=entropy,
    )


def sft_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    micro_batch: int,
    global_mini_batch: int,
    learnt: Sequence[np.ndarray] | None = None,
) -> TensorDict:
    """Make a rank's share of a supervised step for verl's `sft_loss`; arguments as for `grpo_batch`, and `learnt`: bool
    per sequence, which tokens of the response are learnt; None: all.
    """
    return _with_settings(
        _sequences(prompts, responses, learnt),
        temperature=1.0,
        micro_batch=micro_batch,
        global_mini_batch=global_mini_batch,
    )


def _sequences(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], learnt: Sequence[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    ids = [torch.from_numpy(np.concatenate(pair)) for pair in zip(prompts, responses, strict=True)]
    marks = [np.ones(len(response), np.bool_) for response in responses] if learnt is None else learnt
    masks = [
        torch.from_numpy(np.concatenate([np.zeros(len(prompt), np.float32), mark.astype(np.float32)]))
        for prompt, mark in zip(prompts, marks, strict=True)
    ]
    return {
        "input_ids": _jagged(ids),
        "position_ids": _jagged([torch.arange(len(item)) for item in ids]),
        "loss_mask": _jagged(masks),
    }


def _jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _with_settings(
    tensors: dict[str, torch.Tensor],
    *,
    temperature: float,
    micro_batch: int,
    global_mini_batch: int,
    entropy: bool = False,
) -> TensorDict:
    settings: dict[str, object] = {
        "calculate_entropy": entropy,
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "use_fused_kernels": False,
        "micro_batch_size_per_gpu": micro_batch,
        "pad_mode": DatasetPadMode.NO_PADDING,
        "pad_token_id": 0,
        "temperature": temperature,
        "global_batch_size": global_mini_batch,
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
