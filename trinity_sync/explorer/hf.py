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
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trinity_sync.config import dtype_name
from trinity_sync.config.lora import Adapter
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.explorer.hf_model import add_adapter, held_model
from trinity_sync.explorer.sampling import SeededSampler, sequence_keys
from trinity_sync.explorer.texts import Responses, Texts, scored
from trinity_sync.models.attention import check_attention
from trinity_sync.models.families import IMAGES, auto_class
from trinity_sync.samples.batch import SampleBatch, TokenRows
from trinity_sync.samples.drawing import FOR_TRAINING, Drawing
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Task
from trinity_sync.weights.lora import held_adapter, saved_name
from trinity_sync.weights.tensors import state_digest, to_torch, version_tensors
from trinity_sync.weights.wire import Wire, kept_names
from trinity_sync.weights.wire_cast import kept_by_class

if TYPE_CHECKING:
    pass


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
        return state_digest(self._base, Wire(wire_dtype, kept_names(patterns, self._base)))

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
