"""Between texts and tokens: prompts encoded and checked, responses decoded, samples scored. For every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import ConfigError
from trinity_sync.models.tokens import read_tokens
from trinity_sync.samples.batch import SampleBatch, TokenRows, VersionSpans
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Response, Task
from trinity_sync.tasks.encoding import PromptEncoder, positions_of
from trinity_sync.tasks.rewards import judge


class Texts:
    """What a model's folder says of its texts.

    Args:
        model_path: folder in Hugging Face format, or hub id.
        response_length: longest response in tokens.
        prompt_length: longest prompt in tokens; None: as long as the model's positions allow.
        trust_remote_code: whether code that comes with the model may run.
        truncate_prompts: cut longer ones on their left, rather than refuse them.
        chat_template: arguments of the tokenizer's chat template.

    Attributes:
        config: of the model.
        ends: tokens that end a response.
        pad: token that fills up.
        positions: of the model, in tokens; None where its config does not say.

    Raises:
        ConfigError: transformers cannot read the config or the tokenizer; there is no end-of-sequence token; or as
            `PromptEncoder`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        response_length: int,
        prompt_length: int | None,
        trust_remote_code: bool,
        truncate_prompts: bool = False,
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        try:
            tokens = read_tokens(model_path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model.path={model_path} cannot be used to generate: {reason}") from error
        self._tokenizer, self.config = tokens.tokenizer, tokens.config
        self.positions = positions_of(self.config)
        self._encoder = PromptEncoder(
            self._tokenizer,
            response_length=response_length,
            prompt_length=prompt_length,
            positions=self.positions,
            truncate=truncate_prompts,
            chat_template=chat_template,
            embedded=tokens.embedded,
        )
        self.ends = tokens.needed_ends(model_path)
        pad = self._tokenizer.pad_token_id
        self.pad: int = self.ends[0] if pad is None else pad

    def encode(self, prompt: Prompt, step: int) -> list[int]:
        """The tokens of a prompt, cut on their left where that is asked for.

        Args:
            prompt: a text, or a chat.
            step: for errors.

        Raises:
            RunError: as `PromptEncoder.encode`.
        """
        return self._encoder.encode(prompt, f"prompt {prompt.index} of step {step}")

    def decode(self, responses: TokenRows, finished: NDArray[np.bool_]) -> list[str]:
        """Texts without the final end-of-sequence token. Other special tokens stay: rewards see all that was said."""
        ids = responses.ids.tolist()
        bounds = zip(responses.offsets[:-1].tolist(), (responses.offsets[1:] - finished).tolist(), strict=True)
        rows = [ids[start:stop] for start, stop in bounds]
        texts: list[str] = self._tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
        return texts


class Responses(NamedTuple):
    """What an engine made for prompts, in any order of samples.

    Attributes:
        rows: the tokens of each response, its end included.
        log_probs: float32, natural; one for each token of `rows`, in the same order.
        finished: whether each came to an end.
        spans: which version made which tokens; None: all were made by one.
    """

    rows: TokenRows
    log_probs: NDArray[np.float32]
    finished: NDArray[np.bool_]
    spans: VersionSpans | None = None


def scored(
    texts: Texts,
    task: Task,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    responses: Responses,
    *,
    step: int,
    version: tuple[int, int],
) -> SampleBatch:
    """The samples, with the task's judgement of each.

    Args:
        texts: decode the responses.
        task: judges them.
        prompts, prompt_ids: the prompts and their tokens.
        responses: as many of each prompt, prompt by prompt.
        step: the trainer step that they are for.
        version: (attempt, step) of the weights that made them, where `responses` does not say.

    Raises:
        RunError: the task fails to judge a response, and that is to end the run.
    """
    count = len(responses.rows) // len(prompts)
    prompt_of = np.repeat(np.arange(len(prompts)), count)
    spoken = texts.decode(responses.rows, responses.finished)
    asked = zip(prompt_of.tolist(), spoken, responses.finished.tolist(), strict=True)
    verdicts = judge(task, [Response(prompts[row], text, done) for row, text, done in asked], step=step)
    total = len(prompt_of)
    return SampleBatch(
        steps=np.full(total, step, np.int64),
        prompts=np.array([prompt.index for prompt in prompts], np.int64)[prompt_of],
        samples=np.tile(np.arange(count), len(prompts)),
        version_attempts=np.full(total, version[0], np.int64),
        explorers=np.full(total, ""),
        rewards=np.array([verdict.reward for verdict in verdicts], np.float64),
        exact=np.array([np.nan if verdict.exact is None else verdict.exact for verdict in verdicts], np.float64),
        errors=tuple(verdict.error for verdict in verdicts),
        finished=responses.finished,
        texts=tuple(spoken),
        prompt_of=prompt_of,
        prompt_rows=TokenRows.of(prompt_ids),
        responses=responses.rows,
        spans=VersionSpans.whole(responses.rows.lengths, version[1]) if responses.spans is None else responses.spans,
        log_probs=responses.log_probs,
    )
