"""Samples and pairs as the tensors of verl's engines and losses. Each trainer rank calls it for its share of the data.

verl packs sequences without padding: nested (jagged) tensors, one row per sequence. `loss_mask` covers the whole
sequence and marks response tokens; `rollout_log_probs`, `old_log_probs`, `advantages` and `response_mask` cover the
response only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from trinity_sync.errors import RunError


class BatchSizes(TypedDict):
    """The batch sizes of a forward and backward and of an optimizer step.

    Attributes:
        micro_batch: sequences per forward and backward.
        global_mini_batch: sequences per optimizer step over all ranks.
        max_tokens: per forward and backward and rank, in place of `micro_batch`; None: no limit.
        packed: compute sequences end to end without padding; the engine must be built for it.
    """

    micro_batch: int
    global_mini_batch: int
    max_tokens: NotRequired[int | None]
    packed: NotRequired[bool]


def share(
    count: int, rank: int, ranks: int, mini_batches: int, *, balanced: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """Return the indices of the sequences that a data-parallel rank trains on, mini-batch after mini-batch.

    Mini-batch m is the m-th contiguous block of the sorted samples, divided evenly over the ranks, so the samples of an
    optimizer step do not depend on the number of ranks. `rank`, `ranks`: the data-parallel rank and the number of them.
    `balanced`: tokens of each sequence, to give ranks about as many tokens of each mini-batch in equally many
    sequences; None: each rank has a contiguous block. Raises ValueError: `count` does not divide by `ranks` x
    `mini_batches`.
    """
    if count % (ranks * mini_batches):
        raise ValueError(f"{count} sequences do not divide into {mini_batches} mini-batches over {ranks} ranks")
    blocks = np.arange(count).reshape(mini_batches, -1)
    if balanced is None:
        return blocks.reshape(mini_batches, ranks, -1)[:, rank].reshape(-1)
    tokens = np.asarray(balanced)
    cuts = [get_seqlen_balanced_partitions(tokens[block].tolist(), ranks, equal_size=True) for block in blocks]
    return np.concatenate([block[cut[rank]] for block, cut in zip(blocks, cuts, strict=True)])


def check_fits(lengths: np.ndarray, max_tokens: int | None, sharing: int) -> None:
    """Check that each sequence of a step fits into a micro-batch. `lengths`: tokens of each, on all ranks. `sharing`:
    ranks that share a sequence.
    """
    longest = int(lengths.max(initial=0))
    if max_tokens is not None and longest > max_tokens * sharing:
        raise RunError(
            f"a sequence has {longest} tokens, prompt and response together, and trainer.max_tokens is {max_tokens}; "
            f"set it to {-(-longest // sharing)} or more, or shorten the task's responses or prompts"
        )


def micro_batch_size(local: int, at_most: int) -> int:
    """Return the largest divisor of `local` up to `at_most`: verl takes only micro-batches of equal size."""
    return next(size for size in range(min(local, at_most), 0, -1) if local % size == 0)


def grpo_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    log_probs: Sequence[np.ndarray],
    advantages: np.ndarray | None,
    *,
    temperature: float,
    entropy: bool = False,
    staleness: Sequence[np.ndarray] | None = None,
    **batching: Unpack[BatchSizes],
) -> TensorDict:
    """Make a rank's share of a GRPO step for `trainer.algorithms.policy_loss`. It has the sampler's log-probs twice: as
    `rollout_log_probs`, and as `old_log_probs`, which `recomputed` replaces.

    Args:
        prompts: int64 token ids per sequence, at least one.
        responses: int64 token ids per sequence, at least one, end-of-sequence included.
        log_probs: float32 log-probs of the response tokens under the sampler.
        staleness: int64, of each response token, in steps; None: unknown.
    """
    lengths = [len(response) for response in responses]
    sampled = _jagged(np.concatenate(log_probs), lengths)
    tensors = {
        **_sequences(prompts, responses),
        "prompts": _jagged(np.concatenate(prompts), [len(prompt) for prompt in prompts]),
        "responses": _jagged(np.concatenate(responses), lengths),
        "response_mask": _jagged(np.ones(sum(lengths), np.int64), lengths),
        "rollout_log_probs": sampled,
        "old_log_probs": sampled,
    }
    if staleness is not None:
        tensors["staleness"] = _jagged(np.concatenate(staleness), lengths)
    data = _with_settings(tensors, batching, temperature=temperature, entropy=entropy)
    return data if advantages is None else with_advantages(data, advantages)


def with_advantages(data: TensorDict, advantages: np.ndarray) -> TensorDict:
    """Return a rank's share of a GRPO step with its advantages."""
    lengths = data["response_mask"].offsets().diff().tolist()
    data = data.copy()
    data["advantages"] = _jagged(np.repeat(np.asarray(advantages, np.float32), lengths), lengths)
    return data


def sft_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    learnt: Sequence[np.ndarray] | None = None,
    **batching: Unpack[BatchSizes],
) -> TensorDict:
    """Make a rank's share of a supervised step for verl's `sft_loss`; arguments as for `grpo_batch`. `learnt`: bool per
    sequence, marks the response tokens that count; None: all.
    """
    return _with_settings(_sequences(prompts, responses, learnt), batching, temperature=1.0)


def _sequences(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], learnt: Sequence[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    marks = [np.ones(len(response), np.bool_) for response in responses] if learnt is None else learnt
    masks = [part for pair in zip(prompts, marks, strict=True) for part in (np.zeros(len(pair[0]), np.bool_), pair[1])]
    return {
        "input_ids": _jagged(np.concatenate(parts), lengths),
        "position_ids": _jagged(np.concatenate([np.arange(length) for length in lengths]), lengths),
        "loss_mask": _jagged(np.concatenate(masks).astype(np.float32), lengths),
    }


def _jagged(values: np.ndarray, lengths: Sequence[int]) -> torch.Tensor:
    """Make a nested tensor from rows that lie end to end in `values`."""
    # the same from a list of rows is slower: torch copies them one by one
    offsets = torch.from_numpy(np.cumsum([0, *lengths]))
    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(values), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def _with_settings(
    tensors: dict[str, torch.Tensor], batching: BatchSizes, *, temperature: float, entropy: bool = False
) -> TensorDict:
    max_tokens = batching.get("max_tokens")
    settings = {
        "calculate_entropy": entropy,
        "use_remove_padding": batching.get("packed", False),
        "use_dynamic_bsz": max_tokens is not None,
        "max_token_len_per_gpu": max_tokens,
        "use_fused_kernels": False,
        "micro_batch_size_per_gpu": batching["micro_batch"],
        "pad_mode": DatasetPadMode.NO_PADDING,
        "pad_token_id": 0,
        "temperature": temperature,
        "global_batch_size": batching["global_mini_batch"],
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
