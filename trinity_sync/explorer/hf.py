"""An engine that samples and scores with transformers, inside the explorer actor. Knows nothing of Ray.

The model starts without weights; each version comes by sync. With an adapter, versions bring the adapter only, and its
base is read from the model's folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
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

from trinity_sync.config.lora_settings import Adapter
from trinity_sync.errors import ConfigError, RunError, in_one_line
from trinity_sync.explorer.texts import Responses, SampleRequest, TextEngine, TextSettings, unusable_model
from trinity_sync.models.adapter_layers import adapter_layers
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.models.families import IMAGES, auto_class, check_attention
from trinity_sync.models.files import follow_indexes
from trinity_sync.samples.batch import TokenRows
from trinity_sync.samples.keys import GAMMA, LAST_SHIFT, MIX
from trinity_sync.weights import tensors
from trinity_sync.weights.lora import held_adapter, saved_name
from trinity_sync.weights.shards import listed
from trinity_sync.weights.wire import WireFormat, kept_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class HFEngine(TextEngine):
    """A causal language model of transformers that samples and scores.

    Usage::

        engine = HFEngine(path, dtype="bf16", temperature=1.0, batch_size=512, response_length=3, seed=0)
        receiver = Receiver(engine.destinations())        # a load writes into these
        engine.after_load()
        batch = engine.generate(task.prompts(1, 32), task, step=1, samples_per_prompt=16, version=(0, 0))

    Same seed, step, prompts and weights: same samples, bit for bit, on the same machine with the same batches. Other
    batches, or another number of engines, change no random number. They may change the last bits of the logits (matrix
    kernels and padding depend on the batch), and so, rarely, a token.

    Args:
        model_path: as for `TextEngine`; weights are read from there only where versions do not bring all of them.
        adapter: the LoRA adapter that versions bring, without weights; None: versions bring the whole model.
        device: the device to generate on; None is the current GPU, or the CPU where there is none.
        settings: as for `TextEngine`.

    Raises:
        ConfigError: as `TextEngine`; or there is no causal language model at the path, or transformers does not have
            this attention for it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        attn_implementation: str = "sdpa",
        adapter: Adapter | None = None,
        device: str | torch.device | None = None,
        **settings: Unpack[TextSettings],
    ) -> None:
        super().__init__(model_path, **settings)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._sampler = partial(SeededSampler, top_k=self._top_k, top_p=self._top_p)
        self._adapter = adapter
        self._base: dict[str, torch.Tensor] = {}
        fields = self._config.to_dict()
        try:
            check_attention(fields, attn_implementation)
            self.model = held_model(
                self._config,
                tensors.to_torch(self._dtype),
                self._device,
                attn_implementation=attn_implementation,
                trust_remote_code=self._trust_remote_code,
                keep_fp32=self._keep_fp32,
                weights=model_path if adapter is not None or auto_class(fields) == IMAGES else None,
            )
            if adapter is not None:
                self._base = tensors.version_tensors(self.model)
                add_adapter(adapter, self.model)
        except (OSError, ValueError, SafetensorError) as error:
            raise unusable_model(model_path, error) from error
        self._can_share_prefill = _can_share_prefill(self.model)
        # replaces the model's own, whose sampling settings are not those of the run
        self.model.generation_config = GenerationConfig(
            max_new_tokens=self._response_length, do_sample=False, eos_token_id=self._ends, pad_token_id=self._pad
        )

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that a load overwrites: of the model without a vision tower, under the names of
        `save_pretrained`, or of the adapter, under those of peft.
        """
        if self._adapter is None:
            try:
                return tensors.version_tensors(self.model)
            except RunError as error:
                raise ConfigError(f"model: versions of it cannot be written in place: {error}") from error
        return {saved_name(name): tensor for name, tensor in held_adapter(self.model).items()}

    def base_digest(self, wire_dtype: str) -> str | None:
        if self._adapter is None:
            return None
        patterns = tensors.kept_by_class(self.model, wire_dtype) if self._keep_fp32 is None else self._keep_fp32
        return tensors.state_digest(self._base, WireFormat(wire_dtype, kept_names(patterns, self._base)))

    @torch.inference_mode()
    def respond(self, request: SampleRequest) -> Responses:
        parts = []
        for first in range(0, len(request.keys), self._batch_size):
            part = slice(first, first + self._batch_size)
            rows, counts = np.unique(request.prompt_of[part], return_counts=True)
            prompts = [request.prompt_ids[row] for row in rows]
            parts.append(self._generate(prompts, counts, request.keys[part], request.temperature))
        return Responses(
            TokenRows.concatenate([part.rows for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.finished for part in parts]),
        )

    def _generate(
        self, prompts: Sequence[Sequence[int]], counts: NDArray[np.int64], keys: torch.Tensor, temperature: float
    ) -> Responses:
        """Generate one batch: `counts[i]` responses to prompt i, one after the other."""
        width = max(map(len, prompts))
        # padded on the left, so that all responses begin at the same place
        padded = torch.tensor([[self._pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
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
        ends = np.isin(tokens, self._ends)
        finished: NDArray[np.bool_] = np.any(ends, axis=1)
        made = np.where(finished, ends.argmax(axis=1) + 1, tokens.shape[1])
        kept = np.arange(tokens.shape[1]) < made[:, None]
        return Responses(TokenRows.joined(tokens[kept], made), sampler.log_probs().cpu().numpy()[kept], finished)

    def _shared_prefill(self, ids: torch.Tensor, mask: torch.Tensor, row_of: torch.Tensor) -> dict[str, DynamicCache]:
        """Compute keys and values once per prompt and copy them for its samples.

        Leaves out the last token of each prompt: `generate` needs at least one to begin with.
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
    """Tell whether the model caches plain keys and values, which can be computed ahead and copied per sequence."""
    wanted = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    layers = DynamicCache(config=model.config).layers
    return (
        wanted <= inspect.signature(model.forward).parameters.keys()
        and bool(layers)
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    )


