from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.explorer import hf
from trinity_sync.explorer.hf import SeededSampler, inverse_cdf, uniforms
from trinity_sync.explorer.texts import sequence_keys
from trinity_sync.samples.keys import child

IDS = torch.zeros((1, 1), dtype=torch.int64)
"""What the sampler is shown of the sequences; it does not look at them."""


def keys_of(prompts: int, samples: int, *, seed: int = 0, step: int = 1) -> torch.Tensor:
    return sequence_keys(seed, step, np.repeat(range(prompts), samples), np.tile(range(samples), prompts))


def sampled(
    logits: torch.Tensor, keys: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs of shape (sequences, positions) for logits of shape (positions, sequences, vocabulary)."""
    sampler = SeededSampler(keys, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = torch.stack([sampler(IDS, at_position).argmax(-1) for at_position in logits], dim=1)
    return tokens, sampler.log_probs()


def random_logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2


# numbers


@given(key=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 10**6))
def test_numbers_are_the_children_of_the_key(key: int, position: int) -> None:
    expected = (int(child(key % 2**64, position)[0]) >> 12) + 0.5
    assert uniforms(torch.tensor([key]), position).item() == expected * 2.0**-52


def test_numbers_are_uniform() -> None:
    keys = keys_of(100, 16)
    numbers = torch.cat([uniforms(keys, position) for position in range(20)])
    counts = torch.histc(numbers, bins=100, min=0.0, max=1.0)
    expected = len(numbers) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 149  # 99 degrees of freedom, p = 0.001


@pytest.mark.parametrize("neighbour", ["position", "sample", "prompt", "step", "seed"])
def test_neighbouring_streams_are_independent(neighbour: str) -> None:
    ours = uniforms(keys_of(200, 50), 3)
    theirs = {
        "position": uniforms(keys_of(200, 50), 4),
        "sample": ours.view(200, 50).roll(1, 1).flatten(),
        "prompt": ours.view(200, 50).roll(1, 0).flatten(),
        "step": uniforms(keys_of(200, 50, step=2), 3),
        "seed": uniforms(keys_of(200, 50, seed=1), 3),
    }[neighbour]
    cells = torch.histogramdd(torch.stack([ours, theirs], 1), bins=[8, 8], range=[0.0, 1.0, 0.0, 1.0]).hist
    expected = len(ours) / 64
    assert ((cells - expected) ** 2 / expected).sum() < 104  # 63 degrees of freedom, p = 0.001


def test_distinct_sequences_have_distinct_numbers() -> None:
    streams = [uniforms(keys_of(20, 16, seed=seed, step=step), 0) for seed in range(3) for step in range(1, 4)]
    numbers = torch.cat(streams)
    assert len(numbers.unique()) == len(numbers)


# the inverse of the cumulative distribution


@given(data=st.data(), size=st.integers(1, 12))
def test_the_token_is_where_the_cumulative_probability_passes_the_number(data: st.DataObject, size: int) -> None:
    weights = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    number = data.draw(st.floats(2.0**-53, 1 - 2.0**-53))
    token = int(inverse_cdf(torch.tensor([weights]).log().float(), torch.tensor([number], dtype=torch.float64)))
    bounds = np.cumsum([0, *weights]) / sum(weights)
    assert weights[token] > 0
    assert bounds[token] - 1e-6 <= number <= bounds[token + 1] + 1e-6


@pytest.mark.parametrize(("number", "token"), [(2.0**-53, 1), (1 - 2.0**-53, 3)])
def test_tokens_that_are_excluded_are_not_chosen_at_the_ends_of_the_range(number: float, token: int) -> None:
    logits = torch.tensor([[-math.inf, 0.3, -math.inf, 0.1, -math.inf]])
    assert inverse_cdf(logits, torch.tensor([number], dtype=torch.float64)).item() == token


def test_large_batches_are_done_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, numbers = random_logits(50, 7), uniforms(keys_of(50, 1), 0)
    whole = inverse_cdf(logits, numbers)
    monkeypatch.setattr(hf, "CHUNK_ELEMENTS", 7 * 8)
    assert torch.equal(inverse_cdf(logits, numbers), whole)


# the sampler


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_distributed_as_the_softmax_says(temperature: float) -> None:
    logits = random_logits(12)
    count = 20_000
    tokens, _ = sampled(logits.expand(1, count, 12), keys_of(count // 16, 16), temperature=temperature)
    expected = torch.softmax(logits.double() / temperature, -1) * count
    drawn = torch.bincount(tokens.flatten(), minlength=12)
    common = expected > 5
    assert ((drawn - expected) ** 2 / expected)[common].sum() < 31.3  # at most 11 degrees of freedom, p = 0.001


@settings(max_examples=20)
@given(data=st.data())
def test_tokens_depend_neither_on_the_rest_of_the_batch_nor_on_its_order(data: st.DataObject) -> None:
    logits, keys = random_logits(5, 32, 9), keys_of(8, 4)
    tokens, log_probs = sampled(logits, keys)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 31), min_size=1, unique=True)))
    some_tokens, some_log_probs = sampled(logits[:, rows], keys[rows])
    assert torch.equal(some_tokens, tokens[rows])
    assert torch.equal(some_log_probs, log_probs[rows])


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 2}])
def test_another_seed_or_step_gives_other_tokens(other: dict[str, int]) -> None:
    logits = torch.zeros(4, 32, 50)
    assert not torch.equal(sampled(logits, keys_of(8, 4))[0], sampled(logits, keys_of(8, 4, **other))[0])


def test_samples_of_one_prompt_differ() -> None:
    tokens, _ = sampled(torch.zeros(4, 32, 50), keys_of(8, 4))
    assert len(tokens.unique(dim=0)) == 32


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_whole_softmax_at_the_temperature(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(5, 32, 9)
    tokens, log_probs = sampled(logits, keys_of(8, 4), temperature=temperature, top_k=top_k, top_p=top_p)
    expected = (logits / temperature).log_softmax(-1).transpose(0, 1).gather(2, tokens[..., None])[..., 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected)


def test_top_k_keeps_the_most_likely_tokens() -> None:
    logits = random_logits(10, 64, 20)
    tokens, _ = sampled(logits, keys_of(4, 16), top_k=2)
    best = logits.topk(2, -1).indices.transpose(0, 1)
    assert (tokens[..., None] == best).any(-1).all()
    assert (tokens[..., None] == best).any((0, 1)).all()


def test_top_p_keeps_the_most_likely_tokens_that_have_the_probability_together() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(10, 64, 4)
    assert sampled(logits, keys_of(4, 16), top_p=0.7)[0].unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    "setting", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_k": 5, "top_p": 0.5}]
)
def test_greedy_takes_the_most_likely_token(setting: dict[str, float]) -> None:
    logits = random_logits(5, 32, 9)
    tokens, log_probs = sampled(logits, keys_of(8, 4), **setting)  # type: ignore[arg-type]
    assert torch.equal(tokens, logits.argmax(-1).T)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1).T)
