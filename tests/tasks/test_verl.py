"""verl's data and rewards as they are: our verdicts are those of verl's own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync import config
from trinity_sync.config import build_task
from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Response, Verdict
from trinity_sync.tasks.verl import VerlTask

CHAT = [{"role": "user", "content": "2+40? End with #### and the number."}]
ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 3},
}
SAID = ["2 + 40 = 42\n#### 42", "#### 41", "42", "#### 4,2", "#### 42 or #### 43", ""]

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "as a dictionary":
        return {"score": 0.25, "acc": True, "pred": "x"}
    if solution_str == "without a score":
        return {"acc": True}
    if solution_str == "what it was given":
        assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "42", {"split": "train", "index": 3})
    return 0.5 + bonus
"""


def task_of(folder: Path, *overrides: str, rows: list[dict[str, Any]] | None = None) -> VerlTask:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or [ROW]))
    cfg = config.compose(["task=verl", f"task.path={path}", "model.path=x", *overrides])
    task = build_task(cfg.task, 0)
    assert isinstance(task, VerlTask)
    return task


def verdicts(task: VerlTask, *texts: str) -> list[Verdict]:
    (prompt,) = task.prompts(1, 1)
    try:
        return task.reward_judge.judge([Response(prompt, text, True) for text in texts], step=1)
    finally:
        task.reward_judge.close()


def test_rows_become_chats_with_their_answers(tmp_path: Path) -> None:
    rest = {key: ROW[key] for key in ("data_source", "reward_model", "extra_info")}
    assert task_of(tmp_path).prompts(1, 1) == [
        Prompt(index=0, text=CHAT[0]["content"], messages=tuple(CHAT), answer="42", fields=rest)
    ]


def test_a_parquet_file_as_verls_data_preparation_writes_it_gives_the_same_prompts(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROW]), path)
    task = VerlTask(path, "prompt", False, {}, seed=0)
    assert task.prompts(1, 1) == task_of(tmp_path).prompts(1, 1)


def test_rewards_are_those_of_verls_gsm8k_and_a_source_that_verl_does_not_know_is_a_failure(tmp_path: Path) -> None:
    from verl.utils.reward_score import default_compute_score

    expected = [default_compute_score("openai/gsm8k", said, "42") for said in SAID]
    assert expected == [1, 0, 0, 1, 0, 0]
    rows = [ROW, ROW | {"data_source": "mine"}]
    task = task_of(tmp_path, "task.reward.on_error=zero", "task.shuffle=false", rows=rows)
    known, unknown = task.prompts(1, 2)
    responses = [*(Response(known, said, True) for said in SAID), Response(unknown, "42", True)]
    *found, failed = task.reward_judge.judge(responses, step=1)
    task.reward_judge.close()
    assert [verdict.reward for verdict in found] == expected
    assert "verl.utils.reward_score.default_compute_score, called for prompt 1 of step 1, failed: Not" in failed.error
    assert "data_source='mine'" in failed.error


def test_a_function_of_the_users_is_called_as_verl_calls_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    task = task_of(
        tmp_path,
        f"task.reward.function_path={tmp_path}/mine.py",
        "+task.reward.reward_kwargs.bonus=0.25",
        "task.reward.on_error=skip",
    )
    first, second, third = verdicts(task, "what it was given", "as a dictionary", "without a score")
    assert first == Verdict(0.75, None)
    assert second == Verdict(0.25, 1.0)
    assert f"{tmp_path}/mine.py:compute_score, called for" in third.error
    assert "there is no 'score' in what the function returned, {'acc': True}" in third.error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_source": None}, "the field 'data_source' is null"),
        ({"reward_model": None}, "the field 'reward_model' is null"),
        ({"reward_model": {"style": "rule"}}, "the field 'reward_model' must be an object with a 'ground_truth'"),
        ({"reward_model": "42"}, "the field 'reward_model' must be an object with a 'ground_truth'"),
        ({"extra_info": "x"}, "the field 'extra_info' must be an object"),
        ({"prompt": []}, "the field 'prompt' is an empty list"),
    ],
)
def test_a_row_that_is_not_verls_is_named_with_its_column(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl:2: {said}"):
        task_of(tmp_path, rows=[ROW, ROW | change])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(): pass", r"function_name is compute_score, which .*mine\.py does not have"),
        ("def compute_score(:", r"function_path is .*mine\.py, which is not Python"),
        ("async def compute_score(**all): pass", r"mine\.py:1: compute_score is asynchronous"),
        ("def compute_score(data_source, solution_str, ground_truth): pass", "has no parameter extra_info"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, level): pass",
            "has a parameter level, which it is not called with",
        ),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_before_the_run(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        task_of(tmp_path, f"task.reward.function_path={tmp_path}/mine.py")


@pytest.mark.parametrize("text", ["def compute_score(**all): pass", "from mine_too import *", "compute_score = print"])
def test_a_function_that_may_be_called_so_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    task_of(tmp_path, f"task.reward.function_path={tmp_path}/mine.py")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.reward\.function_path is .*no\.py, which cannot be read: No such"):
        task_of(tmp_path, f"task.reward.function_path={tmp_path}/no.py")


def test_a_key_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.reward\.bonus is not a key; the keys are: function_path"):
        task_of(tmp_path, "+task.reward.bonus=1")
