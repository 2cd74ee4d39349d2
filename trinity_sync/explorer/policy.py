"""What engines of vLLM have in common, wherever vLLM runs: the model that they are to hold, and what is asked for
samples. vLLM itself is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trinity_sync.config import dtype_name
from trinity_sync.errors import RunError
from trinity_sync.explorer.hf import sequence_keys
from trinity_sync.explorer.texts import Responses, Texts
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.samples.batch import Span, TokenRows, VersionSpans
from trinity_sync.samples.record import Prompt, Purpose
from trinity_sync.weights.tensors import hold_fp32, kept_by_class, saved_list, to_torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.outputs import CompletionOutput

    from trinity_sync.integrations.vllm.arrivals import Shapes


def shapes_of(
    config: PreTrainedConfig, dtype: str, keep_fp32: Sequence[str] | None, *, trust_remote_code: bool
) -> Shapes:
    """What a version of a model consists of.

    Args:
        config: of the model.
        dtype: in which it is held: ``bf16``, ``fp32`` or ``fp16``.
        keep_fp32: tensors that are held in fp32, as patterns; None: those that its class names.
        trust_remote_code: whether code that comes with the model may run.
    """
    kind = to_torch(dtype_name(dtype))
    model = unfilled_model(config, kind, "meta", attn_implementation="eager", trust_remote_code=trust_remote_code)
    hold_fp32(model, kept_by_class(model, dtype_name(dtype)) if keep_fp32 is None else keep_fp32)
    return {name: (saved.dtype, saved.shape) for name, saved in saved_list(model).items()}


def log_probs_mode(temperature: float) -> str:
    """The ``logprobs_mode`` in which vLLM tells log-probs of the softmax over all tokens at a temperature."""
    return "raw_logprobs" if temperature in (0.0, 1.0) else "processed_logprobs"


class Asked(NamedTuple):
    """What is asked for a batch of samples.

    Attributes:
        prompt_ids: tokens of each prompt.
        rows: for each sample the tokens of its prompt; those of a prompt stand together.
        seeds: of each sample, at least 0 and below 2**63.
    """

    prompt_ids: list[list[int]]
    rows: list[list[int]]
    seeds: list[int]


def asked_for(
    texts: Texts, seed: int, prompts: Sequence[Prompt], *, step: int, samples_per_prompt: int, purpose: Purpose
) -> Asked:
    """What to ask for samples of prompts. The seed of each depends on (seed, purpose, step, prompt, sample) only.

    Raises:
        RunError: a prompt cannot be encoded.
    """
    prompt_ids = [texts.encode(prompt, step) for prompt in prompts]
    prompt_of = np.repeat(np.arange(len(prompts)), samples_per_prompt)
    numbers = np.array([prompt.index for prompt in prompts], np.int64)[prompt_of]
    keys = sequence_keys(seed, step, numbers, np.tile(np.arange(samples_per_prompt), len(prompts)), purpose)
    seeds = [key & (2**63 - 1) for key in keys.tolist()]
    return Asked(prompt_ids, [prompt_ids[row] for row in prompt_of], seeds)


# What vLLM made for a request, piece by piece, with the version of each.


@dataclass
class Made:
    """A response in the making.

    Attributes:
        tokens, log_probs: of the response as far as it is there.
        spans: which version made which of the tokens.
        ended_by: vLLM's word for why it ended; None: it goes on.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ended_by: str | None = None

    def add(self, piece: CompletionOutput, step: int) -> None:
        """Add the tokens that came.

        Args:
            piece: what vLLM gave since the last time.
            step: of the version that made it.
        """
        start = len(self.tokens)
        self.tokens += piece.token_ids
        self.log_probs += [
            entry[token].logprob for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=True)
        ]
        if self.spans and self.spans[-1][2] == step:
            start = self.spans.pop()[0]
        if len(self.tokens) > start:
            self.spans.append((start, len(self.tokens), step))
        self.ended_by = piece.finish_reason


def joined(made: Sequence[Made]) -> Responses:
    """The responses, in the same order.

    Raises:
        RunError: one of them came to no end of its own.
    """
    if odd := {str(one.ended_by) for one in made} - {"stop", "length"}:
        raise RunError(f"vLLM ended requests by {', '.join(sorted(odd))}, so they are no samples")
    if not all(one.tokens for one in made):
        raise RunError("vLLM ended a request without a token, so it is no sample")
    return Responses(
        TokenRows.of([one.tokens for one in made]),
        np.array([value for one in made for value in one.log_probs], np.float32),
        np.array([one.ended_by == "stop" for one in made], np.bool_),
        VersionSpans.of([one.spans for one in made]),
    )
