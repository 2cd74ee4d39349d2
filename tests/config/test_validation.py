"""`task.validation`: what is refused before anything starts, and what is validated on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from trinity_sync import config
from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt

ASKED = "task.validation.prompts=4"
BEST = ("retention=keep_best", "retention.policies.keep_best.metric=val/reward/mean")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        look_at(config.compose(overrides))
    return str(caught.value)


def look_at(cfg: DictConfig) -> None:
    """All that is done before anything starts."""
    config.check(cfg)
    config.check_inputs(cfg)


def file(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


def prompts(cfg: DictConfig) -> list[Prompt]:
    task = config.validation_task(cfg)
    return [] if task is None else task.validation_prompts(cfg.task.validation.prompts)


def test_without_a_file_or_prompts_nothing_is_validated(tmp_path: Path) -> None:
    given = file(tmp_path / "train.jsonl", "a")
    for task in ([], ["task=jsonl", f"task.path={given}"]):
        cfg = config.compose(task)
        config.check(cfg)
        assert prompts(cfg) == []


def test_a_validation_of_a_file_is_of_its_first_rows_in_their_order(tmp_path: Path) -> None:
    trained, held_out = file(tmp_path / "train.jsonl", *"abc"), file(tmp_path / "val.jsonl", *"fedg")
    files = ["task=jsonl", f"task.path={trained}", f"task.validation.path={held_out}"]
    assert [prompt.text for prompt in prompts(config.compose(files))] == ["f", "e", "d", "g"]
    few = prompts(config.compose([*files, "task.validation.prompts=2", "seed=5"]))
    assert [(prompt.index, prompt.text) for prompt in few] == [(0, "f"), (1, "e")]


def test_a_task_without_a_file_validates_on_prompts_from_random_numbers_of_their_own() -> None:
    cfg = config.compose([ASKED, "task.digits=9"])
    config.check(cfg)
    asked = prompts(cfg)
    assert asked == prompts(cfg)
    assert len({prompt.text for prompt in asked}) == 4
    trained = config.build_task(cfg.task, cfg.seed)
    assert not {prompt.text for prompt in asked} & {
        prompt.text for step in range(20) for prompt in trained.prompts(step, 4)
    }


def test_what_stands_in_a_file_of_validation_is_looked_at_before_the_start(tmp_path: Path) -> None:
    trained, bad = file(tmp_path / "train.jsonl", "a"), tmp_path / "val.jsonl"
    bad.write_text('{"prompt": "a", "answer": "1"}\n{"question": "b", "answer": "1"}\n')
    told = refusal("task=jsonl", f"task.path={trained}", f"task.validation.path={bad}")
    assert told.startswith(f"task.prompt_key='prompt': {bad}:2 has no such field; it has: 'question', 'answer'")
    told = refusal("task=jsonl", f"task.path={trained}", "task.validation.path=nowhere.jsonl")
    assert told == "task.validation.path is nowhere.jsonl, which is not a file; name an existing one"
    told = refusal("task=jsonl", f"task.path={trained}", ASKED)
    assert told == "task.validation.prompts is 4, but there is no file; give task.validation.path"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["task.validation.samples_per_prompt=4"], "task.validation.samples_per_prompt is 4, but at temperature 0"),
        (
            ["sync.interval=3", "sync.max_staleness=2", "task.validation.interval=4"],
            "task.validation.interval is 4, but only versions can be validated, one every sync.interval=3 steps",
        ),
        (["task.validation.interval=-1"], "task.validation.interval is -1; must be at least 0"),
        (["task.validation.temperature=-1"], "task.validation.temperature is -1.0; must be at least 0"),
        (
            ["workload=bytes", "model.shapes=qwen3-0.6b"],
            "task.validation is given, but with workload=bytes nothing is generated",
        ),
        (
            [*BEST, "checkpoint.interval=10", "task.validation.interval=4"],
            "retention.policies.keep_best.metric is val/reward/mean, which not all checkpoints would have, with "
            "checkpoint.interval=10 and task.validation.interval=4",
        ),
        ([*BEST, "task.validation.interval=0"], "retention.policies.keep_best.metric is val/reward/mean, which not"),
    ],
)
def test_what_cannot_be_validated_is_refused_by_name(overrides: list[str], told: str) -> None:
    assert refusal(ASKED, *overrides).startswith(told)


def test_a_run_without_steps_needs_a_validation() -> None:
    told = "trainer.steps is 0, which only validates the model, but nothing is validated; give task.validation."
    assert refusal("trainer.steps=0") == f"{told}prompts"
    file = ["task=jsonl", f"task.path={__file__}"]
    assert refusal("trainer.steps=0", *file) == f"{told}path"
    assert refusal(ASKED, "trainer.steps=0", "trainer.schedule=free").startswith("trainer.schedule is free, but with")
    config.check(config.compose([ASKED, "trainer.steps=0", "trainer.warmup_steps=10"]))


def test_the_best_by_a_validation_that_there_is_not_is_refused() -> None:
    assert refusal(*BEST) == (
        "retention.policies.keep_best.metric is val/reward/mean, but nothing is validated; see task.validation"
    )
    config.check(config.compose([*BEST, ASKED, "task.validation.interval=5", "checkpoint.interval=10"]))
    config.check(config.compose([*BEST, ASKED, "task.validation.interval=0", "checkpoint.interval=0"]))


def test_pairs_are_validated_on_the_first_rows_of_a_file(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": prompt, "response": "b"}) + "\n" for prompt in "acd"))
    asked = ["algorithm=sft", "task=pairs", f"task.path={pairs}"]
    config.check(config.compose(asked))
    cfg = config.compose([*asked, f"task.validation.path={pairs}", "task.validation.rows=2"])
    look_at(cfg)
    assert [pair.prompt for pair in config.validation_items(cfg, config.validation_task(cfg))] == ["a", "c"]
    assert refusal(*asked, "task.validation.rows=2") == (
        "task.validation.rows is 2, but there is no file; give task.validation.path"
    )
    assert refusal(*asked, f"task.validation.path={pairs}", "task.validation.interval=-1").startswith(
        "task.validation.interval is -1"
    )


def test_a_task_of_ones_own_has_to_have_the_prompts_and_its_option_the_keys() -> None:
    own = ["~task", "+task._target_=tests.config.test_validation.Own", "+task.response_length=3"]
    assert refusal(*own, "+task.validation.prompts=2") == (
        "task.validation.at_start has no value; list '/base/validation@validation' among the defaults of the task's "
        "option file"
    )
    all_keys = "{prompts: 2, interval: 1, at_start: true, samples_per_prompt: 1, temperature: 0}"
    assert refusal(*own, f"+task.validation={all_keys}") == (
        "task.validation is given, but task._target_=tests.config.test_validation.Own has no validation_prompts()"
    )


class Own:
    """A task without prompts for validation, and without a key of that name."""

    def __init__(self, seed: int, response_length: int) -> None:
        self.prompts = self.reward = lambda *_: None
