"""Generates and scores samples with transformers. The engine inside the explorer actor; knows nothing of Ray.

The model starts empty: its weights come by sync, as every later version does. With an adapter that alone does, and
what it is added to is read from the model's folder. Nothing computed with the weights outlives a call of `generate`, so
a load leaves nothing stale behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trinity_sync.config import dtype_name
from trinity_sync.config.lora_settings import Adapter
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.explorer.texts import Responses, Texts, scored
from trinity_sync.models.adapter_layers import adapter_layers
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.models.attention import check_attention
from trinity_sync.models.families import IMAGES, auto_class
from trinity_sync.models.indexed_file import follow_indexes
from trinity_sync.samples.batch import SampleBatch, TokenRows
from trinity_sync.samples.record import FOR_TRAINING, GAMMA, LAST_SHIFT, MIX, Drawing, Prompt, Purpose, path
from trinity_sync.tasks.base import Task
from trinity_sync.weights.lora import held_adapter, saved_name
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import (
    cast_model,
    from_torch,
    hold_fp32,
    kept_by_class,
    state_digest,
    to_torch,
    version_tensors,
)
from trinity_sync.weights.wire import WireFormat, kept_names

if TYPE_CHECKING:
    pass
    from transformers import PreTrainedConfig, PreTrainedModel


class HFEngine(RolloutEngine):
    """A causal language model of transformers that samples and scores.

    Usage::

        engine = HFEngine(path, dtype="bf16", temperature=1.0, batch_size=512, response_length=3, seed=0)
        receiver = Receiver(engine.destinations())        # a load writes into these
        engine.after_load()
        batch = engine.generate(task.prompts(1, 32), task, step=1, samples_per_prompt=16, version=(0, 0))

    Same seed, step, prompts and weights: same samples, bit for bit, on the same machine with the same batches. How
    prompts are cut into batches and spread over engines changes no random number; it may change the logits in their
    last bits (matrix kernels and padding depend on the batch), and so, rarely, a token.

    Args:
        model_path: folder in Hugging Face format, or hub id. Config and tokenizer are read, weights only below an
            adapter.
        dtype: dtype in which the weights are held: ``bf16``, ``fp32`` or ``fp16``.
        temperature, top_k, top_p: see `SeededSampler`.
        batch_size: sequences that are generated at a time, at most.
        response_length: longest response in tokens.
        prompt_length: longest prompt in tokens; None: as long as the model's positions allow.
        truncate_prompts: cut longer ones on their left, rather than refuse them.
        chat_template: arguments of the tokenizer's chat template.
        seed: the run's seed.
        attn_implementation: the attention, as transformers names it.
        trust_remote_code: whether code that comes with the model may run.
        keep_fp32: parts of names of the tensors that are held in fp32 nevertheless; None: those that the model's class
            keeps so.
        adapter: the LoRA adapter that loads bring, without weights; the model's own are then read from the folder.
            None: loads bring the whole model.
        device: the device to generate on; None is the current GPU, or the CPU where there is none.

    Raises:
        ConfigError: there is no causal language model at the path, it has no end-of-sequence token, or transformers
            does not have this attention for it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        batch_size: int,
        response_length: int,
        prompt_length: int | None = None,
        truncate_prompts: bool = False,
        chat_template: Mapping[str, object] | None = None,
        seed: int,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        keep_fp32: Sequence[str] | None = None,
        adapter: Adapter | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._sampler = partial(SeededSampler, top_k=top_k, top_p=top_p)
        self._temperature = temperature
        self._batch_size = batch_size
        self._seed = seed
        self._adapter = adapter
        self._keep_fp32 = keep_fp32
        self._base: dict[str, torch.Tensor] = {}
        try:
            self._texts = Texts(
                model_path,
                response_length=response_length,
                prompt_length=prompt_length,
                trust_remote_code=trust_remote_code,
                truncate_prompts=truncate_prompts,
                chat_template=chat_template,
            )
            config = self._texts.config
            check_attention(config.to_dict(), attn_implementation)
            self.model = held_model(
                config,
                to_torch(dtype_name(dtype)),
                self._device,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                keep_fp32=keep_fp32,
                weights=model_path if adapter is not None or auto_class(config.to_dict()) == IMAGES else None,
            )
            if adapter is not None:
                self._base = version_tensors(self.model)
                add_adapter(adapter, self.model)
        except (OSError, ValueError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model.path={model_path} cannot be used to generate: {reason}") from error
        self._can_share_prefill = _can_share_prefill(self.model)
        # in place of what comes with the model: its sampling settings are not those of the run
        self.model.generation_config = GenerationConfig(
            max_new_tokens=response_length, do_sample=False, eos_token_id=self._texts.ends, pad_token_id=self._texts.pad
        )

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that a load overwrites, under `save_pretrained`'s names; tied ones once. Without a
        vision tower, which is read from the folder. With an adapter its own, under peft's.

        Raises:
            ConfigError: some are saved in another form than the model holds, so a load cannot write them.
        """
        if self._adapter is None:
            try:
                return version_tensors(self.model)
            except RunError as error:
                raise ConfigError(f"model: versions of it cannot be written in place: {error}") from error
        return {saved_name(name): tensor for name, tensor in held_adapter(self.model).items()}

    def base_digest(self, wire_dtype: str) -> str | None:
        """Return the version digest of the base as it was read from the folder; None without an adapter."""
        if self._adapter is None:
            return None
        patterns = kept_by_class(self.model, wire_dtype) if self._keep_fp32 is None else self._keep_fp32
        return state_digest(self._base, WireFormat(wire_dtype, kept_names(patterns, self._base)))

    def after_load(self) -> None:
        """Take note that new weights are in. Nothing has to be dropped: no keys and values outlive a call."""

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        task: Task,
        *,
        step: int,
        samples_per_prompt: int,
        version: tuple[int, int],
        drawing: Drawing = FOR_TRAINING,
    ) -> SampleBatch:
        """Make scored samples for the prompts, sorted by prompt (as given) and sample.

        Args:
            prompts: the prompts, at least one.
            task: judges the responses, in that order.
            step: the trainer step that the samples are for.
            samples_per_prompt: samples of each prompt.
            version: (attempt, step) of the weights that are loaded.
            drawing: how they are drawn.

        Raises:
            RunError: a prompt has characters without a token, no token, too many, or needs a chat template that the
                tokenizer lacks; or the task fails to judge a response.
        """
        prompt_ids = [self._texts.encode(prompt, step) for prompt in prompts]
        prompt_of = np.repeat(np.arange(len(prompts)), samples_per_prompt)
        sample_of = np.tile(np.arange(samples_per_prompt), len(prompts))
        numbers = np.array([prompt.index for prompt in prompts], np.int64)[prompt_of]
        keys = sequence_keys(self._seed, step, numbers, sample_of, drawing.purpose)
        temperature = self._temperature if drawing.temperature is None else drawing.temperature
        parts = []
        for first in range(0, len(keys), self._batch_size):
            part = slice(first, first + self._batch_size)
            rows, counts = np.unique(prompt_of[part], return_counts=True)
            parts.append(self._generate([prompt_ids[row] for row in rows], counts, keys[part], temperature))
        responses = Responses(
            TokenRows.concatenate([part.rows for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.finished for part in parts]),
        )
        return scored(self._texts, task, prompts, prompt_ids, responses, step=step, version=version)

    def _generate(
        self, prompts: Sequence[Sequence[int]], counts: NDArray[np.int64], keys: torch.Tensor, temperature: float
    ) -> Responses:
        """Make one batch: `counts[i]` responses to prompt i, one after the other."""
        width = max(map(len, prompts))
        # padding stands on the left, so that all responses begin at the same place
        padded = torch.tensor([[self._texts.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = padded.to(self._device)
        mask = (torch.arange(width) >= width - lengths[:, None]).to(self._device, torch.int64)
        row_of = torch.from_numpy(np.repeat(np.arange(len(prompts)), counts)).to(self._device)
        sampler = self._sampler(keys.to(self._device), temperature=temperature)
        output = self.model.generate(
            ids[row_of],
            attention_mask=mask[row_of],
            logits_processor=LogitsProcessorList([sampler]),
            **self._shared_prefill(ids, mask, row_of),
        )
        tokens = output[:, width:].cpu().numpy()
        ends = np.isin(tokens, self._texts.ends)
        finished: NDArray[np.bool_] = np.any(ends, axis=1)
        made = np.where(finished, ends.argmax(axis=1) + 1, tokens.shape[1])
        kept = np.arange(tokens.shape[1]) < made[:, None]
        return Responses(TokenRows.joined(tokens[kept], made), sampler.log_probs().cpu().numpy()[kept], finished)

    def _shared_prefill(self, ids: torch.Tensor, mask: torch.Tensor, row_of: torch.Tensor) -> dict[str, DynamicCache]:
        """Keys and values of all prompt tokens but the last, worked out once per prompt and copied for its samples.

        The last token is left to `generate`, which wants at least one to begin with.
        """
        if not self._can_share_prefill or ids.shape[1] == 1 or len(row_of) == len(ids):
            return {}
        cache = DynamicCache(config=self.model.config)
        seen = mask[:, :-1]
        self.model(
            ids[:, :-1],
            attention_mask=seen,
            position_ids=(seen.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(row_of)
        return {"past_key_values": cache}


def _can_share_prefill(model: PreTrainedModel) -> bool:
    """Tell whether the model keeps plain keys and values, which can be worked out ahead and copied per sequence."""
    wanted = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    layers = DynamicCache(config=model.config).layers
    return (
        wanted <= inspect.signature(model.forward).parameters.keys()
        and bool(layers)
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    )


# The model that `HFEngine` holds: without weights, or with those of the folder below an adapter.


def held_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attn_implementation: str,
    trust_remote_code: bool,
    keep_fp32: Sequence[str] | None,
    weights: str | None,
) -> PreTrainedModel:
    """Make the model.

    Args:
        config: of the model.
        dtype: in which it computes.
        device: where it is.
        attn_implementation, trust_remote_code, keep_fp32: as for `HFEngine`.
        weights: folder in Hugging Face format, or hub id, from which they are read; None: they are not filled.

    Raises:
        ConfigError: a tensor that is to be kept in fp32 cannot be, or the model does not compute with it.
        OSError, ValueError: transformers has no such model, or no weights are there.
    """
    if weights is None:
        model = unfilled_model(
            config, dtype, device, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    else:
        follow_indexes()  # as trainers do
        # What is kept whole must not have been rounded before.
        kind = getattr(transformers, auto_class(config.to_dict()))
        model = kind.from_pretrained(
            weights,
            config=config,
            dtype=dtype if keep_fp32 is None else torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        ).to(device)
        if keep_fp32 is not None:
            cast_model(model, dtype, keep_fp32)
        model.eval().requires_grad_(False)
    if dtype is not torch.float32:
        kept = hold_fp32(model, kept_by_class(model, from_torch(dtype)) if keep_fp32 is None else keep_fp32)
        if kept:
            _check_computes(model, dtype, kept)
    return model


def add_adapter(adapter: Adapter, model: PreTrainedModel) -> None:
    """Put an adapter without weights into a model, in the dtypes of what it is added to."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_rslora=adapter.rslora,
        target_modules=list(adapter_layers(model, adapter.targets, saved=adapter.path is not None).names),
        bias="none",
        inference_mode=True,
    )
    get_peft_model(model, config, autocast_adapter_dtype=False)
    model.eval().requires_grad_(False)


@torch.inference_mode()
def _check_computes(model: PreTrainedModel, dtype: torch.dtype, kept: Sequence[str]) -> None:
    """Check that the model computes with what is kept in fp32, by a pass whose result is thrown away.

    Raises:
        ConfigError: it does not, as a linear layer in another dtype than what it is given.
    """
    try:
        model(torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    except torch.OutOfMemoryError:  # nothing of the kind
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"sync.keep_fp32 keeps {listed(kept)} in fp32, with which this model cannot compute in explorer.dtype="
            f"{str(dtype).removeprefix('torch.')}: {' '.join(str(error).split())}; set explorer.dtype=fp32, or leave "
            "them out"
        ) from error


# Sampling whose random numbers depend on (seed, step, prompt, sample, position) and on nothing else.


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
