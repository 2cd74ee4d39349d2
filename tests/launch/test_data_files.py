"""`task.path` and `task.validation.path` with several files and patterns, from the command line to a repetition."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import launch
from tests.cli.stand_in import Computing, standing_in
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config import RunConfig, compose
from trinity_sync.errors import ConfigError
from trinity_sync.host.references import task_name
from trinity_sync.launch import app, sweeps
from trinity_sync.samples.record import Prompt
from trinity_sync.tracking.run_record import read_record

JSONL = ("task=jsonl", "trainer.steps=3")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    """A stand-in for the launcher, in a folder with data/a.jsonl, data/b.jsonl and c.jsonl."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    work = tmp_path / "mine"
    (work / "data").mkdir(parents=True)
    for name in ("data/a", "data/b", "c"):
        write(work / f"{name}.jsonl")
    with standing_in(Computing(), work, monkeypatch) as stand_in:
        yield stand_in


def write(path: Path) -> None:
    path.write_text(f'{{"prompt": "{path.stem}", "answer": "1"}}\n')


def first(*overrides: str, folder: str = "run") -> Path:
    assert app.run_main(launch.main, [*JSONL, f"hydra.run.dir={folder}", *overrides]) == 0
    return Path(folder).absolute()


def saved(run: Path, name: str = "config.yaml") -> Any:
    return OmegaConf.load(run / ".hydra" / name)


def prompts(cfg: DictConfig) -> list[str]:
    return [prompt.text for prompt in config.build_task(cfg.task, cfg.seed).validation_prompts(None)]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig(compose([*JSONL, *overrides])).check()
    return str(caught.value)


@pytest.mark.parametrize("key", ["task.path", "task.validation.path"])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("data/*.txt", "has data/*.txt, which does not exist and as a pattern matches no file; name an existing one"),
        (
            "[c.jsonl,data/*.txt]",
            "has data/*.txt, which does not exist and as a pattern matches no file; name an existing one",
        ),
        ("[c.jsonl,d.jsonl]", "has d.jsonl, which is not a file; name an existing one"),
        ("[c.jsonl,data]", "has data, which is not a file; name an existing one"),
        ("[data/b.jsonl,data/*]", "has the file data/b.jsonl twice, by data/b.jsonl and by data/*; name it once"),
        ("[]", "is an empty list; name a file"),
    ],
)
def test_files_that_are_not_there_are_refused_by_key(launcher: Computing, key: str, value: str, told: str) -> None:
    others = [] if key == "task.path" else ["task.path=c.jsonl"]
    assert refusal(*others, f"{key}={value}") == f"{key} {told}"


def test_a_task_of_ours_needs_a_file(launcher: Computing) -> None:
    assert refusal() == "task.path has no value and needs one; give task.path=..."
    assert refusal("task.path=null").startswith("task.path is None, which is not a file")


def test_a_file_that_may_not_be_read_is_refused_by_key(launcher: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "c.jsonl" and access(path, mode))
    assert refusal("task.path=[data/a.jsonl,c.jsonl]").startswith("task.path has c.jsonl, which cannot be read; ")


def test_the_rows_of_a_list_and_a_pattern_are_those_of_the_files_in_order(launcher: Computing) -> None:
    first("task.path=[c.jsonl,data/*.jsonl]", "task.validation.path=data/?.jsonl", "task.validation.interval=3")
    cfg = launcher.calls[0].cfg
    assert prompts(cfg) == ["c", "a", "b"]
    assert cfg.task.validation.path == ["data/a.jsonl", "data/b.jsonl"]
    assert len(config.validation_items(cfg, config.validation_task(cfg))) == 2


@pytest.mark.parametrize("algorithm", [("task=jsonl",), ("task=verl",), ("algorithm=sft", "task=pairs")])
def test_each_task_of_files_takes_several(launcher: Computing, algorithm: tuple[str, ...]) -> None:
    row = '{"prompt": "p", "answer": "1", "response": "1", "data_source": "s", "reward_model": {"ground_truth": "1"}}\n'
    for name in "ab":
        Path("data", f"{name}.jsonl").write_text(row)
    cfg = compose([*algorithm, "task.path=data/*.jsonl"])
    config.check(cfg)
    assert len(config.build_task(cfg.task, cfg.seed).all_rows()) == 2


