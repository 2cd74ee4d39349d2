"""Sampling whose random numbers depend on (seed, step, prompt, sample, position) and on nothing else.

Used by `explorer.hf` with `generate(do_sample=False)`. A sequence gets the same random numbers in whatever batch,
order, replica or attempt it is generated, which is what makes a resumed or repeated run see the same data. The key of a
sequence is a node of the tree in `trinity_sync.samples.keys`; the number at a position is that key's child, worked out
with int64 operations on the device where the logits are. The token is the inverse of the cumulative distribution at
that number, so where a logit differs by rounding (another batch shape), the token differs only if the number lies that
close to a step of the distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from trinity_sync.samples.keys import GAMMA, LAST_SHIFT, MIX, Purpose, path

CHUNK_ELEMENTS = 1 << 23
"""Probabilities that are accumulated at a time (in float64): bounds temporary memory where the vocabulary is large."""


def sequence_keys(
    seed: int, step: int, prompts: ArrayLike, samples: ArrayLike, purpose: Purpose = Purpose.SAMPLING
) -> torch.Tensor:
    """Keys of sequences, int64 of shape (sequences,) on the CPU.

    Args:
        seed: the run's seed.
        step: trainer step that the samples are for.
        prompts: integers of shape (sequences,), `Prompt.index` of each.
        samples: integers of shape (sequences,), number of each within its prompt's group.
        purpose: what the samples are for.
    """
    keys = path(seed, purpose, step, prompts, samples)
    return torch.from_numpy(keys.view(np.int64))


def uniforms(keys: torch.Tensor, position: int) -> torch.Tensor:
    """One number per key, uniform in the open interval (0, 1): the middles of 2**52 equal cells.

    Args:
        keys: int64 of any shape and device, from `sequence_keys`.
        position: place of the token in the response, from 0.

    Returns:
        float64 of the same shape, on the same device.
    """
    value = keys + _signed((position + 1) * GAMMA)
    for shift, factor in MIX:
        value = (value ^ _shift_right(value, shift)) * _signed(factor)
    value = value ^ _shift_right(value, LAST_SHIFT)
    return (_shift_right(value, 12).double() + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned number modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros; torch shifts in the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def inverse_cdf(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative softmax passes a number. Tokens of probability 0 are never chosen.

    Args:
        logits: float32 of shape (sequences, vocabulary); -inf for excluded tokens.
        numbers: float64 of shape (sequences,), in (0, 1).

    Returns:
        int64 of shape (sequences,).
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        cumulative = torch.softmax(logits[part], dim=-1).cumsum(dim=-1, dtype=torch.float64)
        # the sum is not exactly 1; a number below 1 - 2**-53 times the sum rounds to less than the sum
        target = numbers[part, None] * cumulative[:, -1:]
        tokens[part] = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens


class SeededSampler(LogitsProcessor):
    """Chooses the next tokens, forces `generate` to take them, and keeps their log-probabilities. Good for one call.

    Usage::

        sampler = SeededSampler(keys, temperature=1.0, top_k=0, top_p=1.0)
        ids = model.generate(prompts, do_sample=False, logits_processor=LogitsProcessorList([sampler]), ...)
        log_probs = sampler.log_probs()

    Args:
        keys: int64 of shape (sequences,), from `sequence_keys`, on the device of the logits.
        temperature: logits are divided by it; 0 always takes the most likely token (the first of several).
        top_k: keep so many most likely tokens (more where the last is tied); 0 keeps all.
        top_p: then keep the most likely tokens that have this probability together; 1 keeps all.
    """

    def __init__(self, keys: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self._keys = keys
        self._temperature = temperature
        self._truncations = [TopKLogitsWarper(top_k)] if top_k else []
        self._truncations += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that are 0 for the chosen token and -inf for the others.

        Args:
            input_ids: int64 of shape (sequences, length so far).
            scores: the model's logits, of shape (sequences, vocabulary).
        """
        logits = scores.float()
        if self._temperature:
            logits = logits / self._temperature
        tokens = self._choose(input_ids, logits)[:, None]
        chosen = logits.gather(1, tokens) - logits.logsumexp(dim=-1, keepdim=True)
        self._log_probs.append(chosen[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def _choose(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not self._temperature:
            return logits.argmax(dim=-1)
        for truncate in self._truncations:
            logits = truncate(input_ids, logits)
        return inverse_cdf(logits, uniforms(self._keys, position=len(self._log_probs)))

    def log_probs(self) -> torch.Tensor:
        """Natural log-probabilities of the chosen tokens, float32 of shape (sequences, tokens so far).

        Those of the softmax over all tokens at the temperature (at 1 where it is 0), before top-k and top-p: what a
        trainer recomputes. Where a sequence ended, those behind the end mean nothing.
        """
        return torch.stack(self._log_probs, dim=1)
