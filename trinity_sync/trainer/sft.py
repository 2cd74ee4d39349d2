"""The data of a supervised run: pairs of a file, tokenised with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trinity_sync.actors.explorer import LoadReport
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import PairBatch
from trinity_sync.samples.excerpt import Line

if TYPE_CHECKING:
    from trinity_sync.tasks.pairs import PairsTask


class PairsData:
    """A step's batch is the file's pairs of that step.

    Args:
        task: gives the pairs.
        model_path: whose tokenizer is used.
        batch_size: pairs per step.
        max_length: longest prompt and response together, tokens.
        trust_remote_code: run code that comes with the tokenizer.
    """

    def __init__(
        self, task: PairsTask, model_path: str, *, batch_size: int, max_length: int, trust_remote_code: bool
    ) -> None:
        from transformers import AutoTokenizer

        self._task = task
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._batch_size = batch_size
        self._max_length = max_length

    def batch(self, step: int) -> PairBatch:
        """Return the pairs of a step, with an end-of-sequence token after each response.

        Raises:
            RunError: a pair is empty or longer than `max_length`; names its place in the file.
        """
        prompts, responses = [], []
        for pair in self._task.pairs(step, self._batch_size):
            prompt = self._prompt_ids(pair.prompt)
            response = self._tokenizer(pair.response, add_special_tokens=False)["input_ids"] + [
                self._tokenizer.eos_token_id
            ]
            if not prompt:
                raise RunError(f"{pair.where}: the prompt has no token")
            if len(prompt) + len(response) > self._max_length:
                raise RunError(
                    f"{pair.where}: {len(prompt) + len(response)} tokens, task.max_length={self._max_length}; "
                    f"raise it or shorten the pair"
                )
            prompts.append(prompt)
            responses.append(response)
        return PairBatch.of(prompts, responses)

    def _prompt_ids(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        return list(
            self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def advantages(self, batch: PairBatch) -> None:
        """Return nothing: the supervised loss has no advantages."""

    def load(self, version: Version) -> list[LoadReport]:
        """Report no load: nobody generates."""
        return []

    def excerpt(self, batch: PairBatch, advantages: object, groups: int) -> list[Line]:
        """Write out nothing: nobody generates."""
        return []
