"""Mistakes in what is typed: each ends with exit code 2 and one sentence with the remedy, and leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch
from tests.cli.stand_in import StandIn, standing_in
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config.description import described, meant
from trinity_sync.config.invocation import Invocation
from trinity_sync.config.messages import CommandLine
from trinity_sync.launch import app

_FOREIGN = (
    "ANTLR|Lexer|viable|mismatched|extraneous|EOF|Ambiguous|--multirun|hydra.cc|usage:|unrecognized|Traceback|struct"
)
"""Words of Hydra, ANTLR and argparse."""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        yield stand_in


def test_several_experiments_are_composed_one_after_the_other(launcher: StandIn) -> None:
    assert app.run_main(launch.main, ["experiment=[disk_budget,on_policy]"]) == 0
    cfg = launcher.calls[0].cfg
    assert (cfg.name, "keep_within_budget" in cfg.retention.policies) == ("on_policy", True)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        # a list for a group of which one option is chosen
        (["-m", "sync=[memory,nccl]"], "sync takes one option, not a list; several are a sweep: -m sync=memory,nccl"),
        (["sync=[memory, nccl]"], "sync takes one option, not a list; several are a sweep: -m sync=memory,nccl"),
        (["-m", "backend=[fsdp],[fsdp2]"], "backend takes one option, not a list"),
        (["hydra/launcher=[parallel]"], "hydra/launcher takes one option, not a list"),
        # a group written as a key
        (["-m", "hydra.launcher=parallel"], "written with a slash: hydra/launcher=parallel"),
        (["+hydra.sweeper=search"], r"written with a slash: \+hydra/sweeper=search"),
        (["hydra.sweeper='search'"], "written with a slash: hydra/sweeper='search'"),
        # a sweep without -m
        (["sync=memory,nccl"], "sync=memory,nccl has several values; add -m to run a sweep: -m sync=memory,nccl$"),
        (["seed=0,1"], "seed=0,1 has several values; add -m to run a sweep: -m seed=0,1;"),
        (["trainer.betas=0.9,0.95"], r"add -m to run a sweep: .*; or write a list as trainer.betas=\[0.9,0.95\]"),
        (["name=a,b"], """a text with commas in quotes, "name='a,b'"$"""),
        (["seed=range(1,3)"], r"add -m to run a sweep: -m seed=range\(1,3\)$"),
        # syntax
        (["name=[a"], r"""name=\[a cannot be read as its end is missing; quote the value.*: "name='\[a'"$"""),
        (["name=a)b"], r"""cannot be read from '\)b' on; quote the value, for the shell too: "name='a\)b'"$"""),
        (["name='a"], """name='a cannot be read from "'a" on; quote the value, for the shell too: "name='a'"$"""),
        (["task.path=my data (1).jsonl"], r""": "task.path='my data \(1\).jsonl'"$"""),
        (["name=[$x"], r"""quote the value, for the shell too: 'name='"'"'\[\$x'"'"''$"""),
        (["trainer.steps = 10"], """cannot be read from ' = 10' on; write: "trainer.steps=10"$"""),
        (["trainer.steps", "=", "10"], "trainer.steps has no value; write key=value or group=option, without blanks"),
        (["trainer.steps: 10"], "has no value; write key=value"),
        (["trainer steps=10"], """cannot be read from ' steps=10' on; write: "key=value"$"""),
        (["name=foo(1)"], r"name=foo\(1\) cannot be read: .*Unknown function 'foo'"),
        (["sync=3"], "sync=3 is not an option; it has checkpoint, memory, nccl"),
        # dashes
        (["--trainer.steps=10"], "--trainer.steps=10 is not an option .*no dashes: trainer.steps=10$"),
        (["--sync=nccl"], "no dashes: sync=nccl$"),
        (["seed=1", "-m", "--lr", "1e-5"], "--lr is not an option .*no dashes: trainer.lr=...$"),
        (["-trainer.steps=3"], "no dashes: trainer.steps=3$"),
        (["--no-such-thing"], "--no-such-thing is not an option .*no dashes: key=...$"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_a_mistake_is_explained_before_anything_is_composed(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], more: list[str], told: str
) -> None:
    assert app.run_main(launch.main, [*typed, *more]) == 2
    message = capsys.readouterr().err
    assert re.search(told, message)
    assert re.match("error: [^\n]*\n$", message)
    assert not re.search(_FOREIGN, message)
    assert (launcher.calls, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("command", [["run"], ["resume", "RUN"], ["reproduce", "RUN"]])
@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("sync=[memory,nccl]", "sync takes one option"),
        ("--trainer.steps=10", "no dashes: trainer.steps=10"),
        ("name=[a", "end is missing"),
    ],
)
def test_commands_with_settings_explain_them(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], command: list[str], typed: str, told: str
) -> None:
    assert cli.main([*command, typed]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("lr=1e-5", "lr is not a setting; did you mean trainer.lr?"),
        ("trainer.max_steps=10", "trainer.max_steps is not a setting; did you mean trainer.steps?"),
        ("retention.keep_last.n=3", "retention.keep_last.n is not a setting; did you mean retention.policies."),
        ("tracker.wandb.project=x", "tracker.wandb.project is not a setting here; it needs tracker=wandb\n"),
        ("backend.tp=2", "backend.tp is not a setting here; it needs backend=megatron\n"),
        ("trainer/steps=10", "trainer/steps is not a setting; did you mean trainer.steps?"),
        ("sync.memory=true", "sync.memory is not a setting; did you mean sync=memory?\n"),
        ("trainer.stepz=3", "trainer.stepz is not a setting; trainer has steps, "),
    ],
)  # fmt: skip
def test_an_unknown_key_is_told_with_what_it_may_mean(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    assert app.run_main(launch.main, [typed, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("steps", "trainer.steps"),
        ("max_steps", "trainer.steps"),
        ("trainer.total_training_steps", "trainer.steps"),
        ("num_train_epochs", "trainer.total_epochs"),
        ("learning_rate", "trainer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "trainer.lr"),
        ("lr_scheduler_type", "trainer.lr_scheduler"),
        ("num_warmup_steps", "trainer.warmup_steps"),
        ("enable_gradient_checkpointing", "trainer.gradient_checkpointing"),
        ("batch_size", "algorithm.prompts_per_step"),
        ("data.train_batch_size", "algorithm.prompts_per_step"),
        ("num_generations", "algorithm.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "algorithm.samples_per_prompt"),
        ("kl_coef", "algorithm.kl.coeff"),
        ("num_gpus", "backend.ranks"),
        ("n_gpus_per_node", "backend.ranks"),
        ("save_steps", "checkpoint.interval"),
        ("eval_steps", "task.validation.interval"),
        ("save_total_limit", "retention.policies.keep_last.n"),
        ("resume_from_checkpoint", "checkpoint.resume_from"),
        ("model_name_or_path", "model.path"),
        ("lora_rank", "model.lora.rank"),
        ("dataset", "task.path"),
        ("output_dir", "hydra.run.dir"),
        ("temperature", "explorer.temperature"),
        ("max_new_tokens", "task.response_length"),
        ("data.max_prompt_length", "task.prompt_length"),
        ("wandb.project", "tracker.wandb.project"),
    ],
)
def test_other_programs_names_of_a_setting_are_known(typed: str, first: str) -> None:
    assert meant(typed)[0] == first


def test_the_other_names_are_of_settings_that_there_are() -> None:
    lines = (config.conf_dir() / "other_names.txt").read_text().splitlines()
    named = {line.partition(": ")[0].partition(" (")[0] for line in lines if not line.startswith("#")}
    known = {one.key for one in described()} | {one.option for one in described()}
    below = {key for key in named if any(one.startswith(f"{key}.") for one in known)}
    assert {name for name in named - known - below if not name.startswith(("trinity-sync ", "docs/"))} == set()


def test_overrides_may_stand_before_and_after_an_option() -> None:
    line = CommandLine.read(["trainer.steps=2", "-m", "--dry-run", "seed=0,1", "-cn", "mine"], typed=True)
    assert line.arguments == ["trainer.steps=2", "seed=0,1", "-m", "-cn", "mine"]


def test_a_run_of_an_earlier_release_with_such_a_list_composes_as_before(tmp_path: Path) -> None:
    saved = Invocation(
        overrides=("sync=[memory,nccl]",), config_name="config", config_dir=None, started_in=Path.cwd(), place=tmp_path
    )
    assert saved.recompose((), ()).config.select("sync.mode") == "nccl"