def test_a_resume_keeps_the_files_that_matched_first(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("task.path=data/*.jsonl")
    assert saved(run).task.path == ["data/a.jsonl", "data/b.jsonl"]
    assert saved(run, "overrides.yaml")[-1] == "task.path=['data/a.jsonl','data/b.jsonl']"
    write(Path("data/aa.jsonl"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main(["resume", str(run)]) == 0
    assert "changed: task.path" not in capsys.readouterr().err
    work = tmp_path / "mine"
    assert launcher.calls[1].cfg.task.path == [f"{work}/data/a.jsonl", f"{work}/data/b.jsonl"]
    assert cli.main(["resume", str(run), "task.path=mine/data/*.jsonl"]) == 0
    assert prompts(launcher.calls[2].cfg) == ["a", "aa", "b"]
    assert len(saved(run).task.path) == 3


def test_the_files_of_a_pattern_behind_a_reference_are_kept_too(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "data")
    run = first("task.path=${oc.env:DATA}/*.jsonl")
    write(Path("data/aa.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", str(run)]) == 0
    assert cli.main(["resume", str(run)]) == 0
    assert [prompts(call.cfg) for call in launcher.calls[1:]] == [["a", "b"]] * 2


def test_one_file_of_a_list_counts_from_the_folder_of_the_command_as_the_list_does(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = first("task.path=[c.jsonl,data/a.jsonl]")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", str(run), "task.path.1=mine/data/b.jsonl"]) == 0
    assert prompts(launcher.calls[-1].cfg) == ["c", "b"]


class OwnTask:
    """A user's class, whose path is not of files."""

    def __init__(self, path: object, seed: int) -> None:
        self.path = path

    def prompts(self, step: int, count: int) -> list[Prompt]:
        raise NotImplementedError

    def reward(self, prompt: Prompt, text: str, finished: bool) -> float:
        raise NotImplementedError


@pytest.mark.parametrize("path", [["*"], ["a", "b"]])
@pytest.mark.few(1)
def test_a_list_of_another_meaning_stays_as_it_is(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    Path("conf/task").mkdir(parents=True)
    option = {"_target_": f"{__name__}.OwnTask", "path": path}
    OmegaConf.save(OmegaConf.create(option), "conf/task/own.yaml")
    run = first("--config-dir=conf", "task=own")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", str(run)]) == 0
    assert cli.main(["reproduce", str(run)]) == 0
    assert [call.cfg.task.path for call in launcher.calls] == [path] * 3


def test_lists_have_the_digests_of_earlier_releases_too(launcher: Computing) -> None:
    cfg = RunConfig(compose([*JSONL, "task.path=[c.jsonl,data/a.jsonl]"]))
    assert cfg.has_digest(config.config_digest(cfg.composed, lists=False))
    assert cfg.has_digest(config.config_digest(cfg.composed))


def test_a_reward_that_needs_an_answer_is_refused_without_answers(launcher: Computing) -> None:
    told = "task.answer_key is null, but the reward {} compares responses with an answer; name the field of the answers"
    weighted = "task.reward=[my.score,0.2*trinity_sync.tasks.rewards.contains_answer]"
    line = ("task.path=c.jsonl", "task.answer_key=null")
    assert refusal(*line).startswith(told.format("exact_match"))
    assert refusal(*line, weighted).startswith(told.format("contains_answer"))
    config.check(compose([*JSONL, *line, "task.reward=my.score"]))


def test_a_repetition_has_the_same_files_and_their_names_are_in_the_digest(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("task.path=[c.jsonl,data/*.jsonl]")
    write(Path("data/aa.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", str(run)]) == 0
    assert prompts(launcher.calls[1].cfg) == ["c", "a", "b"]
    Path("mine/data").rename("mine/moved")
    assert cli.main(["reproduce", str(run)]) == 2
    assert f"task.path is {tmp_path}/mine/data/a.jsonl, which does not exist here" in capsys.readouterr().err
    moved = "task.path=[mine/c.jsonl,mine/moved/a.jsonl,mine/moved/b.jsonl]"
    assert cli.main(["reproduce", str(run), moved]) == 0
    assert prompts(launcher.calls[2].cfg) == ["c", "a", "b"]
    digests = [read_record(call.run_dir / "run.json")["config_digest"] for call in launcher.calls]
    assert len(set(digests)) == 1


def test_a_plain_path_has_the_digest_that_it_had(launcher: Computing) -> None:
    def digest(path: str) -> str:
        return config.config_digest(compose([*JSONL, "name=x", f"task.path={path}"]))

    assert digest("c.jsonl") == digest("./c.jsonl") == digest(str(Path("c.jsonl").absolute()))
    assert digest("[c.jsonl,data/a.jsonl]") == digest("['./data/../c.jsonl',data/a.jsonl]")
    assert digest("[c.jsonl,data/a.jsonl]") != digest("[data/a.jsonl,c.jsonl]")


@pytest.mark.all
def test_each_file_of_somebody_else_s_run_is_asked_for(
    launcher: Computing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("task.path=[c.jsonl,data/a.jsonl]")
    (run / ".hydra" / "recorded.json").unlink()
    assert cli.main(["resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert f"task.path.0 is {tmp_path}/mine/c.jsonl in the saved settings of {run}, a place outside" in told
    assert f"task.path.1={tmp_path}/mine/data/a.jsonl" in told
    assert cli.main(["resume", str(run), "task.path=[c.jsonl,data/b.jsonl]"]) == 0
    (run / ".hydra" / "recorded.json").unlink()
    assert cli.main(["resume", str(run), f"task.path.0={tmp_path}/mine/c.jsonl", "task.path.1=data/b.jsonl"]) == 0
    assert prompts(launcher.calls[-1].cfg) == ["c", "b"]


def test_lists_in_brackets_are_values_of_a_sweep(launcher: Computing) -> None:
    line = ["-m", *JSONL, "live=off", "hydra.sweep.dir=sweep", "task.path=c.jsonl,[c.jsonl,data/a.jsonl],data/*.jsonl"]
    assert app.run_main(launch.main, line) == 0
    assert [prompts(call.cfg) for call in launcher.calls] == [["c"], ["c", "a"], ["a", "b"]]


@pytest.mark.all
def test_a_job_that_a_queue_starts_again_keeps_its_files(launcher: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["-m", *JSONL, "live=off", "hydra.sweep.dir=sweep", "task.path=data/*.jsonl", "seed=0,1"]
    assert app.run_main(launch.main, line) == 0
    write(Path("data/aa.jsonl"))
    start_again(monkeypatch, line)
    assert [prompts(call.cfg) for call in launcher.calls] == [["a", "b"]] * 4


def test_a_job_that_a_queue_starts_again_takes_nothing_but_the_files_of_its_patterns_from_its_folder(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["-m", *JSONL, "live=off", "hydra.sweep.dir=sweep", "task.path=data/*.jsonl", "seed=0"]
    assert app.run_main(launch.main, line) == 0
    saved = Path("sweep/0/.hydra/matched_files.json")
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"trainer.lr": 7.0, "task.validation.path": "x"}))
    start_again(monkeypatch, line)
    first, again = (call.cfg for call in launcher.calls)
    assert (again.trainer.lr, again.task) == (first.trainer.lr, first.task)


def start_again(monkeypatch: pytest.MonkeyPatch, line: list[str]) -> None:
    monkeypatch.setattr(sweeps, "started_again", lambda hydra, folder: True)
    monkeypatch.setattr(sweeps, "has_completed", lambda folder: False)
    monkeypatch.setattr(app, "sweep_problem", lambda hydra, jobs: None)
    assert app.run_main(launch.main, line) == 0


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (["gsm8k/train.jsonl", "math.jsonl"], "gsm8k"),
        ("gsm8k/*.jsonl", "gsm8k"),
        ("gsm8k-*-of-00004.parquet", "gsm8k"),
        ("data/**/*.jsonl", "jsonl"),
    ],
)
def test_a_run_is_named_after_the_first_file_or_the_words_of_the_pattern(path: Any, name: str) -> None:
    assert task_name({"task": {"path": path, "_target_": "x.JsonlTask"}}) == name


@pytest.mark.parametrize("path", ["1e3", "[1e3,2024_11_25]"])
def test_names_that_look_like_numbers_are_texts(path: str) -> None:
    for key in ("task.path", "task.validation.path"):
        value = OmegaConf.select(compose([*JSONL, f"{key}={path}"]), key)
        assert str(value).replace("'", "").replace(" ", "") == path