# Building the model.


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
    """Build the model that an engine holds. Raises OSError, ValueError if transformers has no such model, or there are
    no weights.
    """
    if weights is None:
        model = unfilled_model(
            config, dtype, device, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    else:
        follow_indexes()  # as trainers do
        # fp32 first: the tensors of keep_fp32 must not be rounded
        kind = getattr(transformers, auto_class(config.to_dict()))
        model = kind.from_pretrained(
            weights,
            config=config,
            dtype=dtype if keep_fp32 is None else torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        ).to(device)
        if keep_fp32 is not None:
            tensors.cast_model(model, dtype, keep_fp32)
        model.eval().requires_grad_(False)
    if dtype is not torch.float32:
        kept = tensors.hold_fp32(
            model, tensors.kept_by_class(model, tensors.from_torch(dtype)) if keep_fp32 is None else keep_fp32
        )
        if kept:
            _check_computes(model, dtype, kept)
    return model


def add_adapter(adapter: Adapter, model: PreTrainedModel) -> None:
    """Add an adapter without weights to a model, in the dtypes of its layers."""
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
    """Check by one forward pass that the model computes with the tensors kept in fp32: a linear layer, say, does not
    take inputs of another dtype.
    """
    try:
        model(torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    except torch.OutOfMemoryError:  # a RuntimeError, too
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"sync.keep_fp32 keeps {listed(kept)} in fp32, with which this model cannot compute in explorer.dtype="
            f"{str(dtype).removeprefix('torch.')}: {in_one_line(error)}; set explorer.dtype=fp32, or leave "
            "them out"
        ) from error


# Sampling. The random numbers depend on (seed, purpose, step, prompt, sample, position) only.


CHUNK_ELEMENTS = 1 << 23
"""Probabilities that are accumulated at a time, in float64: bounds temporary memory for large vocabularies."""


def uniforms(keys: torch.Tensor, position: int) -> torch.Tensor:
    """Return one number per key, uniform in the open interval (0, 1): the middles of 2**52 equal cells. `keys`: int64
    of any shape and device, from `sequence_keys`. Returns float64 of the same shape, on the same device.
    """
    value = keys + _signed((position + 1) * GAMMA)
    for shift, factor in MIX:
        value = (value ^ _shift_right(value, shift)) * _signed(factor)
    value = value ^ _shift_right(value, LAST_SHIFT)
    return (_shift_right(value, 12).double() + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    """Return the int64 that has the bits of an unsigned number modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros; torch shifts in the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def inverse_cdf(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the token at which the cumulative softmax passes a number. Tokens of probability 0 are never chosen.
    `logits`: float32 of shape (sequences, vocabulary); -inf for excluded tokens. `numbers`: float64 of shape
    (sequences,), in (0, 1). Returns int64 of shape (sequences,).
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
    """Chooses the next tokens, forces `generate` to take them, and records their log-probabilities. For one call.

    Usage::

        sampler = SeededSampler(keys, temperature=1.0, top_k=0, top_p=1.0)
        ids = model.generate(prompts, do_sample=False, logits_processor=LogitsProcessorList([sampler]), ...)
        log_probs = sampler.log_probs()

    Args:
        keys: int64 of shape (sequences,), from `sequence_keys`, on the device of the logits.
        temperature, top_k, top_p: as for `TextEngine`. Of several most likely tokens the first counts; where the last
            of `top_k` is tied, all of its tokens are kept.
    """

    def __init__(self, keys: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self._keys = keys
        self._temperature = temperature
        self._truncations = [TopKLogitsWarper(top_k)] if top_k else []
        self._truncations += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that are 0 for the chosen token and -inf for the others. `input_ids`: int64 of shape
        (sequences, length so far). `scores`: the model's logits, of shape (sequences, vocabulary).
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
        """Return natural log-probabilities of the chosen tokens, float32 of shape (sequences, tokens so far).

        They are of the softmax over all tokens at the temperature (at 1 where it is 0), before top-k and top-p: what a
        trainer recomputes. After the end of a sequence they mean nothing.
        """
        return torch.stack(self._log_probs, dim=1)
