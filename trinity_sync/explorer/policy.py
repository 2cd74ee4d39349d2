"""What engines of vLLM have in common, wherever vLLM runs: the model that they are to hold, and what is asked for
samples. vLLM itself is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trinity_sync.config import dtype_name
from trinity_sync.explorer.sampling import sequence_keys
from trinity_sync.explorer.texts import Texts
from trinity_sync.models.unfilled import unfilled_model
from trinity_sync.samples.keys import Purpose
from trinity_sync.samples.record import Prompt
from trinity_sync.weights.tensors import saved_list, to_torch
from trinity_sync.weights.wire_cast import hold_fp32, kept_by_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
