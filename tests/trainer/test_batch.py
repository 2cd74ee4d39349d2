"""Samples as verl's tensors: which rank trains on what, and that verl's losses then are what the formulas say."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import RunError
from trinity_sync.trainer.training_batch import check_fits, grpo_batch, micro_batch_size, sft_batch, share


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_ranks_share_every_sequence_once(ranks: int, mini_batches: int, local: int) -> None:
    count = ranks * mini_batches * local
    shares = [share(count, rank, ranks, mini_batches) for rank in range(ranks)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(count))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_mini_batch_has_the_same_sequences_on_any_number_of_ranks(mini_batches: int, local: int, ranks: int) -> None:
    count = 6 * ranks * mini_batches * local

    def mini_batch(number: int, world: int) -> set[int]:
        size = count // mini_batches // world
        return {
            int(i) for rank in range(world) for i in share(count, rank, world, mini_batches)[number * size :][:size]
        }

    for number in range(mini_batches):
        assert mini_batch(number, ranks) == mini_batch(number, 1)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_balanced_ranks_share_every_sequence_of_a_mini_batch_once(
    ranks: int, mini_batches: int, local: int, seed: int
) -> None:
    count = ranks * mini_batches * local
    tokens = np.random.default_rng(seed).integers(1, 50, count)
    shares = [share(count, rank, ranks, mini_batches, balanced=tokens) for rank in range(ranks)]
    for number in range(mini_batches):
        block = np.concatenate([of_one[number * local :][:local] for of_one in shares])
        assert sorted(block) == list(range(number * ranks * local, (number + 1) * ranks * local))


@pytest.mark.parametrize("tokens", [[40, 40, 3, 3], [40, 3, 40, 3], [40, 3, 3, 40]])
def test_balanced_ranks_have_about_as_many_tokens(tokens: list[int]) -> None:
    shares = [share(4, rank, 2, 1, balanced=tokens) for rank in range(2)]
    assert [sum(tokens[i] for i in of_one) for of_one in shares] == [43, 43]


def test_a_sequence_that_is_longer_than_a_micro_batch_is_refused() -> None:
    check_fits(np.array([3, 8]), 4, 2)
    check_fits(np.array([], np.int64), 4, 2)
    check_fits(np.array([3, 8]), None, 1)
    with pytest.raises(RunError, match=r"has 9 tokens, .* trainer.max_tokens is 4; set it to 5 or more"):
        check_fits(np.array([3, 9]), 4, 2)


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="10 sequences do not divide into 2 mini-batches over 3 ranks"):
        share(10, 0, 3, 2)


@given(st.integers(1, 300), st.integers(1, 300))
def test_micro_batches_are_equal_and_within_the_limit(local: int, at_most: int) -> None:
    size = micro_batch_size(local, at_most)
    assert local % size == 0
    assert 1 <= size <= at_most


def sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    prompts = [np.array([1, 5, 6]), np.array([1, 7]), np.array([1, 8, 9, 3])]
    responses = [np.array([4, 2]), np.array([5, 6, 2]), np.array([2])]
    return prompts, responses


def log_probs_of_all(prompts: list[np.ndarray], responses: list[np.ndarray]) -> torch.Tensor:
    """As the engine gives them: at each position the log-prob of the next token, jagged."""
    generator = torch.Generator().manual_seed(0)
    rows = [-torch.rand(len(p) + len(r), generator=generator) * 3 for p, r in zip(prompts, responses, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def response_log_probs(full: torch.Tensor, prompts: list[np.ndarray], responses: list[np.ndarray]) -> list[np.ndarray]:
    rows = [row.double().numpy() for row in full.unbind()]
    return [row[len(p) - 1 : len(p) - 1 + len(r)] for row, p, r in zip(rows, prompts, responses, strict=True)]


def test_verls_policy_loss_on_our_batch_is_the_clipped_objective() -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    prompts, responses = sequences()
    full = log_probs_of_all(prompts, responses)
    now = response_log_probs(full, prompts, responses)
    old = [(row + shift).astype(np.float32) for row, shift in zip(now, (0.4, -0.5, 0.05), strict=True)]
    advantages = np.array([1.5, 0.7, -0.9])
    data = grpo_batch(prompts, responses, old, advantages, temperature=1.0, micro_batch=3, global_mini_batch=3)
    tokens = sum(map(len, responses))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
    config = ActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_c=3.0)
    loss, _ = partial(ppo_loss, config)(model_output={"log_probs": full}, data=data, dp_group=None)

    total = 0.0
    for new, before, advantage in zip(now, old, advantages, strict=True):
        ratio = np.exp(new - before.astype(np.float64))
        objective = np.maximum(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
        total += (np.minimum(objective, -3.0 * advantage) if advantage < 0 else objective).sum()
    assert float(loss) == pytest.approx(total / tokens, rel=1e-5)


def test_verls_supervised_loss_on_our_batch_is_the_mean_over_response_tokens() -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    prompts, responses = sequences()
    full = log_probs_of_all(prompts, responses)
    data = sft_batch(prompts, responses, micro_batch=3, global_mini_batch=3)
    tokens = sum(map(len, responses))
    assert float(data["loss_mask"].values().sum()) == tokens
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
    loss, _ = sft_loss(None, {"log_probs": full}, data)
    expected = -sum(row.sum() for row in response_log_probs(full, prompts, responses)) / tokens
    assert float(loss) == pytest.approx(expected, rel=1e-5)
