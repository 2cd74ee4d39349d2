"""verl's data, judged by verl's reward functions or by a user's function in verl's form."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardResult
from trinity_sync.tasks.jsonl import FilePrompts
from trinity_sync.tasks.rewards import RewardSettings, check_function_file
from trinity_sync.tasks.rows import FilePaths, FileRows, Row

_SOURCE, _MODEL, _TRUTH, _EXTRA = "data_source", "reward_model", "ground_truth", "extra_info"
_ARGUMENTS = (_SOURCE, "solution_str", _TRUTH, _EXTRA)
_VERLS = ("verl.utils.reward_score", "default_compute_score")


@dataclass(frozen=True, kw_only=True)
class VerlReward:
    """Judges by ``compute_score(data_source, solution_str, ground_truth, extra_info)``. The first call imports verl.
    `function_path`: Python file of the function, or a name for verl's `load_extern_object`; None: verl's
    `default_compute_score`, which chooses by the data source.
    """

    function_path: str | None = None
    function_name: str = "compute_score"
    reward_kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return ".".join(_VERLS) if self.function_path is None else f"{self.function_path}:{self.function_name}"

    @property
    def slow(self) -> bool:
        """Whether its import takes seconds: it imports verl."""
        return self.function_path is None or "://" in self.function_path

    def check(self) -> None:
        """Check that the file has the function, without running it."""
        if self.function_path is not None and "://" not in self.function_path:
            check_function_file(
                Path(self.function_path).expanduser(), self.function_name, {*_ARGUMENTS, *self.reward_kwargs}
            )

    def warm_up(self) -> None:
        """Import the function."""
        _loaded(self.function_path, self.function_name)

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        """Judge a response. Of a returned dictionary, ``score`` is the reward and ``acc``, if there is one, `exact`."""
        given = {
            _SOURCE: prompt.fields[_SOURCE],
            "solution_str": text,
            _TRUTH: prompt.answer,
            _EXTRA: dict(cast("Mapping[str, object]", prompt.fields.get(_EXTRA) or {})),
        }
        result = _loaded(self.function_path, self.function_name)(**{**given, **self.reward_kwargs})
        if not isinstance(result, dict):
            return RewardResult(cast("float", result))
        if "score" not in result:
            raise ValueError(f"there is no 'score' in what the function returned, {result!r}")
        return RewardResult(result["score"], result.get("acc"))


@cache
def _loaded(path: str | None, name: str) -> Callable[..., object]:
    # imported by name: this package must not import verl otherwise
    if path is None:
        return cast("Callable[..., object]", getattr(importlib.import_module(_VERLS[0]), _VERLS[1]))
    if "://" in path:
        load = importlib.import_module("verl.utils.import_utils").load_extern_object
        return cast("Callable[..., object]", load(path, name))
    # as verl does, whose import takes seconds
    loader = SourceFileLoader("custom_module", str(Path(path).expanduser()))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    loader.exec_module(module)
    return cast("Callable[..., object]", getattr(module, name))


class VerlTask(FilePrompts):
    """One prompt per row, with verl's columns: ``prompt``, ``data_source``, ``reward_model`` with a ``ground_truth``
    and, optionally, ``extra_info``. Further columns are not read.

    Args:
        prompt_key: column of the prompt, a list of chat messages or a text.
        shuffle: shuffle each pass over the file in another order.
        seed: the run's seed; the prompts are a pure function of the files, the seed and the step.
        prompt_length, response_length: longest prompt and response in tokens, for the explorers.
        judging: None: the defaults of `RewardSettings`.
        chat_template: arguments of the tokenizer's chat template, for the explorers.

    Raises:
        ConfigError: a file is not as described; names file, row and column. Or the function is not.
    """

    def __init__(
        self,
        path: FilePaths,
        prompt_key: str,
        shuffle: bool,
        reward: Mapping[str, object],
        seed: int,
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        judging: RewardSettings | None = None,
        too_long: str = "refuse",
        chat_template: Mapping[str, object] | None = None,
    ) -> None:
        function, columns = _reward(reward), (prompt_key, _SOURCE, _MODEL, _EXTRA)
        rows = FileRows(path, seed=seed, shuffle=shuffle, columns=columns, keys={"task.prompt_key": prompt_key})
        super().__init__(rows, prompt_key, function, function.name, judging, prompt_length, response_length)

    def _answer(self, row: Row) -> tuple[object, Mapping[str, object]]:
        self._rows.text(row, _SOURCE)
        model = self._rows.value(row, _MODEL)
        if not isinstance(model, dict) or model.get(_TRUTH) is None:
            raise ConfigError(f"{row.where}: the field {_MODEL!r} must be an object with a {_TRUTH!r}")
        if not isinstance(self._rows.optional(row, _EXTRA), dict | None):
            raise ConfigError(f"{row.where}: the field {_EXTRA!r} must be an object")
        return model[_TRUTH], {key: row.values[key] for key in (_SOURCE, _MODEL, _EXTRA) if key in row.values}


def _reward(settings: Mapping[str, Any]) -> VerlReward:
    known = VerlReward.__dataclass_fields__
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(
            f"task.reward.{unknown[0]} is not a key; the keys are: {', '.join(known)}. Arguments of the function go "
            "below task.reward.reward_kwargs"
        )
    reward = VerlReward(**settings)
    reward.check()
    return reward
