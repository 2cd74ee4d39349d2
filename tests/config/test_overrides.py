"""Overrides whose values are text that looks like numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_sync.config import compose
from trinity_sync.config.invocation import Invocation
from trinity_sync.config.messages import CommandLine
from trinity_sync.config.overrides import as_numbers, as_typed
from trinity_sync.config.saved_config import Trust
from trinity_sync.errors import ConfigError


@pytest.mark.parametrize("text", ["2024_11_25", "1e3", "1_0", "1.50", "true", "NaN", "007", "0x10", "7", "-1e3"])
def test_text_stays_as_it_is_typed(text: str) -> None:
    cfg = compose([f"name={text}", "tracker=[wandb]", f"tracker.wandb.project={text}", f"checkpoint.dir={text}"])
    assert (cfg.name, cfg.tracker.wandb.project, cfg.checkpoint.dir) == (text, text, text)


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("name=1_0,2_0", "name='1_0','2_0'"),
        ("name=choice(1e3,x)", "name=choice('1e3',x)"),
        ("tracker.wandb.tags=[1_0,2e3,x]", "tracker.wandb.tags=['1_0','2e3',x]"),
        ("tracker.wandb={project:2024_11,timeout_s:1e1}", "tracker.wandb={project:'2024_11',timeout_s:1e1}"),
        ("+tracker.mlflow.experiment=1e3", "+tracker.mlflow.experiment='1e3'"),
        ("task.path=1_0", "task.path='1_0'"),
        ("retention.policies.keep_best.metric=1e3", "retention.policies.keep_best.metric='1e3'"),
        ("algorithm.kl.reference=1_0", "algorithm.kl.reference='1_0'"),
        ("hydra.run.dir=2024_11", "hydra.run.dir='2024_11'"),
    ],
)
def test_a_value_for_text_is_quoted_wherever_it_stands(typed: str, quoted: str) -> None:
    assert as_typed(typed) == quoted
    assert as_typed(quoted) == quoted
    assert CommandLine.read([typed]).arguments == [quoted]


@pytest.mark.parametrize(
    "typed",
    [
        "trainer.lr=1e-3",
        "trainer.steps=1_000",
        "trainer.lr=choice(1e-3,1e-4)",
        "name=null",
        "name='1_0'",
        "~tracker",
        "backend.overrides.x=1_0",
        "trainer.deterministic=true",
        "name=",
        "-m",
        "sync=memory,nccl",
        "name=${seed}",
        "name=2024_11_25 run",
        "name=1e3 b",
        "name=true story",
        "tracker.wandb.tags=[1e3 a,b]",
    ],
)
def test_all_else_stays_as_it_is(typed: str) -> None:
    assert as_typed(typed) == typed


def test_null_is_no_text() -> None:
    assert compose(["checkpoint.mirror=null"]).checkpoint.mirror is None


def test_a_run_of_an_earlier_release_keeps_the_name_that_it_had(tmp_path: Path) -> None:
    """It took ``name=2024_11_25`` for a number."""
    hydra = compose(["name=1"], hydra=True).hydra
    OmegaConf.set_readonly(hydra, False)
    hydra.runtime.cwd, hydra.runtime.config_sources, hydra.job.config_name = str(tmp_path), [], "config"
    found = Invocation.of_hydra(hydra, ["name=2024_11_25", "trainer.lr=1e-3"], tmp_path)
    assert found.overrides == ("name='20241125'", "trainer.lr=1e-3")
    assert as_numbers(found.overrides) == list(found.overrides)
    assert as_numbers(["name=2024_11_25 run"]) == ["name=2024_11_25 run"]


# The short forms of a reward.

FILE = ("task=jsonl", "task.path=x")
SUM = ["my_rewards.score", "0.2*my_rewards.format"]


def reward_of(*overrides: str, folder: Path | None = None) -> dict[str, object]:
    reward = OmegaConf.to_container(compose([*FILE, *overrides], config_dir=folder).task.reward)
    assert isinstance(reward, dict)
    assert [reward.pop(key) for key in ("timeout_s", "processes")] == [30, 1]
    return {str(key): value for key, value in reward.items()}


def functions(*names: str) -> list[dict[str, object]]:
    return [{"_target_": name, "_partial_": True} for name in names]


def test_the_name_of_a_function_stands_for_a_reward() -> None:
    long = ["task.reward._target_=my_rewards.score", "+task.reward.whole=2", "task.reward.on_error=zero"]
    assert reward_of("task.reward=my_rewards.score", *long[1:]) == reward_of(*long)
    assert reward_of(*long[1:], "task.reward=my_rewards.score") == reward_of(*long)


def test_a_list_of_functions_stands_for_their_weighted_sum() -> None:
    assert reward_of(f"task.reward=[{','.join(SUM)}]") == {
        "_target_": "trinity_sync.tasks.rewards.WeightedSum",
        "_partial_": False,
        "on_error": "stop",
        "functions": functions("my_rewards.score", "my_rewards.format"),
        "weights": [1.0, 0.2],
    }


def test_weights_can_be_given_again() -> None:
    assert reward_of(f"task.reward=[{','.join(SUM)}]", "task.reward.weights=[1,0.5]")["weights"] == [1, 0.5]


def test_the_last_of_several_rewards_counts() -> None:
    assert reward_of(f"task.reward=[{','.join(SUM)}]", "task.reward=a.b") == reward_of("task.reward=a.b")


@pytest.mark.parametrize("reward", ["my_rewards.score", f"[{', '.join(SUM)}]"])
def test_a_file_may_have_a_short_reward(tmp_path: Path, reward: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [{{override /task: jsonl}}]\ntask: {{path: x, reward: {reward}}}\n"
    )
    found = reward_of("experiment=mine", "task.reward.on_error=zero", folder=tmp_path)
    assert found == reward_of(f"task.reward={reward.replace(' ', '')}", "task.reward.on_error=zero")


def test_a_task_with_a_text_of_this_name_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("_target_: my_tasks.Mine\nreward: my_rewards.score\n")
    assert compose(["task=mine"], config_dir=tmp_path).task.reward == "my_rewards.score"
    assert compose(["task=mine", "task.reward=a.b"], config_dir=tmp_path).task.reward == "a.b"


def test_a_reference_stays_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [{override /task: jsonl}]\ntask: {path: x, reward: '${model}'}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    for given in (["experiment=mine"], [*FILE, "task.reward='${model}'"]):
        written = OmegaConf.to_container(compose(given, config_dir=tmp_path).task, resolve=False)
        assert isinstance(written, dict)
        assert written["reward"] == "${model}"


def test_a_part_that_is_no_name_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^task\.reward has 'x\*y\*z'; each part is the dotted name of a function, or"
    ):
        compose([*FILE, "task.reward=[a.b,x*y*z]"])


def test_a_function_on_the_command_line_is_trusted(tmp_path: Path) -> None:
    trust = Trust(where=tmp_path, new=("task.reward=[a.b,2*c.d]",))
    assert ("task.reward.functions.1._target_", "c.d") in trust.given
    assert trust.gives("task.reward.weights.1")
