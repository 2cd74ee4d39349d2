"""The entry points as a user calls them: exit codes, errors, sweeps and resume. The run itself is a stand-in."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import launch
from tests.checkpoint.helpers import commit
from tests.cli.stand_in import StandIn, standing_in
from tests.config.test_conf_files import given
from tests.model_folders import bare_model
from tests.tracking import synthetic
from trinity_sync import __version__, config
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.cli import main as cli
from trinity_sync.config import comparison, invocation, messages, targets
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host import threads
from trinity_sync.launch import app, sweeps
from trinity_sync.launch.start import Resume, written_places
from trinity_sync.tracking.run_record import RunFolder, run_id

ROOT = Path(launch.__file__).parent


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        yield stand_in


def start(*arguments: str) -> int:
    return app.run_main(launch.main, arguments)


def raising(error: BaseException) -> Callable[[Any], int]:
    def behave(cfg: Any) -> int:
        raise error

    return behave


def only(paths: Iterator[Path]) -> Path:
    (path,) = paths
    return path


# one run


def test_a_run_gets_its_configuration_and_a_folder_of_its_own(launcher: StandIn, tmp_path: Path) -> None:
    assert start("sync=nccl", "name=try") == 0
    (call,) = launcher.calls
    assert (call.cfg.sync.mode, call.resume) == ("nccl", None)
    assert re.fullmatch(r"outputs/try/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(call.run_dir.relative_to(tmp_path)))
    assert OmegaConf.load(call.run_dir / ".hydra" / "overrides.yaml") == ["sync=nccl", "name=try"]


def test_the_installed_command_does_the_same(launcher: StandIn) -> None:
    assert cli.main(["run", "sync=nccl", "name=try"]) == 0
    assert launcher.calls[0].cfg == config.compose(["sync=nccl", "name=try"])


def test_a_run_sees_the_command_line_of_the_user(launcher: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trinity-sync", "run", "seed=3"])
    assert cli.main() == 0
    assert launcher.calls[0].command == ["trinity-sync", "run", "seed=3"]
    assert sys.argv == ["trinity-sync", "run", "seed=3"]


def test_a_run_does_not_change_the_working_directory(launcher: StandIn, tmp_path: Path) -> None:
    launcher.behave = lambda cfg: 0 if Path.cwd() == tmp_path else 1
    assert start() == 0


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RunError("explorer-0 died"), 1, "error: explorer-0 died\n"),
        (ConfigError("the folder is in use"), 2, "error: the folder is in use\n"),
        (ZeroDivisionError("oh"), 1, f"error: unexpected ZeroDivisionError: oh ({__file__}:"),
        (SystemExit(3), 1, f"error: unexpected SystemExit: 3 ({__file__}:"),
    ],
)
def test_an_error_of_the_run_is_one_paragraph_and_an_exit_code(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, told: str
) -> None:
    launcher.behave = raising(error)
    assert start() == code
    message = capsys.readouterr().err
    assert message.startswith(told)
    assert "Traceback" not in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_exit_code_of_the_launcher_is_passed_on(launcher: StandIn, code: int) -> None:
    launcher.behave = lambda cfg: code
    assert start() == code


def test_a_run_that_is_interrupted_before_it_has_a_record_says_so(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.behave = raising(KeyboardInterrupt())
    assert start() == 130
    assert capsys.readouterr().err.endswith("error: interrupted\n")


def test_an_unexpected_error_leaves_its_traceback_in_the_log(launcher: StandIn, tmp_path: Path) -> None:
    launcher.behave = raising(ZeroDivisionError("oh"))
    start()
    assert "ZeroDivisionError: oh" in only(tmp_path.rglob("logs/driver.log")).read_text()


def test_the_traceback_is_shown_on_demand(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    launcher.behave = raising(RunError("explorer-0 died"))
    assert start() == 1
    assert "Traceback" in capsys.readouterr().err


def test_log_messages_of_the_driver_go_into_the_log_and_not_to_the_terminal(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.behave = lambda cfg: logging.getLogger("somewhere").warning("a word") or 0
    start()
    assert "WARNING somewhere: a word" in only(tmp_path.rglob("logs/driver.log")).read_text()
    assert capsys.readouterr() == ("", "")


def test_a_refused_configuration_starts_nothing_and_leaves_no_log(launcher: StandIn, tmp_path: Path) -> None:
    assert start("trainer.steps=0") == 2
    assert launcher.calls == []
    assert list(tmp_path.rglob("logs")) == []


def test_a_new_run_does_not_write_over_the_settings_of_an_old_one(launcher: StandIn) -> None:
    assert start("hydra.run.dir=here", "seed=1") == 0
    launcher.behave = raising(ConfigError("here already holds a run"))
    assert start("hydra.run.dir=here", "seed=2") == 2
    assert OmegaConf.load("here/.hydra/overrides.yaml") == ["seed=1"]


@pytest.mark.parametrize("how", [["hydra.run.dir=here"], ["-m", "hydra.sweep.dir=.", "hydra.sweep.subdir=here"]])
def test_a_folder_that_another_run_is_about_to_begin_in_is_left_alone(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    with RunFolder.open("here", resume=False):
        before = contents(tmp_path)
        assert start(*how, "seed=2") == 2
        assert contents(tmp_path) == before
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/here is in use by process ")
    assert launcher.calls == []


@pytest.mark.parametrize(
    ("command", "times"),
    [
        (["run", "hydra.run.dir=other"], 2),
        (["run", "hydra.run.dir=other", "hydra.mode=RUN"], 1),
        (["run", "-m", "hydra.sweep.dir=other", "seed=1,2"], 6),
        (["resume", "here"], 2),
    ],
)
@pytest.mark.few(2)
def test_settings_are_composed_no_more_often_than_needed(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch, command: list[str], times: int
) -> None:
    assert start("hydra.run.dir=here") == 0
    with config.only_trusted((), config.Trust(where=Path())):
        pass  # what is ours is composed once in a process
    load, modes = ConfigLoaderImpl.load_configuration, []

    def counting(loader: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
        modes.append(kwargs["run_mode"])
        return load(loader, *args, **kwargs)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counting)
    assert cli.main(command) == 0
    assert len(modes) == times


# composition errors


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("trainer.stepz=3", r"trainer.stepz is not a setting; trainer has steps, .* \(did you mean steps\?\)"),
        ("bckend=fsdp", r"bckend is not a setting; the configuration has .* \(did you mean backend\?\)"),
        ("backend=deepspeed", "backend=deepspeed is not an option; backend has bytes, fsdp, fsdp2, megatron"),
        ("experiment=qick", r"experiment=qick is not an option; experiment has .*quick.* \(did you mean quick\?\)"),
        ("retention=[keep_lst]", r"retention=keep_lst is not an option; .* \(did you mean keep_last\?\)"),
        ("trainer.steps=many", "trainer.steps is many; must be a whole number"),
        ("trainer.steps=1.5", "trainer.steps is 1.5; must be a whole number"),
        ("trainer.steps=null", "trainer.steps is null; it needs a value"),
        ("trainer.lr=fast", "trainer.lr is fast; must be a number"),
        ("sync.durable=perhaps", "sync.durable is perhaps; must be true or false"),
        (
            "model.architecture.hidden_sise=3",
            r".*did you mean hidden_size\?\); to add a key of your own, write \+model",
        ),
        (
            "model.architecture=null model.architecture.x=3",
            r"model\.architecture\.x cannot be set: model\.architecture is",
        ),
        ("trainer", "trainer has no value; write key=value"),
        ("trainer.steps=1,2", "trainer.steps=1,2 has several values; add -m to run a sweep"),
        ("model=null", "model cannot be null; it has digits, path, shapes"),
        ("--config-name=nope", "there is no configuration nope.yaml in "),
        ("--info=all --cfg=job", "Only one of "),
        (
            "hydra.run.dir=/proc/none",
            "/proc/none does not take writes: .*choose another folder with hydra.run.dir",
        ),
        ("hydra.run.dir=${oops}", "Interpolation key 'oops' not found"),
    ],
)
@pytest.mark.few(8)
def test_what_hydra_cannot_compose_is_one_paragraph_and_exit_code_2(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], argument: str, told: str
) -> None:
    assert start(*argument.split()) == 2
    message = capsys.readouterr().err
    assert re.match(f"error: {told}", message)
    assert message.count("\n") == 1
    assert launcher.calls == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sync:\n  intervall: 1\n", "experiment/mine.yaml: sync.intervall is not a setting; .*did you mean interval"),
        ("sync:\n  interval: x\n", "experiment/mine.yaml: sync.interval is x; must be a whole number"),
        ("sync:\n  interval: [1\n", '.*mine.yaml", line 3'),
    ],
)
def test_an_error_in_an_option_file_names_the_file(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    (tmp_path / "more" / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
    assert start(f"--config-dir={tmp_path}/more", "experiment=mine") == 2
    assert re.match(f"error: {told}", capsys.readouterr().err)


# sweeps


def test_a_sweep_runs_every_job_though_one_fails(launcher: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    def behave(cfg: Any) -> int:
        if cfg.sync.mode == "memory":
            raise RunError("no memory")
        return 0

    launcher.behave = behave
    assert start("-m", "sync=checkpoint,memory,nccl") == 1
    assert [call.cfg.sync.mode for call in launcher.calls] == ["checkpoint", "memory", "nccl"]
    assert [call.run_dir.name for call in launcher.calls] == ["0", "1", "2"]
    message = capsys.readouterr().err
    assert "error: job 1: no memory\n" in message
    assert "error: 1 of 3 jobs did not end well: 1 in multirun/copy-digits/" in message


@pytest.mark.parametrize(("refused", "code"), [((), 0), ((2,), 1), ((1, 2), 2)])
@pytest.mark.few(1)
def test_the_exit_code_of_a_sweep_is_made_of_those_of_its_jobs(
    launcher: StandIn, refused: tuple[int, ...], code: int
) -> None:
    launcher.behave = lambda cfg: 2 if cfg.seed in refused else 0
    assert start("-m", "seed=1,2") == code


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["trainer.steps=140,0", "seed=1,2"],
            r"job 2 of the sweep \(trainer.steps=0 seed=1\) cannot run, so nothing was started: trainer.steps is 0",
        ),
        (
            ["trainer.schedule=free", "sync=memory,nccl"],
            r"job 1 of the sweep \(.*sync=nccl\).*: trainer.schedule is free",
        ),
        (
            ["task=jsonl", "task.path=good.jsonl,bad.jsonl"],
            r"job 1 of the sweep .*: task.answer_key='answer': bad.jsonl:1 has no such field",
        ),
        (
            ["checkpoint.dir='${hydra:runtime.output_dir}/c','~no-user/c'"],
            r"job 1 of the sweep .*checkpoint.dir is ~no-user/c",
        ),
        (["+hydra.job.env_set={LR: '0'}", "trainer.lr='1.0','${oc.env:LR}'"], r"job 1 of the sweep .*trainer.lr is 0"),
    ],
)
def test_a_sweep_of_which_one_job_cannot_run_starts_and_writes_nothing(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], told: str
) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    before = contents(tmp_path)
    assert start("-m", *overrides) == 2
    assert re.match(f"error: {told}", capsys.readouterr().err)
    assert launcher.calls == []
    assert contents(tmp_path) == before


def test_jobs_of_a_sweep_that_read_the_same_file_have_it_read_once_before(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    built: list[Any] = []
    build_task = targets.build_task
    monkeypatch.setattr(targets, "build_task", lambda *of: built.append(of) or build_task(*of))
    before: list[int] = []
    launcher.behave = lambda cfg: before.append(len(built)) or 0
    assert start("-m", "task=jsonl", "task.path=rows.jsonl", "seed=1,2,3") == 0
    assert before == [2, 3, 4]


def test_settings_of_jobs_that_run_elsewhere_are_checked_there(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "on_this_machine", lambda hydra: False)
    assert start("-m", "trainer.steps=140,0") == 1
    assert len(launcher.calls) == 1


def test_a_sweep_over_an_unknown_option_starts_and_writes_nothing(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("-m", "sync=memory,carrier-pigeon") == 2
    assert capsys.readouterr().err.startswith("error: sync=carrier-pigeon is not an option; ")
    assert launcher.calls == []
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("how", ["code", "exception"])
def test_an_interrupt_ends_the_whole_sweep(launcher: StandIn, how: str) -> None:
    launcher.behave = raising(KeyboardInterrupt()) if how == "exception" else lambda cfg: 130
    assert start("-m", "seed=1,2,3") == 130
    assert len(launcher.calls) == 1


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("again", "taken"),
    [
        (["hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra:job.num}", "seed=1,2"], "sweep/0"),
        (["hydra.sweep.dir=sweep", "hydra.sweep.subdir=${seed}", "seed=5,1"], "sweep/1"),
        (["hydra.sweep.dir=sweep/1", "seed=5,6"], "sweep/1"),
        (["--config-dir=more", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${seed}", "experiment=swept"], "sweep/1"),
    ],
)
@pytest.mark.few(1)
def test_a_sweep_into_the_folder_of_a_run_is_refused_before_anything_is_written(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], again: list[str], taken: str
) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    swept = "# @package _global_\nhydra: {sweeper: {params: {seed: '5,1'}}}\n"
    (tmp_path / "more" / "experiment" / "swept.yaml").write_text(swept)
    assert start("-m", "hydra.sweep.dir=sweep", "seed=1,2") == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert start("-m", *again) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/{taken} already holds a run, so nothing ")
    assert contents(tmp_path) == before
    assert len(launcher.calls) == 2


@pytest.mark.all
def test_a_sweep_may_have_more_jobs_in_the_folder_of_another(launcher: StandIn) -> None:
    where = ["hydra.sweep.dir=sweep", "hydra.sweep.subdir=seed-${seed}"]
    assert start("-m", *where, "seed=1,2") == 0
    assert start("-m", *where, "seed=3,4") == 0
    assert len(launcher.calls) == 4


def test_jobs_that_would_share_a_folder_are_refused_before_the_first_one_runs(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("-m", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=lr-${trainer.lr}", "seed=1,2") == 2
    assert f"jobs 0 and 1 of the sweep would both write into {tmp_path}/sweep/lr-" in capsys.readouterr().err
    assert launcher.calls == []
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("shared", "key"),
    [
        (["checkpoint.dir=kept"], "checkpoint.dir={}/kept"),
        (["checkpoint.dir=${oc.env:PLACE}"], "checkpoint.dir={}/named"),
        (["checkpoint.dir=./kept,kept"], "checkpoint.dir={}/kept"),
        (["checkpoint.dir=kept,link"], "checkpoint.dir={}/kept"),
        (["checkpoint.mirror=far"], "checkpoint.mirror={}/far"),
        (["checkpoint.mirror=far,'file://${oc.env:HERE}/far'"], "checkpoint.mirror={}/far"),
        (
            ["checkpoint.mirror=ftp://me:secret@host/run,ftp://me:secret@host/run/"],
            "checkpoint.mirror=ftp://me:***@host/run",
        ),
        (["checkpoint.mirror=null,sweep/0/checkpoints"], "checkpoint.mirror={}/sweep/0/checkpoints"),
        (["checkpoint.dir=sweep/1/checkpoints,null"], "checkpoint.dir={}/sweep/1/checkpoints"),
        (["sync=checkpoint", "sync.store=far"], "sync.store={}/far"),
    ],
)
@pytest.mark.few(4)
def test_jobs_that_would_share_a_place_are_refused_before_the_first_one_runs(
    launcher: StandIn,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shared: list[str],
    key: str,
) -> None:
    monkeypatch.setenv("PLACE", "named")
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    before = contents(tmp_path)
    swept = [] if any("," in text for text in shared) else ["seed=1,2"]
    assert start("-m", "hydra.sweep.dir=sweep", *shared, *swept) == 2
    said = capsys.readouterr().err
    assert f"would both write to {key.format(tmp_path)}" in said
    assert "secret" not in said
    assert contents(tmp_path) == before
    assert not launcher.calls


@pytest.mark.parametrize("own", ["${hydra:job.num}", "${seed}", "${hydra:runtime.output_dir}/kept"])
@pytest.mark.few(1)
def test_jobs_with_places_of_their_own_may_run(launcher: StandIn, own: str) -> None:
    places = [f"checkpoint.dir=kept/{own}", f"checkpoint.mirror=far/{own}", "sync=checkpoint", f"sync.store=near/{own}"]
    assert start("-m", "hydra.sweep.dir=sweep", *places, "seed=1,2") == 0
    assert len(launcher.calls) == 2


@pytest.mark.parametrize(("place", "code"), [("far", 2), ("far/${hydra:job.num}", 0), ("far/${seed}", 0)])
@pytest.mark.few(1)
def test_a_search_whose_jobs_would_share_a_place_is_refused(
    launcher: StandIn, place: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ["hydra/sweeper=search", "hydra.sweeper.n_trials=2", "seed=choice(1,2)"]
    assert start("-m", "hydra.sweep.dir=sweep", f"checkpoint.mirror={place}", *search) == code
    assert ("would both write to checkpoint.mirror=" in capsys.readouterr().err) == (code == 2)


def test_jobs_that_ran_in_other_processes_are_judged_by_their_files(tmp_path: Path) -> None:
    for number, status in enumerate(["completed", "failed", None]):
        (tmp_path / str(number) / ".hydra").mkdir(parents=True)
        if status:
            (tmp_path / str(number) / "run.json").write_text(json.dumps({"status": status}))
    assert list(sweeps.codes_on_disk(tmp_path).values()) == [0, 1, 2]


def test_jobs_that_ran_in_other_processes_may_have_folders_below_each_other(tmp_path: Path) -> None:
    job = tmp_path / "task.path=" / "data" / "rows.jsonl"
    (job / ".hydra").mkdir(parents=True)
    (job / "run.json").write_text('{"status": "failed"}')
    assert sweeps.codes_on_disk(tmp_path) == {job: 1}


def test_jobs_of_an_earlier_sweep_in_the_folder_do_not_count(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "in_this_process", lambda hydra: False)
    (tmp_path / "sweep" / "old" / ".hydra").mkdir(parents=True)
    assert start("-m", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=seed-${seed}", "seed=1") == 0
    app._session.codes.clear()  # as where they ran in other processes
    assert [folder.name for folder in app._codes()] == ["seed-1"]


def test_the_lock_of_a_failed_node_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = synthetic.Clock(0.0)
    timing = SimpleNamespace(monotonic=clock, sleep=lambda seconds: clock.pass_(30.0))  # other threads keep theirs
    monkeypatch.setattr(threads, "time", timing)
    with RunFolder.open(tmp_path, resume=False) as folder:
        sweeps.wait_until_free(tmp_path)
        assert clock.now == 120.0
        timing.sleep = lambda seconds: folder.close()
        clock.now = 0.0
        sweeps.wait_until_free(tmp_path)
    assert clock.now == 0.0


def test_a_job_that_begins_while_others_end_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Process:
        def __init__(self, name: str) -> None:
            self.name = name

        def send_signal(self, signum: int) -> None:
            told.append(self.name)

    first, next_one = Process("first"), Process("next")
    running = iter([[first], [first, next_one], [next_one], []])
    monkeypatch.setattr(sweeps, "_running", lambda: next(running))
    sweeps._end_jobs(60.0)
    assert told == ["first", "next"]


def test_a_job_returns_its_reward_to_a_sweeper_that_looks_for_the_best(launcher: StandIn) -> None:
    returned: list[float] = []

    def body(cfg: Any) -> float:
        returned.append(app.job(cfg))
        return returned[-1]

    entry = hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(body)
    app.run_main(entry, ["seed=1", "hydra.run.dir=good"])
    launcher.behave = raising(RunError("early"))
    app.run_main(entry, ["seed=2", "hydra.run.dir=bad"])
    launcher.behave = raising(ConfigError("good already holds a run"))
    app.run_main(entry, ["seed=3", "hydra.run.dir=good"])
    assert returned[0] == 0.5
    assert all(map(math.isnan, returned[1:]))


# resume


def first_run(*arguments: str, folder: str = "run") -> Path:
    assert start(*arguments, f"hydra.run.dir={config.quote(folder)}") == 0
    return Path(folder).absolute()


def saved(folder: Path) -> list[str]:
    return list(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))


def test_a_resume_goes_on_in_place_with_the_settings_of_the_run(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run("sync=nccl", "trainer.steps=10")
    assert cli.main(["resume", str(folder)]) == 0
    assert launcher.calls[1].resume
    assert launcher.calls[1].run_dir == folder
    assert launcher.calls[1].cfg == launcher.calls[0].cfg
    assert capsys.readouterr().err == ""


def test_a_resume_keeps_the_rate_and_the_name_that_an_earlier_release_chose(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run(f"model.path={bare_model(tmp_path / 'Qwen')}")
    assert "rate 1e-06 (GRPO on a model of yours; trainer.lr=... changes it)" in capsys.readouterr().out
    then = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert (then.name, then.trainer.lr) == ("copy-digits-Qwen", 1e-6)
    then.name, then.trainer.lr = "copy-digits", 5e-4
    OmegaConf.save(then, folder / ".hydra" / "config.yaml")
    assert cli.main(["resume", str(folder)]) == 0
    cfg = launcher.calls[1].cfg
    assert (cfg.name, cfg.trainer.lr) == ("copy-digits", 5e-4)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("rate 0.0005\n", "")
    assert cli.main(["resume", str(folder), "trainer.lr=2e-6"]) == 0
    assert (launcher.calls[2].cfg.name, launcher.calls[2].cfg.trainer.lr) == ("copy-digits", 2e-6)


@pytest.mark.all
def test_a_sweep_over_models_has_one_folder_and_its_jobs_their_own_names_and_rates(
    launcher: StandIn, tmp_path: Path
) -> None:
    models = [str(bare_model(tmp_path / name)) for name in ("A", "B")]
    assert start("-m", f"model.path={','.join(models)}", "model.lora.rank=0,8", "sync=memory") == 0
    calls = launcher.calls
    assert len({call.run_dir.parent for call in calls}) == 1
    assert calls[0].run_dir.parts[-3:-2] == ("copy-digits",)
    assert [call.cfg.name for call in calls] == ["copy-digits-A", "copy-digits-A", "copy-digits-B", "copy-digits-B"]
    assert [call.cfg.trainer.lr for call in calls] == [1e-6, 1e-4, 1e-6, 1e-4]


def test_printed_and_saved_settings_have_the_values_of_defaults_that_fit_the_model(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"model.path={bare_model(tmp_path / 'Qwen')}"
    assert start(given, "--cfg", "job") == 0
    printed = capsys.readouterr().out
    assert "name: copy-digits-Qwen\n" in printed
    assert "  lr: 1.0e-06\n" in printed
    assert start(given, "--dry-run") == 0
    assert "rate 1e-06 (GRPO" in capsys.readouterr().out


def test_a_resume_takes_new_settings_and_shows_what_they_change(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run("sync=nccl", "trainer.steps=10")
    assert cli.main(["resume", str(folder), "trainer.steps=20"]) == 0
    assert launcher.calls[1].cfg == config.compose(["sync=nccl", "trainer.steps=20"])
    assert capsys.readouterr().err == "changed: trainer.steps: 10 -> 20\n"


def test_settings_that_came_with_a_later_release_are_one_line_at_a_resume(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run("trainer.steps=10")
    saved_then = OmegaConf.load(folder / ".hydra" / "config.yaml")
    for key in ("deterministic", "max_tokens", "balance_tokens", "remove_padding"):
        del saved_then.trainer[key]
    OmegaConf.save(saved_then, folder / ".hydra" / "config.yaml")
    assert cli.main(["resume", str(folder), "trainer.steps=20"]) == 0
    new, changed = capsys.readouterr().err.splitlines()
    assert new.startswith("new since this run was started, now with these values: trainer.")
    assert "trainer.max_tokens=None" in new
    assert changed == "changed: trainer.steps: 10 -> 20"


def test_a_later_resume_replays_the_settings_of_an_earlier_one_and_they_do_not_pile_up(launcher: StandIn) -> None:
    folder = first_run("sync=nccl", "trainer.steps=10")
    cli.main(["resume", str(folder), "trainer.steps=20"])
    cli.main(["resume", str(folder), "trainer.steps=30", "sync=memory"])
    cli.main(["resume", str(folder), "seed=4"])
    assert saved(folder) == ["trainer.steps=30", "sync=memory", "seed=4"]
    assert launcher.calls[3].cfg == config.compose(["sync=memory", "trainer.steps=30", "seed=4"])


@pytest.mark.parametrize(
    "mistake",
    ["trainer.stepz=1", "trainer.steps=0", "trainer.steps", "backend=deepspeed", "hydra.sweeper.params={a: 1}"],
)
@pytest.mark.few(2)
def test_a_resume_with_a_mistake_leaves_the_run_as_it_was(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    folder = first_run("trainer.steps=10")
    before = contents(folder)
    assert cli.main(["resume", str(folder), mistake]) == 2
    assert contents(folder) == before
    assert len(launcher.calls) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("when", ["before it begins", "when it has begun"])
def test_a_refused_resume_leaves_the_settings_of_the_run(launcher: StandIn, when: str) -> None:
    folder = first_run("trainer.steps=10")
    before = contents(folder / ".hydra")
    launcher.refuses = when == "before it begins"
    launcher.behave = raising(ConfigError("backend.ranks is 2, but there is one processor"))
    assert cli.main(["resume", str(folder), "backend.ranks=2"]) == 2
    assert contents(folder / ".hydra") == before
    assert len(launcher.calls) == 2


def test_a_resume_that_begins_has_saved_its_settings(launcher: StandIn) -> None:
    folder = first_run("trainer.steps=10")
    first = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    saw: list[list[str]] = []
    launcher.behave = lambda cfg: saw.append(saved(folder)) or 1
    assert cli.main(["resume", str(folder), "seed=4"]) == 1
    assert saw == [saved(folder)] == [["trainer.steps=10", "seed=4"]]
    assert OmegaConf.load(folder / ".hydra" / "config.yaml") == config.compose(["trainer.steps=10", "seed=4"])
    last = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    assert {key for key in first if first._get_node(key) != last._get_node(key)} == {
        "job",
        "overrides",
        "run",
        "runtime",
    }


@pytest.mark.parametrize("name", ["hydra.yaml", "overrides.yaml", "config.yaml"])
@pytest.mark.few(1)
def test_a_resume_cut_off_while_it_saves_its_settings_has_the_next_one_show_them(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def cut(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(errno.EIO, "cut off")
        path.write_text(text)

    folder = first_run("seed=1")
    with monkeypatch.context() as patched:
        patched.setattr(app, "replace_file", cut)
        assert cli.main(["resume", str(folder), "seed=2"]) == 1
    assert f"{folder}/.hydra/{name} cannot be written: cut off" in capsys.readouterr().err
    assert cli.main(["resume", str(folder)]) == 0
    used = launcher.calls[-1].cfg.seed
    assert capsys.readouterr().err == ("changed: seed: 1 -> 2\n" if used == 2 else "")


def test_a_run_in_use_is_not_resumed(launcher: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    folder = first_run("trainer.steps=10")
    with RunFolder.open(folder, resume=True):
        assert cli.main(["resume", str(folder), "trainer.steps=20"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert saved(folder) == ["trainer.steps=10"]


def committed(folder: Path, *steps: int) -> None:
    """Let the record of a run say that it committed checkpoints."""
    lines = [{"event": "commit", "attempt": 0, "time": 1.0, "step": step, "kind": "full"} for step in steps]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resume_that_cannot_see_what_was_committed_leaves_the_run_as_it_was(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run("trainer.steps=10")
    committed(folder, 2, 4)
    before = contents(folder)
    assert cli.main(["resume", str(folder), "trainer.steps=20"]) == 2
    said = capsys.readouterr().err
    assert "steps 2, 4 were committed" in said
    assert f"checkpoint.dir={folder}/checkpoints" in said
    assert "--from-scratch" in said
    assert len(launcher.calls) == 1
    assert contents(folder) == before


def test_the_checkpoints_of_another_run_are_not_taken_over_unasked(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"checkpoint.dir={tmp_path}/kept"
    owner, foreign = first_run(place, folder="owner"), first_run(place, folder="foreign")
    write_mark(tmp_path / "kept", Owner.new(run_id(owner / "run.json"), owner))
    commit(tmp_path / "kept", 1)
    for more in ([], [place]):
        assert cli.main(["resume", str(foreign), *more]) == 2
        assert f"{tmp_path}/kept belongs to another run" in capsys.readouterr().err
    assert cli.main(["resume", str(owner)]) == 0
    owner.rename("moved")
    assert cli.main(["resume", "moved"]) == 0


BEGUN = {"checkpoint.resume_from": None, "sync.store": None}


def test_a_resume_uses_the_places_that_were_recorded(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", f"{tmp_path}/kept")
    folder = first_run("checkpoint.dir=${oc.env:KEPT}", "checkpoint.mirror=${oc.env:KEPT}/far")
    places = written_places(config.typed(launcher.calls[0].cfg), folder.absolute())
    assert places == {"checkpoint.dir": f"{tmp_path}/kept", "checkpoint.mirror": f"{tmp_path}/kept/far"} | BEGUN
    record(folder, places=places)
    for change in (lambda: monkeypatch.setenv("KEPT", "/elsewhere"), lambda: monkeypatch.delenv("KEPT")):
        change()
        assert cli.main(["resume", str(folder)]) == 0
        assert written_places(config.typed(launcher.calls[-1].cfg), folder.absolute()) == places
    assert cli.main(["resume", str(folder), "checkpoint.dir=new", "checkpoint.mirror=null"]) == 0
    assert written_places(config.typed(launcher.calls[-1].cfg), folder.absolute()) == {
        "checkpoint.dir": f"{tmp_path}/new",
        "checkpoint.mirror": None,
        **BEGUN,
    }


def test_a_recorded_place_inside_the_runs_folder_moves_with_it(launcher: StandIn, tmp_path: Path) -> None:
    folder = first_run(f"checkpoint.dir={tmp_path}/run/kept", folder="run")
    record(folder, places=written_places(config.typed(launcher.calls[0].cfg), folder.absolute()))
    folder.rename("moved")
    assert cli.main(["resume", "moved"]) == 0
    assert launcher.calls[-1].cfg.checkpoint.dir == f"{tmp_path}/moved/kept"


def test_a_place_with_a_password_is_not_recorded(launcher: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR", "ftp://me:secret@host/run")
    folder = first_run("checkpoint.mirror=${oc.env:FAR}")
    places = written_places(config.typed(launcher.calls[0].cfg), folder.absolute())
    assert "checkpoint.mirror" not in places
    record(folder, places=places)
    assert cli.main(["resume", str(folder)]) == 0
    assert launcher.calls[-1].cfg.checkpoint.mirror == "ftp://me:secret@host/run"


def record(folder: Path, **more: object) -> None:
    """Add to a run's record."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def disown(folder: Path) -> None:
    """Make the folder of a run one of somebody else's: this user has no record of it."""
    (folder / ".hydra" / "recorded.json").unlink()


