from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trinity_sync import config
from trinity_sync.config import build_task
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Response, RewardResult
from trinity_sync.tasks.jsonl import JsonlTask
from trinity_sync.tasks.rewards import RewardSettings, WeightedSum, exact_match, score


def shout(prompt: Prompt, response: str, *, volume: float) -> float:
    return volume * response.isupper()


def broken(prompt: Prompt, response: str) -> float:
    raise ZeroDivisionError("nothing to divide by")


def answered(prompt: Prompt, response: str) -> float:
    return float(prompt.answer is not None)


def short(prompt: Prompt, response: str, finished: bool = True) -> float:
    return 1.0 if finished else -1.0


def task_of(folder: Path, rows: list[dict[str, Any]], reward: Any = exact_match, **keys: Any) -> JsonlTask:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"prompt_key": "question", "answer_key": "answer", "shuffle": False, "seed": 0} | keys
    return JsonlTask(path, reward=reward, **settings)


ROWS = [{"question": "1+1=", "answer": "2", "level": 1}, {"question": "2+3=", "answer": 5, "level": 2}]


def test_rows_become_prompts_with_their_answers_and_further_fields(tmp_path: Path) -> None:
    assert task_of(tmp_path, ROWS).prompts(1, 2) == [
        Prompt(index=0, text="1+1=", answer="2", fields={"level": 1}),
        Prompt(index=1, text="2+3=", answer=5, fields={"level": 2}),
    ]


def test_prompts_are_numbered_within_the_step(tmp_path: Path) -> None:
    prompts = task_of(tmp_path, ROWS).prompts(2, 3)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "2+3="), (1, "1+1="), (2, "2+3=")]


def test_a_chat_is_kept_whole_and_its_last_message_is_the_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    (prompt,) = task_of(tmp_path, [{"question": chat, "answer": "2"}]).prompts(1, 1)
    assert prompt.text == "1+1?"
    assert prompt.messages == tuple(chat)


NULL = "; task.answer_key=null where the reward needs none"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "2"}, "task.prompt_key='question': {row} has no such field; it has: 'answer'"),
        ({"question": "1="}, "task.answer_key='answer': {row} has no such field; it has: 'question'" + NULL),
        ({"question": "1=", "answer": None}, "{row}: the field 'answer' is null" + NULL),
    ],
)
def test_a_row_that_lacks_something_is_refused_with_the_setting(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(tmp_path, [*ROWS, row])
    assert str(caught.value) == told.format(row=f"{tmp_path}/data.jsonl:3")


def test_without_an_answer_key_rewards_get_none_and_all_other_fields(tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "level": 1}, {"question": "2+3=", "answer": 5}]
    task = task_of(tmp_path, rows, answered, answer_key=None)
    prompts = task.prompts(1, 2)
    assert [(prompt.answer, prompt.fields) for prompt in prompts] == [(None, {"level": 1}), (None, {"answer": 5})]
    assert task.reward(prompts[1], "5", True).reward == 0


def test_shuffling_changes_the_order_only(tmp_path: Path) -> None:
    rows = [{"question": str(number), "answer": number} for number in range(30)]
    shuffled = [prompt.answer for prompt in task_of(tmp_path, rows, shuffle=True).prompts(1, 30)]
    assert shuffled != list(range(30))
    assert sorted(shuffled) == list(range(30))


def test_the_reward_function_judges(tmp_path: Path) -> None:
    task = task_of(tmp_path, ROWS, reward=partial(shout, volume=2.0))
    (prompt,) = task.prompts(1, 1)
    assert score(task, prompt, "LOUD", False, step=1) == (2.0, None)


@pytest.mark.parametrize(
    ("reward", "cut_off"), [(short, -1.0), (partial(short), -1.0), (partial(short, finished=True), 1.0), (max, None)]
)
def test_a_function_that_asks_is_told_whether_the_response_was_finished(
    tmp_path: Path, reward: Any, cut_off: float | None
) -> None:
    task = task_of(tmp_path, ROWS, reward)
    (prompt,) = task.prompts(1, 1)
    if cut_off is None:
        with pytest.raises(TypeError):
            task.reward(prompt, "a", finished=False)
    else:
        assert [task.reward(prompt, "a", finished).reward for finished in (True, False)] == [1.0, cut_off]


@pytest.mark.parametrize("reward", [broken, partial(partial(broken))])
def test_an_error_names_the_users_function(tmp_path: Path, reward: Any) -> None:
    task = task_of(tmp_path, ROWS, reward=reward)
    with pytest.raises(
        RunError, match=r"the reward function tests\.tasks\.test_jsonl\.broken, called for prompt 1 of step 4"
    ):
        score(task, task.prompts(4, 2)[1], "2", True, step=4)


