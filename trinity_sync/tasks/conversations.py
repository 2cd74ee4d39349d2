"""Conversations from a JSON Lines or Parquet file, for supervised fine-tuning on the turns of the assistant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trinity_sync.errors import ConfigError
from trinity_sync.tasks.rows import FileExamples, FilePaths, FileRows, Row, chat_messages


class Conversation(NamedTuple):
    """A chat of several turns."""

    messages: list[Mapping[str, object]]  # the turns, with ``role`` and ``content``
    tools: list[object] | None  # argument of the template; None: not given
    thinking: bool | None  # the template's argument ``enable_thinking``; None: not given
    where: str  # place in the file, as in ``train.jsonl:17``


class ConversationsTask(FileExamples[Conversation]):
    """One conversation per line or row; each pass over the file has another order.

    Args:
        tools_key: field of the tools, a list; a row may lack it.
        enable_thinking_key: field of ``enable_thinking``, true or false; a row may lack it.
        seed: the run's seed; the conversations are a pure function of the files, the seed and the step.
        max_length: longest conversation in tokens, for the trainer.
        chat_template: arguments of the tokenizer's chat template.
        ignore_input_ids_mismatch: accept turns whose tokens differ from those in the whole conversation.

    Raises:
        ConfigError: a file is not as described; names file and line.
    """

    def __init__(
        self,
        path: FilePaths,
        messages_key: str,
        seed: int,
        *,
        tools_key: str = "tools",
        enable_thinking_key: str = "enable_thinking",
        max_length: int | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
        ignore_input_ids_mismatch: bool = False,
    ) -> None:
        self._messages_key, self._tools_key, self._thinking_key = messages_key, tools_key, enable_thinking_key
        columns = (messages_key, tools_key, enable_thinking_key)
        keys = {"task.messages_key": messages_key}
        super().__init__(FileRows(path, seed=seed, shuffle=True, columns=columns, keys=keys), self._conversation)

    def _conversation(self, row: Row) -> Conversation:
        where = row.where
        self._rows.value(row, self._messages_key)
        messages = self._rows.optional(row, self._messages_key)
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"{where}: the field {self._messages_key!r} must be a list of chat messages")
        turns: list[Mapping[str, object]] = [*chat_messages(row, self._messages_key, messages, calls=True)]
        if not any(turn["role"] == "assistant" for turn in turns):
            raise ConfigError(f"{where}: no message is the assistant's, so there is nothing to learn")
        tools, thinking = self._rows.optional(row, self._tools_key), self._rows.optional(row, self._thinking_key)
        if not isinstance(tools, list | None):
            raise ConfigError(f"{where}: the field {self._tools_key!r} must be a list of objects")
        if not isinstance(thinking, bool | None):
            raise ConfigError(f"{where}: the field {self._thinking_key!r} must be true or false")
        return Conversation(turns, tools, thinking, where)