REWARD = "task.reward._target_=my_rewards.mine"


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's that leaves a mark where it is imported."""
    mark = tmp_path / "imported"
    (tmp_path / "my_rewards.py").write_text(
        f"import os\nopen({str(mark)!r}, 'w').close()\n\ndef mine(prompt, response):\n    return 1.0\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_rewards", None)  # of another test
    yield mark
    sys.modules.pop("my_rewards", None)


def test_a_saved_reward_of_ones_own_is_allowed_or_given_again(
    launcher: StandIn, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = first_run("task=jsonl", f"task.path={tmp_path}/prompts.jsonl", REWARD)
    sys.modules.pop("my_rewards")
    rewards.unlink()
    disown(folder)
    assert cli.main(["resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"task.reward._target_ is my_rewards.mine in the saved settings of {folder}" in said
    assert "--allow-target my_rewards" in said
    assert not rewards.exists(), "it was imported"
    place = f"task.path={tmp_path}/prompts.jsonl"
    assert cli.main(["resume", str(folder), place, "--allow-target", "my_reward"]) == 2
    assert cli.main(["resume", str(folder), place, "task.reward=my_rewards.mine"]) == 0
    disown(folder)
    assert cli.main(["resume", str(folder), place, "--allow-target", "my_rewards"]) == 0
    assert len(launcher.calls) == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task._target_=os.system", "task._target_ is os.system"),
        ("+task.more=[{_target_: os.system}]", "task.more.0._target_ is os.system"),
        ("task._target_=trinity_sync.tasks.rewards.re.compile", "task._target_ is trinity_sync.tasks.rewards.re"),
        (
            "task._target_=trinity_sync.checkpoint.folder.deletion.delete_folder",
            "task._target_ is trinity_sync.checkpoint.folder.deletion",
        ),
        ("+tracker.mine._target_=os.system", "tracker.mine._target_ is os.system"),
        ("+hydra.callbacks.evil._target_=os.system", "hydra.callbacks.evil._target_ is os.system"),
        ("hydra.searchpath=[pkg://my_rewards]", "hydra.searchpath is my_rewards"),
        ("hydra.searchpath=[pkg\\://my_rewards]", "hydra.searchpath is my_rewards"),
        ("hydra.searchpath=[structured://my_rewards]", "hydra.searchpath is my_rewards"),
        ("hydra.job.chdir=true", "hydra.job.chdir is true"),
        ("+hydra.job_logging.handlers.x.class=os.system", "hydra.job_logging.handlers.x.class is os.system"),
        ("model.trust_remote_code=true", "model.trust_remote_code=true"),
        ("+task.reward.trust_remote_code=true", "task.reward.trust_remote_code=true"),
        ("+task.reward.function_path=/tmp/evil.py", "task.reward.function_path=/tmp/evil.py"),
        ("task._target_=trinity_sync.explorer.hf.HFEngine", "task._target_ is trinity_sync.explorer.hf.HFEngine"),
        ("+tracker.mine._target_=trinity_sync.sync.memory.MemoryMode", "tracker.mine._target_ is trinity_sync.sync"),
        ("hydra.job_logging.handlers.file.filename=/tmp/profile", "hydra.job_logging.handlers.file.filename is /tmp"),
        ("hydra.job_logging.formatters.line.format=evil", "hydra.job_logging.formatters.line.format is evil"),
        ("hydra.output_subdir=/tmp/elsewhere", "hydra.output_subdir is /tmp/elsewhere"),
        ("+more=[{_target_: os.system}]", "more.0._target_ is os.system"),
        ("+tracker.mine='${oc.create:{_target_: os.system}}'", "tracker.mine._target_ is os.system"),
        ("+tracker.mine='${oc.${.x}:\"{_target_: os.system}\"}'", "tracker.mine is ${oc.${.x}:"),
        ("+tracker.mine='${oc.select:x,{_target_: os.system}}'", "tracker.mine is ${oc.select:"),
        ("+tracker.mine.path='\\${oc.create:{_target_: os.system}}'", "tracker.mine.path is \\${oc.create:"),
        (
            "+tracker.mine={first: '$${.second}', second: '{oc.create:{_target_: os.system}}'}",
            "tracker.mine.first is $${",
        ),
        ("+hydra.callbacks.evil='${oc.decode:\"{_target_: os.system}\"}'", "hydra.callbacks.evil is ${oc.decode:"),
        ("+hydra.callbacks.evil='${hydra.runtime.output_dir}'", "hydra.callbacks.evil is ${hydra.runtime.output_dir}"),
        ("+hydra.job.env_set.LD_PRELOAD=evil.so", "hydra.job.env_set.LD_PRELOAD is evil.so"),
        ("+backend.overrides.use_dist_checkpointing=true", "backend.overrides.use_dist_checkpointing=true"),
        ("+backend.overrides={a: {fp8_quantizer_factory: os.system}}", "overrides.a.fp8_quantizer_factory=os.system"),
        ("hydra.overrides.task=['${oc.create:{_target_: os.system}}']", "hydra.overrides.task.0 is ${oc.create:"),
    ],
)
@pytest.mark.few(6)
def test_what_the_settings_of_a_foreign_folder_name_is_not_run(
    launcher: StandIn, rewards: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    folder = first_run("trainer.steps=10")
    OmegaConf.save([override], folder / ".hydra" / "overrides.yaml")
    assert cli.main(["resume", str(folder)]) == 2
    assert said in capsys.readouterr().err
    assert len(launcher.calls) == 1
    assert not rewards.exists()


def test_code_of_a_model_that_is_given_again_is_let_run(launcher: StandIn) -> None:
    folder = first_run("trainer.steps=10", "model.trust_remote_code=true")
    assert cli.main(["resume", str(folder)]) == 2
    assert cli.main(["resume", str(folder), "model.trust_remote_code=true"]) == 0


def test_plain_interpolations_of_saved_settings_are_resolved_as_before(launcher: StandIn) -> None:
    folder = first_run(
        "trainer.steps=10", "trainer.warmup_steps=${seed}", "+checkpoint.mirror_options.a='${oc.env:HOME}/${name}'"
    )
    assert cli.main(["resume", str(folder)]) == 0
    assert launcher.calls[1].cfg == launcher.calls[0].cfg


@pytest.mark.parametrize("value", ["'${oc.create:{b: 1}}'", "{b: '${oc.create:{c: 1}}'}"])
@pytest.mark.few(1)
def test_a_saved_value_that_is_made_while_it_is_read_is_given_again(
    launcher: StandIn, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    own = f"+checkpoint.mirror_options.a={value}"
    folder = first_run("trainer.steps=10", own)
    disown(folder)
    assert cli.main(["resume", str(folder)]) == 2
    assert re.search(r"add 'checkpoint\.mirror_options\.a\S*=", capsys.readouterr().err)
    assert cli.main(["resume", str(folder), own]) == 0


def test_an_option_file_of_a_foreign_folder_is_looked_into(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    file = tmp_path / "more" / "experiment" / "more.yaml"
    file.write_text("# @package _global_\nseed: 11\n")
    folder = first_run(f"--config-dir={tmp_path}/more", "experiment=more")
    file.write_text("# @package _global_\ntask:\n  _target_: os.system\n")
    for arguments in ([], ["experiment=more"]):
        assert cli.main(["resume", str(folder), *arguments]) == 2
        assert "task._target_ is os.system" in capsys.readouterr().err


def test_what_runs_is_what_was_looked_into(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    file = tmp_path / "more" / "experiment" / "more.yaml"
    file.write_text("# @package _global_\nseed: 11\n")
    folder = first_run(f"--config-dir={tmp_path}/more", "experiment=more")
    # as one can whose choice depends on the time of day
    evil = "# @package _global_\nhydra:\n  callbacks:\n    evil:\n      _target_: my_evil.callback\n"
    monkeypatch.setattr(comparison, "check_inputs", lambda *given: file.write_text(evil))
    assert cli.main(["resume", str(folder)]) == 2
    assert "hydra.callbacks.evil._target_ is my_evil.callback in the saved settings" in capsys.readouterr().err
    assert len(launcher.calls) == 1


def test_a_run_with_a_primary_config_of_ones_own_is_resumed(launcher: StandIn, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 11\n")
    folder = first_run(f"--config-dir={tmp_path}/more", "--config-name=mine", "trainer.steps=10")
    assert cli.main(["resume", str(folder), "trainer.steps=20"]) == 0
    assert [call.cfg.seed for call in launcher.calls] == [11, 11]


def test_a_setting_that_cannot_be_resolved_any_more_is_given_anew(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLACE", "/before")
    folder = first_run("trainer.steps=10", "checkpoint.mirror=${oc.env:PLACE}")
    monkeypatch.delenv("PLACE")
    assert cli.main(["resume", str(folder), "checkpoint.mirror=null"]) == 0
    assert capsys.readouterr().err == "changed: checkpoint.mirror: ${oc.env:PLACE} -> None\n"


@pytest.mark.parametrize("scheme", ["pkg", "structured"])
@pytest.mark.parametrize("place", ["option folder", "beside ours"])
@pytest.mark.few(1)
def test_a_primary_config_of_a_foreign_folder_has_no_package_imported(
    launcher: StandIn, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, scheme: str
) -> None:
    folder = first_run("trainer.steps=10")
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"defaults: [config]\nhydra:\n  searchpath: ['${{oc.env:NO_SUCH,{scheme}}}://my_rewards']\n")
    settings = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
    settings.hydra.job.config_name = "theirs"
    if place == "beside ours":
        settings.hydra.job.config_name = os.path.relpath(theirs.with_suffix(""), config.conf_dir())
    else:
        source = {"path": str(tmp_path), "schema": "file", "provider": "command-line"}
        settings.hydra.runtime.config_sources.append(source)
    OmegaConf.save(settings, folder / ".hydra" / "hydra.yaml")
    for arguments in ([], ["sync=nccl"]):
        assert cli.main(["resume", str(folder), *arguments]) == 2
        said = capsys.readouterr().err
        assert "hydra.searchpath is my_rewards" in said
        assert "--allow-target my_rewards" in said
    assert len(launcher.calls) == 1
    assert not rewards.exists()


@pytest.mark.parametrize("given", [["hydra.searchpath=[pkg://my_rewards]"], ["--allow-target", "my_rewards"]])
@pytest.mark.few(1)
def test_a_package_of_option_files_is_allowed_or_given_again(
    launcher: StandIn, rewards: Path, given: list[str]
) -> None:
    folder = first_run("trainer.steps=10")
    OmegaConf.save(["hydra.searchpath=[pkg://my_rewards]"], folder / ".hydra" / "overrides.yaml")
    assert cli.main(["resume", str(folder), *given]) == 0
    assert rewards.exists()


def test_how_to_insist_is_handed_on(launcher: StandIn) -> None:
    folder = first_run("trainer.steps=10")
    committed(folder, 4)
    assert cli.main(["resume", str(folder), "--from-scratch", "trainer.steps=20"]) == 0
    assert cli.main(["resume", "--skip-unreadable", str(folder), "trainer.steps=20"]) == 2
    assert launcher.calls[1].resume == Resume(from_scratch=True, started_in=Path.cwd())
    assert launcher.calls[1].cfg.trainer.steps == 20
    assert cli.main(["resume", str(folder), "--from-scratch", "--bogus"]) == 2
    assert len(launcher.calls) == 2


@pytest.mark.parametrize("name", ["with blank", "a,b=[c]", "it's {here}", "back\\slash"])
@pytest.mark.few(1)
def test_a_run_in_a_folder_with_special_characters_is_resumed(launcher: StandIn, name: str) -> None:
    folder = first_run(folder=name)
    assert cli.main(["resume", name]) == 0
    assert launcher.calls[1].run_dir == folder


@pytest.mark.all
def test_relative_paths_count_from_where_a_run_was_started(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prompts.jsonl", "elsewhere/prompts.jsonl", "elsewhere/more.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a", "answer": "b"}\n')
    for name in ("model", "elsewhere/model", "elsewhere/org/name"):
        bare_model(tmp_path / name)
    folder = first_run(
        "task=jsonl",
        "task.path=prompts.jsonl",
        "model=path",
        "model.path=model",
        "checkpoint.dir=store",
        "checkpoint.mirror=copies",
        "checkpoint.resume_from=other/global_step_2",
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    for _ in range(2):
        assert cli.main(["resume", str(folder)]) == 0
        assert capsys.readouterr().err == ""
        call = launcher.calls[-1]
        assert call.resume.started_in == tmp_path
        assert call.cfg.task.path == f"{tmp_path}/prompts.jsonl"
        assert call.cfg.model.path == f"{tmp_path}/model"
        assert (call.cfg.checkpoint.dir, call.cfg.checkpoint.mirror) == (f"{tmp_path}/store", f"{tmp_path}/copies")
        assert OmegaConf.load(folder / ".hydra" / "config.yaml") == launcher.calls[0].cfg
        assert OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.cwd == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert config.config_digest(call.cfg) == config.config_digest(launcher.calls[0].cfg)


def test_paths_that_a_resume_is_given_count_from_where_it_is_given(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = first_run("trainer.steps=10")
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    given = ["checkpoint.dir=store", "checkpoint.mirror=s3://bucket/x", "model=path", "model.path=org/name"]
    assert cli.main(["resume", str(folder), *given, "checkpoint.mirror=copies"]) == 0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", str(folder)]) == 0
    for call in launcher.calls[1:]:
        assert call.cfg.checkpoint.dir == f"{tmp_path}/else where/store"
        assert call.cfg.checkpoint.mirror == f"{tmp_path}/else where/copies"
        assert call.cfg.model.path == "org/name"


def test_a_job_of_a_sweep_is_resumed_as_one_run(launcher: StandIn) -> None:
    assert start("-m", "hydra.sweep.dir=sweep", "seed=1,2", "trainer.steps=10") == 0
    assert cli.main(["resume", "sweep/1"]) == 0
    assert launcher.calls[2].cfg == launcher.calls[1].cfg
    assert launcher.calls[2].run_dir == Path("sweep/1").absolute()


@pytest.mark.parametrize("where", ["saved", "given"])
@pytest.mark.few(1)
def test_a_resume_is_one_run_whatever_the_settings_say(launcher: StandIn, where: str) -> None:
    folder = first_run("trainer.steps=10")
    if where == "saved":
        OmegaConf.save(["trainer.steps=10", "hydra.mode=MULTIRUN"], folder / ".hydra" / "overrides.yaml")
    assert cli.main(["resume", str(folder), *(["hydra.mode=MULTIRUN"] if where == "given" else [])]) == 0
    assert [call.run_dir for call in launcher.calls] == [folder, folder]
    assert not Path("multirun").exists()


OF_EACH_KIND = ("quick", "staleness")
"""A run and a sweep. All others are tried in `make test-all`."""
EXPERIMENTS = sorted(found.stem for found in (config.conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize(
    "experiment", [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.all) for name in EXPERIMENTS]
)
@pytest.mark.few(1)
def test_a_saved_experiment_runs_as_it_says_and_any_job_of_it_is_resumed(launcher: StandIn, experiment: str) -> None:
    if experiment == "learning_rate":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    where = ["hydra.run.dir=here", "hydra.sweep.dir=here"]
    assert start(f"experiment={experiment}", *given(experiment, Path.cwd()), *where) == 0
    swept = Path("here/multirun.yaml").exists()
    assert len(launcher.calls) == JOBS.get(experiment, 1)
    assert swept == (experiment in JOBS)
    last = launcher.calls[-1]
    assert cli.main(["resume", str(last.run_dir)]) == 0
    again = launcher.calls[-1]
    assert (again.cfg, again.run_dir, bool(again.resume)) == (last.cfg, last.run_dir, True)


JOBS = {
    "staleness": 3,
    "off_policy": 8,
    "sync_strategies": 12,
    "backends": 3,
    "checkpoint_cost": 8,
    "learning_rate": 12,
    "shapes": 6,
}
"""Of the experiments that are sweeps."""


def test_one_job_of_a_saved_sweep_is_run_alone(launcher: StandIn) -> None:
    assert start("experiment=staleness", "hydra.mode=RUN", "sync.max_staleness=4") == 0
    (call,) = launcher.calls
    assert (call.cfg.sync.max_staleness, call.cfg.sync.interval) == (4, 4)


@pytest.mark.all
def test_a_resume_finds_the_option_files_that_the_run_was_given(launcher: StandIn, tmp_path: Path) -> None:
    for folder in ("more", "further"):
        (tmp_path / folder / "experiment").mkdir(parents=True)
        (tmp_path / folder / "experiment" / f"{folder}.yaml").write_text("# @package _global_\nseed: 11\n")
    folder = first_run(
        f"--config-dir={tmp_path}/more", f"hydra.searchpath=[file://{tmp_path}/further]", "experiment=more"
    )
    assert cli.main(["resume", str(folder)]) == 0
    assert cli.main(["resume", str(folder), "experiment=further"]) == 0
    assert [call.cfg.seed for call in launcher.calls] == [11, 11, 11]


@pytest.mark.parametrize("what", ["nothing", "empty", "sweep", "garbled"])
def test_what_is_no_run_cannot_be_resumed(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    folder = tmp_path / "folder"
    if what != "nothing":
        folder.mkdir()
    if what == "sweep":
        (folder / "multirun.yaml").write_text("")
    if what == "garbled":
        first_run(folder="folder")
        (folder / ".hydra" / "hydra.yaml").write_text("[")
    calls = len(launcher.calls)
    assert cli.main(["resume", str(folder)]) == 2
    assert len(launcher.calls) == calls
    assert re.search("name (the folder|one of its jobs)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        (["a=1", "b=2"], ["a=3"], ["b=2", "a=3"]),
        (["sync=nccl", "sync.slots=3"], ["sync=memory"], ["sync.slots=3", "sync=memory"]),
        (["+a=1"], ["a=2"], ["+a=1", "a=2"]),
        (["+a=1", "a=2"], ["a=3"], ["+a=1", "a=3"]),
        (["~tracker"], ["~tracker"], ["~tracker"]),
    ],
)
def test_a_new_override_takes_the_place_of_the_one_it_replaces(
    old: list[str], new: list[str], merged: list[str]
) -> None:
    assert invocation.merge_overrides(old, new) == merged


def test_keys_that_only_the_option_before_had_go_with_it() -> None:
    old = ["backend=megatron", "backend.tp=2", "backend.ranks=4", "+backend.overrides.x=1", "sync.slots=3"]

    def compose(choice: str) -> DictConfig:
        return config.compose([choice])

    kept = invocation.without_foreign_keys(old, ["backend=fsdp2", "trainer.steps=9"], compose)
    assert kept == ["backend=megatron", "backend.ranks=4", "+backend.overrides.x=1", "sync.slots=3"]
    assert invocation.without_foreign_keys(old, ["trainer.steps=9"], compose) == old


# the command line


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), ([], 2), (["bogus"], 2), (["resume"], 2), (["report", "/none"], 2)],
)
def test_exit_codes_of_the_command_line(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == code


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return synthetic.whole_run(tmp_path / "run", total=12)


def test_a_report_is_a_page_and_a_table(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(recorded)]) == 0
    table, page, _ = capsys.readouterr().out.rsplit("\n", 2)
    assert "completed, 12 of 12 steps" in table
    assert page == str(recorded / "report.html")
    assert (recorded / "report.html").exists()


def test_a_report_as_json_is_nothing_but_json_and_writes_no_page(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(recorded), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 12
    assert not (recorded / "report.html").exists()


@pytest.mark.parametrize(("options", "opens"), [(["--open"], True), (["--open", "--json"], True), (["--open"], False)])
def test_a_report_is_opened_in_the_browser(
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    opens: bool,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or opens)
    assert cli.main(["report", str(recorded), *options]) == 0
    assert opened == [(recorded / "report.html").as_uri()]
    assert (recorded / "report.html").exists()
    assert ("no browser could be opened" in capsys.readouterr().err) is not opens


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"trinity-sync {__version__}\n"


def test_every_error_of_hydra_is_explained_in_one_line() -> None:
    assert "\n" not in messages.explain(HydraException("one\ntwo\n\nthree"))


def launched(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "launch.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def imported(process: subprocess.CompletedProcess[str]) -> set[str]:
    return set(re.findall(r"^import time: .*\| +(\S+)$", process.stderr, re.MULTILINE))


def told(process: subprocess.CompletedProcess[str]) -> str:
    return "".join(line for line in process.stderr.splitlines(True) if not line.startswith("import time:"))


@pytest.mark.parametrize(
    ("argument", "code", "out", "err"),
    [
        ("--help", 0, "retention   keep_all, keep_last*", ""),
        ("--cfg=job", 0, "wire_dtype: bf16", ""),
        ("trainer.steps=-1", 2, "", "error: trainer.steps is -1; must be at least 0\n"),
        ("sync=pigeon", 2, "", "error: sync=pigeon is not an option; sync has checkpoint, memory, nccl\n"),
        ("--bogus", 2, "", "--bogus is not an option"),
    ],
)
@pytest.mark.few(2)
def test_the_program_answers_before_anything_heavy_is_loaded(
    tmp_path: Path, argument: str, code: int, out: str, err: str
) -> None:
    process = launched(argument, cwd=tmp_path)
    assert process.returncode == code
    assert out in process.stdout
    assert err in told(process)
    assert "Traceback" not in told(process)
    assert "hydra" in imported(process)
    assert not imported(process) & {"torch", "ray", "verl", "transformers", "numpy", "pyarrow"}


@pytest.mark.parametrize("arguments", [["run", "--help"], ["run", "--cfg=all"]])
@pytest.mark.few(1)
def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "trinity_sync.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")


def test_the_program_shows_the_traceback_on_demand(tmp_path: Path) -> None:
    assert "Traceback" in told(launched("sync=pigeon", cwd=tmp_path, HYDRA_FULL_ERROR="1"))
