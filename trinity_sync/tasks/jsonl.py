"""Prompts and answers from a JSON Lines or Parquet file, judged by a reward function of the user's choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardFunction, RewardResult
from trinity_sync.tasks.reward_processes import RewardProcesses
from trinity_sync.tasks.rewards import FunctionReward, RewardNumber, RewardSettings, WeightedSum
from trinity_sync.tasks.rows import FilePaths, FileRows, Row


class FilePrompts(ABC):
    """A task of files with one prompt per row, judged by a reward of a name. A subclass adds the answer."""

    def __init__(
        self,
        rows: FileRows,
        prompt_key: str,
        reward: RewardFunction,
        reward_name: str,
        judging: RewardSettings | None,
        prompt_length: int | None,
        response_length: int | None,
    ) -> None:
        self.prompt_length, self.response_length = prompt_length, response_length
        self._reward = reward
        self.reward_name = reward_name
        self.reward_judge = RewardProcesses(reward, judging or RewardSettings(), reward_name)
        self._rows = rows
        self.unread = rows.unread
        self._prompt_key = prompt_key
        for row in rows.rows:
            self._prompt(0, row)

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Call the reward in this process."""
        return self._reward(prompt, text, finished)

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return self.prompts_from((step - 1) * count, count)

    def prompts_from(self, first: int, count: int) -> list[Prompt]:
        """Return prompts by their number in the order of the data, from 0; `Prompt.index` counts from 0, too."""
        return [self._prompt(index, row) for index, row in enumerate(self._rows.following(first, count))]

    def all_rows(self) -> list[tuple[str, Prompt]]:
        """Return the prompt of each row, with its place."""
        return [(row.where, self._prompt(0, row)) for row in self._rows.rows]

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove prompts by their index in `all_rows`."""
        self._rows.leave_out(rows)

    def validation_prompts(self, count: int | None) -> list[Prompt]:
        """Return the prompts of the first rows, all for None."""
        return [self._prompt(index, row) for index, row in enumerate(self._rows.rows[:count])]

    @abstractmethod
    def _answer(self, row: Row) -> tuple[object, Mapping[str, object]]:
        """Return a row's answer and the further fields for the reward."""

    def _prompt(self, index: int, row: Row) -> Prompt:
        prompt = self._rows.text_or_messages(row, self._prompt_key)
        answer, fields = self._answer(row)
        if isinstance(prompt, str):
            return Prompt(index=index, text=prompt, answer=answer, fields=fields)
        return Prompt(index=index, text=prompt[-1]["content"], messages=prompt, answer=answer, fields=fields)


class JsonlTask(FilePrompts):
    """One prompt per line or row. Fields other than prompt and answer go to `Prompt.fields`.

    Args:
        prompt_key: field of the prompt, a text or a list of chat messages.
        answer_key: field of the answer, of any type but null; None: there is none, and `Prompt.answer` is None.
        shuffle: shuffle each pass over the file in another order.
        reward: ``f(prompt, response) -> number``, such as those of `trinity_sync.tasks.rewards`. A parameter
            ``finished`` tells whether the model ended the response itself. Or a `WeightedSum` of such functions.
        seed: the run's seed; the prompts are a pure function of the files, the seed and the step.
        prompt_length, response_length: longest prompt and response in tokens, for the explorers.
        judging: None: the defaults of `RewardSettings`.
        chat_template: arguments of the tokenizer's chat template, for the explorers.

    Raises:
        ConfigError: a file is not as described; names file and line. Or the function is not.
    """

    def __init__(
        self,
        path: FilePaths,
        prompt_key: str,
        answer_key: str | None,
        shuffle: bool,
        reward: RewardNumber | WeightedSum,
        seed: int,
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        judging: RewardSettings | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        self._answer_key = answer_key
        keys = {"task.prompt_key": prompt_key, "task.answer_key": answer_key}
        rows = FileRows(path, seed=seed, shuffle=shuffle, keys=keys)
        function = reward if isinstance(reward, WeightedSum) else FunctionReward(reward)
        super().__init__(rows, prompt_key, function, function.name, judging, prompt_length, response_length)

    def _answer(self, row: Row) -> tuple[object, Mapping[str, object]]:
        rest = {key: value for key, value in row.values.items() if key not in (self._prompt_key, self._answer_key)}
        return None if self._answer_key is None else self._rows.value(row, self._answer_key), rest