def test_a_task_can_be_sent_to_another_process(tmp_path: Path) -> None:
    task = task_of(tmp_path, ROWS, shuffle=True)
    assert pickle.loads(pickle.dumps(task)).prompts(3, 5) == task.prompts(3, 5)


class OwnTask:
    """A task of a user's that knows nothing of how rewards are judged here."""

    def __init__(self, reward: Any, seed: int) -> None:
        self.settings = reward

    def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        return RewardResult(self.settings["timeout_s"])


def composed(folder: Path, *overrides: str) -> Any:
    task_of(folder, ROWS)  # writes the file
    keys = [f"task.path={folder}/data.jsonl", "task.prompt_key=question", "model.path=x"]
    return build_task(config.compose(["task=jsonl", *keys, *overrides]).task, 0)


def test_the_option_and_the_class_judge_alike_by_default(tmp_path: Path) -> None:
    reward = config.compose(["task=jsonl", "task.path=x", "model.path=x"]).task.reward
    ours = vars(RewardSettings())
    assert {key: reward[key] for key in ours} == ours


def test_keys_of_ours_beside_the_function_do_not_reach_it(tmp_path: Path) -> None:
    target = "task.reward._target_=tests.tasks.test_jsonl.broken"
    task = composed(tmp_path, target, "task.reward.on_error=zero", "task.reward.processes=2")
    (verdict,) = task.reward_judge.judge([Response(task.prompts(1, 1)[0], "2", True)], step=3)
    assert verdict.reward == 0.0
    assert "tests.tasks.test_jsonl.broken, called for prompt 0 of step 3, failed: ZeroDivisionError" in verdict.error
    assert len(task.reward_judge.pids) == 2
    task.reward_judge.close()


def test_a_wrong_value_of_a_key_of_ours_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.reward\.on_error is 'zer'; must be one of stop, zero, skip$"):
        composed(tmp_path, "task.reward.on_error=zer")


def test_a_task_of_the_users_keeps_keys_of_these_names() -> None:
    node = {"_target_": "tests.tasks.test_jsonl.OwnTask", "reward": {"timeout_s": 5, "on_error": "mine"}}
    task = build_task(node, 0)
    assert task.settings == {"timeout_s": 5, "on_error": "mine"}
    assert score(task, Prompt(index=0, text="a"), "b", True, step=1) == (5.0, None)


# Weighted sums of several functions.


def exact(prompt: Prompt, response: str) -> float:
    return float(len(response))


def test_a_weighted_sum_is_judged_with_the_values_of_its_parts(tmp_path: Path) -> None:
    task = composed(tmp_path, f"task.reward=[{__name__}.short,0.5*{__name__}.exact]")
    (verdict,) = task.reward_judge.judge([Response(task.prompts(1, 1)[0], "four", False)], step=1)
    task.reward_judge.close()
    assert (verdict.reward, verdict.exact, verdict.error) == (1.0, None, "")
    # "reward/exact" is another metric
    assert verdict.parts == {"short": -1.0, f"{__name__}.exact": 4.0}


def test_the_part_that_fails_is_named(tmp_path: Path) -> None:
    task = composed(tmp_path, f"task.reward=[{__name__}.short,2*{__name__}.broken]", "task.reward.on_error=skip")
    (verdict,) = task.reward_judge.judge([Response(task.prompts(1, 1)[0], "2", True)], step=3)
    task.reward_judge.close()
    assert verdict.parts is None
    assert (
        f"the reward function 1*{__name__}.short + 2*{__name__}.broken, called for prompt 0 of step 3, has a part "
        f"{__name__}.broken, which failed: ZeroDivisionError: nothing to divide by ({__file__}:" in verdict.error
    )


@pytest.mark.parametrize(
    ("functions", "weights", "told"),
    [
        ([short], [1.0, 2.0], r"task\.reward\.weights is \[1\.0, 2\.0\]; it must have one number for each function"),
        ([], [], r"task\.reward\.weights is \[\]; it must have one number for each function of task\.reward, of which"),
        ([short, short], [1.0, 2.0], r"^task\.reward has tests\.tasks\.test_jsonl\.short twice; add up its weights"),
        ([shout], [1.0], r"test_jsonl\.shout\(.*, which cannot be called with a prompt and a response"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(functions: list[Any], weights: list[float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        WeightedSum(functions, weights)
