"""Pairs of prompt and response from a JSON Lines or Parquet file, for supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trinity_sync.samples.record import Message, Prompt
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.rows import FileExamples, FilePaths, FileRows, Row


class TextPair(NamedTuple):
    """A prompt and its response. `prompt`: a text, or a list of chat messages. `where`: place in the file, as in
    ``train.jsonl:17``.
    """

    prompt: str | list[Message]
    response: str
    where: str


class PairsTask(FileExamples[TextPair]):
    """One pair per line or row; each pass over the file has another order.

    Args:
        prompt_key: field of the prompt, a text or a list of chat messages.
        seed: the run's seed; the pairs are a pure function of the files, the seed and the step.
        max_length: longest prompt and response together in tokens, for the trainer.
        chat_template: arguments of the tokenizer's chat template.

    Raises:
        ConfigError: a file is not as described; names file and line.
    """

    def __init__(
        self,
        path: FilePaths,
        prompt_key: str,
        response_key: str,
        seed: int,
        *,
        max_length: int | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        self.max_length = max_length
        self._prompt_key, self._response_key = prompt_key, response_key
        keys = {"task.prompt_key": prompt_key, "task.response_key": response_key}
        rows = FileRows(path, seed=seed, shuffle=True, columns=keys.values(), keys=keys)
        super().__init__(rows, self._pair)

    def _pair(self, row: Row) -> TextPair:
        prompt = self._rows.text_or_messages(row, self._prompt_key)
        response = self._rows.text(row, self._response_key)
        return TextPair(prompt if isinstance(prompt, str) else list(prompt), response, row.where)


Item = Prompt | TextPair | Conversation


def shared_rows(trained: Iterable[Item], validated: Iterable[tuple[str, Item]]) -> list[str]:
    """Return the places of validation rows that are trained on, too: with the same prompt, or the same pair or
    conversation.
    """
    known = {_content(item) for item in trained}
    return [where for where, item in validated if _content(item) in known]


def _content(item: Item) -> str:
    """Return the compared part of a row: of prompts without the answer."""
    if not isinstance(item, Prompt):
        return json.dumps(item._replace(where=""), sort_keys=True, default=str)
    return item.text if item.messages is None else json.dumps(item.messages, sort_keys=True)
