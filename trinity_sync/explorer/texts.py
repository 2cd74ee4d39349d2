"""The base of engines that generate texts: prompts become tokens, responses become scored samples. A subclass makes the
tokens in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from trinity_sync.config import dtype_name
from trinity_sync.errors import ConfigError, RunError, in_one_line
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.models.tokens import read_tokens
from trinity_sync.samples.batch import SampleBatch, Span, TokenRows, VersionSpans
from trinity_sync.samples.keys import path
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt, Purpose
from trinity_sync.tasks.base import Response, Task
from trinity_sync.tasks.encoding import PromptEncoder, positions_of
from trinity_sync.tasks.rewards import judge
from trinity_sync.weights.tensors import hold_fp32, kept_by_class, saved_list, to_torch

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from trinity_sync.integrations.vllm.target import WorkerTarget
    from trinity_sync.sync.arrivals import Shapes


class TextSettings(TypedDict):
    """The keyword arguments of `TextEngine`."""

    dtype: str
    temperature: float
    top_k: NotRequired[int]
    top_p: NotRequired[float]
    batch_size: int
    response_length: int
    prompt_length: NotRequired[int | None]
    truncate_prompts: NotRequired[bool]
    chat_template: NotRequired[Mapping[str, object] | None]
    seed: int
    trust_remote_code: NotRequired[bool]
    keep_fp32: NotRequired[Sequence[str] | None]


class SampleRequest(NamedTuple):
    """The tokens and random numbers of the samples that an engine generates in one call."""

    step: int  # the trainer step that the samples are for
    version: tuple[int, int]  # (attempt, step) of the loaded weights
    prompt_ids: list[list[int]]  # tokens of each prompt
    # Int64 of shape (samples,), each sample's row in `prompt_ids`; samples of a prompt are neighbours.
    prompt_of: NDArray[np.int64]
    keys: torch.Tensor  # int64 of shape (samples,), see `sequence_keys`
    temperature: float  # logits are divided by it; 0 takes the most likely token


class Responses(NamedTuple):
    """The responses to a request, sample by sample. `rows`: the tokens of each response, its end token included.
    `log_probs`: float32, natural; one for each token of `rows`, in the same order. `spans`: the versions that made the
    tokens; None: `SampleRequest.version` made all.
    """

    rows: TokenRows
    log_probs: NDArray[np.float32]
    finished: NDArray[np.bool_]
    spans: VersionSpans | None = None


def sequence_keys(
    seed: int, step: int, prompts: ArrayLike, samples: ArrayLike, purpose: Purpose = Purpose.SAMPLING
) -> torch.Tensor:
    """Compute the keys from which the random numbers of sequences derive, int64 of shape (sequences,) on the CPU.
    `step`: trainer step that the samples are for. `prompts`: integers of shape (sequences,), `Prompt.index` of each.
    `samples`: integers of shape (sequences,), number of each within its prompt's group.
    """
    keys = path(seed, purpose, step, prompts, samples)
    return torch.from_numpy(keys.view(np.int64))


class TextEngine(RolloutEngine):
    """A causal language model that samples and scores. A subclass implements `respond`.

    Args:
        model_path: folder in Hugging Face format, or hub id, of config and tokenizer.
        dtype: dtype of the weights: ``bf16``, ``fp32`` or ``fp16``.
        temperature: logits are divided by it; 0 always takes the most likely token.
        top_k: sample from so many most likely tokens; 0: from all.
        top_p: then from the most likely tokens that have this probability together; 1: from all.
        batch_size: sequences that are generated at a time, at most.
        response_length: longest response in tokens.
        prompt_length: longest prompt in tokens; None: as long as the model's positions allow.
        truncate_prompts: cut the left end of longer prompts instead of refusing them.
        chat_template: arguments of the tokenizer's chat template.
        trust_remote_code: whether code that comes with the model may run.
        keep_fp32: parts of the names of tensors that stay in fp32; None: those that the model's class names.

    Raises:
        ConfigError: transformers cannot read the config or the tokenizer; there is no end-of-sequence token; no prompt
            would fit; or the tokenizer's chat template does not read an argument.
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
        trust_remote_code: bool = False,
        keep_fp32: Sequence[str] | None = None,
    ) -> None:
        self._model_path = model_path
        self._dtype = dtype_name(dtype)
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._batch_size = batch_size
        self._response_length, self._prompt_length = response_length, prompt_length
        self._seed = seed
        self._trust_remote_code = trust_remote_code
        self._keep_fp32 = keep_fp32
        try:
            tokens = read_tokens(model_path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise unusable_model(model_path, error) from error
        self._tokenizer, self._config = tokens.tokenizer, tokens.config
        self._positions = positions_of(self._config)
        self._encoder = PromptEncoder(
            self._tokenizer,
            response_length=response_length,
            prompt_length=prompt_length,
            positions=self._positions,
            truncate=truncate_prompts,
            chat_template=chat_template,
            embedded=tokens.embedded,
        )
        self._ends = tokens.needed_ends(model_path)
        pad = self._tokenizer.pad_token_id
        self._pad: int = self._ends[0] if pad is None else pad

    def after_load(self) -> None:
        """Do nothing: no keys and values outlive a call of `generate`, or loading has dropped them."""

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
        """Make scored samples for the prompts; see `RolloutEngine.generate`. The random numbers of a sample depend on
        (seed, purpose, step, prompt, sample) only. Raises RunError: a prompt has characters without a token, no token,
        too many, or needs a chat template that the tokenizer lacks; or the task fails to judge a response.
        """
        prompt_ids = [self._encoder.encode(prompt, f"prompt {prompt.index} of step {step}") for prompt in prompts]
        prompt_of = np.repeat(np.arange(len(prompts)), samples_per_prompt)
        numbers = np.array([prompt.index for prompt in prompts], np.int64)[prompt_of]
        sample_of = np.tile(np.arange(samples_per_prompt), len(prompts))
        keys = sequence_keys(self._seed, step, numbers, sample_of, drawing.purpose)
        temperature = self._temperature if drawing.temperature is None else drawing.temperature
        responses = self.respond(SampleRequest(step, version, prompt_ids, prompt_of, keys, temperature))
        texts = self._decode(responses)
        of_prompts = zip(prompt_of.tolist(), texts, responses.finished.tolist(), strict=True)
        verdicts = judge(task, [Response(prompts[row], text, done) for row, text, done in of_prompts], step=step)
        spans = responses.spans
        return SampleBatch(
            steps=np.full(len(texts), step, np.int64),
            prompts=numbers,
            samples=sample_of,
            version_attempts=np.full(len(texts), version[0], np.int64),
            explorers=np.full(len(texts), ""),
            rewards=np.array([verdict.reward for verdict in verdicts], np.float64),
            exact=np.array([np.nan if verdict.exact is None else verdict.exact for verdict in verdicts], np.float64),
            parts=_parts([verdict.parts or {} for verdict in verdicts]),
            errors=tuple(verdict.error for verdict in verdicts),
            finished=responses.finished,
            texts=tuple(texts),
            prompt_of=prompt_of,
            prompt_rows=TokenRows.of(prompt_ids),
            responses=responses.rows,
            spans=VersionSpans.whole(responses.rows.lengths, version[1]) if spans is None else spans,
            log_probs=responses.log_probs,
        )

    @abstractmethod
    def respond(self, request: SampleRequest) -> Responses:
        """Generate the responses to a request, in the order of its samples."""

    def _decode(self, responses: Responses) -> list[str]:
        """Return texts without the final end-of-sequence token. Other special tokens stay, for the rewards to see."""
        ids, offsets = responses.rows.ids.tolist(), responses.rows.offsets
        bounds = zip(offsets[:-1].tolist(), (offsets[1:] - responses.finished).tolist(), strict=True)
        rows = [ids[start:stop] for start, stop in bounds]
        texts: list[str] = self._tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
        return texts


def _parts(of_samples: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for parts in of_samples for name in parts)
    return {name: np.array([parts.get(name, np.nan) for parts in of_samples], np.float64) for name in names}


def unusable_model(model_path: str, error: Exception) -> ConfigError:
    """Make the error for a model that cannot be read or built."""
    return ConfigError(f"model.path={model_path} cannot be used to generate: {in_one_line(error)}")


# Engines that generate with vLLM, in processes of their own or in a server. vLLM is not imported here.


class VLLMBase(TextEngine):
    """A causal language model of vLLM. vLLM's own sampler draws the tokens, from seeds that follow from the run's.
    `model_path`, `settings`: as for `TextEngine`. `attn_implementation`, `adapter`: of `HFEngine`; not used.
    """

    def __init__(
        self,
        model_path: str,
        *,
        attn_implementation: str = "",
        adapter: object = None,
        **settings: Unpack[TextSettings],
    ) -> None:
        super().__init__(model_path, **settings)
        self._torch_dtype = to_torch(self._dtype)
        # in which vLLM gives log-probs of the softmax over all tokens at the temperature
        self._log_probs_mode = "raw_logprobs" if self._temperature in (0.0, 1.0) else "processed_logprobs"
        self._target: WorkerTarget | None = None

    def _drop_target(self) -> None:
        """Disconnect the workers that an attempt before has used."""
        if self._target is not None:
            self._target.close()
            self._target = None

    def _tensor_shapes(self) -> Shapes:
        """Return dtype and shape of the tensors of a version."""
        model = unfilled_model(
            self._config,
            self._torch_dtype,
            "meta",
            attn_implementation="eager",
            trust_remote_code=self._trust_remote_code,
        )
        hold_fp32(model, kept_by_class(model, self._dtype) if self._keep_fp32 is None else self._keep_fp32)
        return {name: (saved.dtype, saved.shape) for name, saved in saved_list(model).items()}


def sample_rows(request: SampleRequest) -> list[tuple[list[int], int]]:
    """Return the prompt's tokens and the seed, at least 0 and below 2**63, of each sample."""
    rows = [request.prompt_ids[row] for row in request.prompt_of]
    return [(row, key & (2**63 - 1)) for row, key in zip(rows, request.keys.tolist(), strict=True)]


@dataclass
class VLLMResponse:
    """One response, complete or not. `spans`: the versions that made the tokens. `finish_reason`: vLLM's word for why
    it ended; None: it goes on.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: CompletionOutput, step: int) -> None:
        """Append the tokens of vLLM's latest output, made by the version of a step."""
        start = len(self.tokens)
        self.tokens += piece.token_ids
        self.log_probs += [
            entry[token].logprob for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=True)
        ]
        if self.spans and self.spans[-1][2] == step:
            start = self.spans.pop()[0]
        if len(self.tokens) > start:
            self.spans.append((start, len(self.tokens), step))
        self.finish_reason = piece.finish_reason


def joined(responses: Sequence[VLLMResponse]) -> Responses:
    """Return the responses as arrays, in the same order."""
    if odd := {str(one.finish_reason) for one in responses} - {"stop", "length"}:
        raise RunError(f"vLLM ended requests by {', '.join(sorted(odd))}, so they are not samples")
    if not all(one.tokens for one in responses):
        raise RunError("vLLM ended a request without a token, so it is not a sample")
    return Responses(
        TokenRows.of([one.tokens for one in responses]),
        np.array([value for one in responses for value in one.log_probs], np.float32),
        np.array([one.finish_reason == "stop" for one in responses], np.bool_),
        VersionSpans.of([one.spans for one in responses]),
    )
