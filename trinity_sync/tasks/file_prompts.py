"""What tasks have in common whose prompts are rows of a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.rows import Row, RowFile


class FilePrompts(ABC):
    """One prompt per row. A subclass says what that is, and has `reward`.

    Args:
        file: its rows are tried at once.
        prompt_key: field of the prompt, a text or a list of chat messages.

    Attributes:
        unread: values that cannot be read, which rewards do not get; see `RowFile`.

    Raises:
        ConfigError: a row is not as described; names file and line.
    """

    def __init__(self, file: RowFile, prompt_key: str) -> None:
        self._file = file
        self.unread = file.unread
        self._prompt_key = prompt_key
        for row in file.rows:
            self._prompt(0, row)

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return self.prompts_from((step - 1) * count, count)

    def prompts_from(self, first: int, count: int) -> list[Prompt]:
        """Return prompts by their number in the order of the data, from 0; of the step that they are for, they are
        those from 0.
        """
        return [self._prompt(index, row) for index, row in enumerate(self._file.following(first, count))]

    def all_rows(self) -> list[tuple[str, Prompt]]:
        """Return each row of the file, with its place."""
        return [(self._file.where(row), self._prompt(0, row)) for row in self._file.rows]

    def leave_out(self, rows: Collection[int]) -> None:
        """Give these out no more, numbered from 0 as `all_rows` has them."""
        self._file.leave_out(rows)

    def validation_prompts(self, count: int | None) -> list[Prompt]:
        """Return the first rows of the file, all for None."""
        return [self._prompt(index, row) for index, row in enumerate(self._file.rows[:count])]

    @abstractmethod
    def _answer(self, row: Row) -> tuple[object, Mapping[str, object]]:
        """Return the answer to a row's prompt, and what else is told of it, for the reward.

        Raises:
            ConfigError: there is none.
        """

    def _prompt(self, index: int, row: Row) -> Prompt:
        prompt = self._file.text_or_messages(row, self._prompt_key)
        answer, fields = self._answer(row)
        if isinstance(prompt, str):
            return Prompt(index=index, text=prompt, answer=answer, fields=fields)
        return Prompt(index=index, text=prompt[-1]["content"], messages=prompt, answer=answer, fields=fields)
