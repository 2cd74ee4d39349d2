"""Prompts and answers from a JSON Lines or Parquet file, judged by a reward function of the user's choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardResult
from trinity_sync.tasks.reward_processes import RewardProcesses
from trinity_sync.tasks.rewards import FunctionReward, Judging, RewardNumber
from trinity_sync.tasks.rows import FilePrompts, Row, RowFile


class JsonlTask(FilePrompts):
    """One prompt per line or row. Fields other than prompt and answer go to `Prompt.fields`.

    Args:
        prompt_key: field of the prompt, a text or a list of chat messages.
        answer_key: field of the answer, of any type but null.
        shuffle: shuffle each pass over the file in another order.
        reward: ``f(prompt, response) -> number``, such as those of `trinity_sync.tasks.rewards`. A parameter
            ``finished`` tells whether the model ended the response itself.
        seed: the run's seed; the prompts are a pure function of the file, the seed and the step.
        prompt_length, response_length: longest prompt and response in tokens, for the explorers.
        judging: None: the defaults of `Judging`.
        chat_template: arguments of the tokenizer's chat template, for the explorers.

    Raises:
        ConfigError: the file is not as described; names file and line. Or the function is not.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_key: str,
        answer_key: str,
        shuffle: bool,
        reward: RewardNumber,
        seed: int,
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        judging: Judging | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        self.prompt_length = prompt_length
        self.response_length = response_length
        self._function = FunctionReward(reward)
        self.reward_name = self._function.name
        self.reward_judge = RewardProcesses(self._function, judging or Judging(), self.reward_name)
        self._answer_key = answer_key
        super().__init__(RowFile(path, seed=seed, shuffle=shuffle), prompt_key)

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Call the reward function in this process."""
        return self._function(prompt, text, finished)

    def _answer(self, row: Row) -> tuple[object, Mapping[str, object]]:
        rest = {key: value for key, value in row.values.items() if key not in (self._prompt_key, self._answer_key)}
        return self._file.value(row, self._answer_key), rest
