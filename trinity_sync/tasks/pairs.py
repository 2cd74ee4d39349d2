"""Pairs of prompt and response from a JSON Lines or Parquet file, for supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from trinity_sync.samples.record import Message, Prompt
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.rows import RowFile


class TextPair(NamedTuple):
    """What to say to what.

    Attributes:
        prompt: a text, or a list of chat messages.
        response: the text that is learnt.
        where: place in the file, as in ``train.jsonl:17``.
    """

    prompt: str | list[Message]
    response: str
    where: str


class PairsTask:
    """One pair per line or row; shuffled anew in each pass over the file.

    Args:
        path: the file; see `RowFile`.
        prompt_key: field of the prompt, a text or a list of chat messages.
        response_key: field of the response, a text.
        seed: the run's seed; the pairs are a pure function of the file, the seed and the step.
        max_length: longest prompt and response together in tokens; the trainer goes by it.
        too_long: what becomes of longer ones; see `trinity_sync.launch.row_scan`.
        chat_template: arguments of the tokenizer's chat template.

    Raises:
        ConfigError: the file is not as described; names file and line.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_key: str,
        response_key: str,
        seed: int,
        *,
        max_length: int | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        self.max_length = max_length
        self._file = RowFile(path, seed=seed, shuffle=True, columns=(prompt_key, response_key))
        self._pairs = {}
        for row in self._file.rows:
            prompt = self._file.text_or_messages(row, prompt_key)
            response = self._file.text(row, response_key)
            where = self._file.where(row)
            self._pairs[row.number] = TextPair(prompt if isinstance(prompt, str) else list(prompt), response, where)

    def pairs(self, step: int, count: int) -> list[TextPair]:
        """Return the pairs of a trainer step (from 1)."""
        return self.pairs_from((step - 1) * count, count)

    def pairs_from(self, first: int, count: int) -> list[TextPair]:
        """Return pairs by their number in the order of the data, from 0."""
        return [self._pairs[row.number] for row in self._file.following(first, count)]

    def all_rows(self) -> list[tuple[str, TextPair]]:
        """Return each row of the file, with its place."""
        return [(self._file.where(row), self._pairs[row.number]) for row in self._file.rows]

    def validation_rows(self, count: int | None) -> list[TextPair]:
        """Return the first pairs of the file, all for None."""
        return [self._pairs[row.number] for row in self._file.rows[:count]]

    def leave_out(self, rows: Collection[int]) -> None:
        """Give these out no more, numbered from 0 as `all_rows` has them."""
        self._file.leave_out(rows)


# Whether the rows of a validation are new ones.


Item = Prompt | TextPair | Conversation


def shared_rows(trained: Iterable[Item], validated: Iterable[tuple[str, Item]]) -> list[str]:
    """Find rows of a validation that are trained on, too: of prompts the same prompt, whatever its answer; else the
    same pair or conversation.

    Args:
        trained: what is trained on.
        validated: places and what is validated on.

    Returns:
        The places of those that are the same.
    """
    known = {_said(item) for item in trained}
    return [where for where, item in validated if _said(item) in known]


def _said(item: Item) -> str:
    """What counts of a row."""
    if not isinstance(item, Prompt):
        return json.dumps(item._replace(where=""), sort_keys=True, default=str)
    return item.text if item.messages is None else json.dumps(item.messages, sort_keys=True)
