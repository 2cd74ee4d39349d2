"""`trinity-sync reproduce` as a user calls it. The run itself is a stand-in that computes from its settings."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.cli.stand_in import Computing, standing_in
from tests.model_folders import bare_model
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config.comparison import EARLIER_LOCATIONS, RunConfig
from trinity_sync.errors import RunError


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with standing_in(Computing(), tmp_path, monkeypatch) as launcher:
        yield launcher


def first(*overrides: str, folder: str = "run") -> Path:
    cli.main(["run", f"hydra.run.dir={folder}", "trainer.steps=5", *overrides])
    return Path(folder).absolute()


def reproduce(*arguments: object) -> int:
    return cli.main(["reproduce", *map(str, arguments)])


def result(launcher: Computing) -> Any:
    return json.loads((launcher.calls[-1].run_dir / "reproduction.json").read_text())


def rewrite(path: Path, change: Any) -> None:
    """Change what a YAML or JSON file of a run holds."""
    values = OmegaConf.to_container(OmegaConf.load(path))
    change(values)
    path.write_text(json.dumps(values))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# the same, or not


def test_a_run_that_comes_out_the_same_is_equal(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first("seed=3", "sync=nccl")
    before = contents(run)
    assert reproduce(run) == 0
    assert capsys.readouterr().out == "equal: 6 versions and 10 values of metrics, bit for bit\n"
    again = launcher.calls[-1]
    assert again.run_dir != run
    assert config.config_diff(launcher.calls[0].cfg, again.cfg) == []
    assert contents(run) == before
    assert (result(launcher)["of"], result(launcher)["equal"]) == (str(run), True)


def test_the_first_version_that_differs_is_told(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    launcher.spoilt = 4
    assert reproduce(run) == 1
    out = capsys.readouterr().out
    assert out.startswith("differs: version 4 is ")
    assert "differences: none that is recorded" in out
    assert result(launcher)["first_version"]["step"] == 4
    assert not result(launcher)["equal"]


@pytest.mark.all
def test_a_job_of_an_experiment_that_is_a_sweep_is_repeated_as_one_run(launcher: Computing) -> None:
    assert cli.main(["run", "experiment=backends", "trainer.steps=5", "hydra.sweep.dir=sweep"]) == 0
    assert reproduce("sweep/2") == 0
    *_, job, again = launcher.calls
    assert len(launcher.calls) == 4
    assert again.cfg == job.cfg
    assert again.run_dir.parent == Path("outputs/backends").absolute()


def test_what_is_changed_is_told_and_so_are_metrics(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(first(), "seed=1") == 1
    found = capsys.readouterr()
    assert "changed: seed: 0 -> 1" in found.err
    assert "metrics differ first at step 1: loss 1.0 -> 2.0, reward/mean 0.1 -> 0.11" in found.out
    assert "differences: seed: 0 -> 1" in found.out


def test_another_environment_is_warned_of_and_named(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    rewrite(run / "run.json", lambda record: record["packages"].update({"trinity-sync": "99.0", "torch": "0.1"}))
    launcher.spoilt = 1
    assert reproduce(run) == 1
    found = capsys.readouterr()
    assert "warning: torch: 0.1 -> " in found.err
    assert "trinity-sync: 99.0 -> " in found.out.splitlines()[-1]


def test_what_came_of_it_is_told_though_the_disk_is_full(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()

    def full(path: Path, value: object) -> None:
        raise RunError(f"{path} cannot be written: no space")

    monkeypatch.setattr("trinity_sync.tracking.json_lines.write_json", full)
    assert reproduce(run) == 1
    assert capsys.readouterr().out.startswith("equal: 6 versions")


def test_a_repetition_that_fails_is_no_comparison(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()

    def fail(cfg: Any) -> int:
        raise RunError("rank 0 died")

    launcher.behave = fail
    assert reproduce(run) == 1
    found = capsys.readouterr()
    assert ("rank 0 died" in found.err, found.out) == (True, "")


# what is repeated


def test_the_first_steps_only(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    launcher.spoilt = 4
    assert reproduce(run, "--steps", 3) == 0
    assert launcher.calls[-1].until == 3
    assert launcher.calls[-1].cfg.trainer.steps == 5, "the learning rate may depend on it"
    assert "4 versions" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, 6, -1])
@pytest.mark.few(1)
def test_steps_that_the_run_does_not_have_are_refused(
    launcher: Computing, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(first(), f"--steps={steps}") == 2
    assert f"--steps is {steps}; " in capsys.readouterr().err
    assert len(launcher.calls) == 1


def test_steps_of_which_nothing_is_known_are_refused(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    for name in ("events.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    assert reproduce(run, "--steps=3") == 2
    assert "has nothing to compare up to there" in capsys.readouterr().err
    assert len(launcher.calls) == 1


@pytest.mark.parametrize(
    "given",
    [
        *("hydra.run.dir=", "hydra.run.dir=null", "hydra.run.dir=a,b", "++hydra.run.dir='x/${name}'"),
        *("hydra.run.dir=[x", "hydra.mode=MULTIRUN", "seed=1,2"),
    ],
)
@pytest.mark.few(3)
def test_what_is_no_single_run_in_a_folder_is_refused(
    launcher: Computing, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(first(), given) == 2
    assert given.lstrip("+")[:8] in capsys.readouterr().err
    assert len(launcher.calls) == 1


def test_the_folder_of_a_repetition_may_be_below_ones_home(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert reproduce(first(), "hydra.run.dir=~/x") == 0
    assert (tmp_path / "home" / "x" / "run.json").exists()


def test_a_run_that_was_cut_off_is_repeated_as_far_as_it_came(launcher: Computing) -> None:
    launcher.cut, launcher.ends = 3, "interrupted"
    run = first()
    launcher.cut, launcher.ends = None, "completed"
    assert reproduce(run) == 0
    assert launcher.calls[-1].until == 3


def test_where_the_run_lived_is_left_out(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first("checkpoint.dir=elsewhere", "cluster.start_timeout_s=77", "live=off", "seed=2")
    assert reproduce(run, "hydra.run.dir=again") == 0
    again = launcher.calls[-1]
    assert again.run_dir == Path("again").absolute()
    assert (again.cfg.checkpoint.dir, again.cfg.seed) == (None, 2)
    assert "left out: checkpoint.dir=elsewhere" in capsys.readouterr().err


def test_defaults_of_before_are_put_back(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()

    def of_before(values: Any) -> None:
        values["trainer"] |= {"lr": 0.125, "betas": [0.5, 0.75]}
        values["name"] = "of-before"

    rewrite(run / ".hydra" / "config.yaml", of_before)
    digest = config.config_digest(OmegaConf.load(run / ".hydra" / "config.yaml"))  # type: ignore[arg-type]
    rewrite(run / "run.json", lambda record: record.update(config_digest=digest))
    reproduce(run, "hydra.run.dir=again")
    found = launcher.calls[-1].cfg
    assert (found.trainer.lr, list(found.trainer.betas), found.name) == (0.125, [0.5, 0.75], "of-before")
    assert "changed:" not in capsys.readouterr().err


def test_a_setting_that_is_none_any_more_is_refused_by_name(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()
    rewrite(run / ".hydra" / "config.yaml", lambda values: values["trainer"].update(warp=9))
    assert reproduce(run) == 2
    assert "trainer.warp is 9" in capsys.readouterr().err
    rewrite(run / ".hydra" / "overrides.yaml", lambda texts: texts.append("trainer.warp=9"))
    assert reproduce(run) == 2
    assert "trainer.warp" in capsys.readouterr().err
    assert len(launcher.calls) == 1


def test_settings_that_are_not_those_of_the_record_are_refused(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()
    rewrite(run / ".hydra" / "config.yaml", lambda values: values.update(seed=8))
    assert reproduce(run) == 2
    assert "are not those of its record" in capsys.readouterr().err


def test_a_resumed_run_is_repeated_as_one(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    assert cli.main(["resume", str(run), "trainer.steps=7"]) == 0
    capsys.readouterr()
    assert reproduce(run) == 0
    assert "equal: 8 versions" in (found := capsys.readouterr()).out
    assert "resumed with other settings" in found.err


def test_settings_of_somebody_else_run_nothing_of_theirs(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()
    rewrite(run / ".hydra" / "overrides.yaml", lambda texts: texts.append("task._target_=shutil.rmtree"))
    assert reproduce(run) == 2
    assert "task._target_ is shutil.rmtree" in capsys.readouterr().err
    rewrite(run / ".hydra" / "overrides.yaml", lambda texts: texts.clear())
    rewrite(run / ".hydra" / "config.yaml", lambda values: values["task"].update(_target_="shutil.rmtree"))
    assert reproduce(run) == 2
    assert "task._target_ is shutil.rmtree" in capsys.readouterr().err
    assert len(launcher.calls) == 1


@pytest.mark.all
def test_places_that_options_of_the_users_own_name_are_left_out(
    launcher: Computing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "conf" / "experiment" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "# @package _global_\ndefaults: [{override /tracker: [tensorboard]}, {override /cluster: existing}]\n"
        f"cluster: {{address: auto}}\ncheckpoint: {{dir: elsewhere}}\nsync: {{shm_dir: {tmp_path}}}\n"
    )
    (options := tmp_path / "conf").rename(tmp_path / "then")
    run = first("experiment=own", f"--config-dir={tmp_path / 'then'}")
    (tmp_path / "then").rename(options)
    assert reproduce(run, f"--config-dir={options}") == 0
    found = launcher.calls[-1].cfg
    ours = config.compose()
    assert (found.tracker, found.cluster, found.checkpoint.dir) == ({}, ours.cluster, None)
    assert found.sync.shm_dir == ours.sync.shm_dir
    left_out = capsys.readouterr().err
    assert all(text in left_out for text in ("tracker=tensorboard", "cluster.address=auto", "checkpoint.dir=elsewhere"))
    assert reproduce(run, f"--config-dir={options}", "tracker=tensorboard", "hydra.run.dir=again") == 0
    assert [*launcher.calls[-1].cfg.tracker] == ["tensorboard"]


def test_a_name_that_is_no_name_makes_no_folder(launcher: Computing) -> None:
    run = first()
    rewrite(run / ".hydra" / "overrides.yaml", lambda texts: texts.append("name=../evil"))
    rewrite(run / ".hydra" / "config.yaml", lambda values: values.update(name="../evil"))
    digest = config.config_digest(OmegaConf.load(run / ".hydra" / "config.yaml"))  # type: ignore[arg-type]
    rewrite(run / "run.json", lambda record: record.update(config_digest=digest))
    assert reproduce(run) == 2
    assert not Path("evil").exists(), "which is outputs/../evil"
    assert reproduce(run, "--bundle") == 0
    assert Path("evil-run.bundle.json").is_file()


def test_the_checkpoint_it_began_with_is_found_from_another_folder(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("checkpoint.resume_from=ck/global_step_2")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert reproduce(run) == 0
    assert launcher.calls[-1].cfg.checkpoint.resume_from == str(tmp_path / "ck" / "global_step_2")
    assert "changed:" not in capsys.readouterr().err


def test_a_model_that_lies_elsewhere_under_another_name_is_given_again(launcher: Computing, tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    bare_model(model)
    run = first("model=path", f"model.path={model}")
    moved = model.rename(tmp_path / "snapshot")
    assert reproduce(run, f"model.path={moved}") == 0
    assert launcher.calls[-1].cfg.model.path == str(moved)
    assert (launcher.calls[-1].cfg.name, launcher.calls[-1].cfg.trainer.lr) == ("copy-digits-tiny", 1e-6)


def test_a_model_that_can_no_longer_be_reached_is_given_again(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stat = tmp_path / "model", os.stat
    bare_model(model)
    run = first("model=path", f"model.path={model}")
    copied = shutil.copytree(model, tmp_path / "copied")

    def refuse(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path) == str(model):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    assert reproduce(run, f"model.path={copied}") == 0


def test_threads_are_those_of_the_run_where_none_are_asked_for(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = first()
    rewrite(run / "run.json", lambda record: record.update(threads=4))
    monkeypatch.setenv("OMP_NUM_THREADS", " ")
    assert reproduce(run) == 0
    assert os.environ["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, 100_000, "4", {"trainer": 100_000}])
@pytest.mark.few(2)
def test_threads_that_no_process_has_are_refused(
    launcher: Computing, capsys: pytest.CaptureFixture[str], threads: object
) -> None:
    run = first()
    rewrite(run / "run.json", lambda record: record.update(threads=threads))
    assert reproduce(run) == 2
    assert "is not the record of a run: threads is " in capsys.readouterr().err


def test_more_threads_than_this_machine_can_use_are_not_started(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = first()
    rewrite(run / "run.json", lambda record: record.update(threads=1000))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert reproduce(run) == 0
    assert os.environ["OMP_NUM_THREADS"] == "64"


def test_settings_that_were_changed_at_a_resume_are_a_reason(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()
    assert cli.main(["resume", str(run), "trainer.steps=7"]) == 0
    launcher.spoilt = 6
    assert reproduce(run) == 1
    assert "differences: settings: several, as the run was resumed with other settings" in capsys.readouterr().out


# where it is found


def test_a_job_of_a_sweep_and_an_experiment_by_its_name(launcher: Computing) -> None:
    cli.main(["run", "-m", "hydra.sweep.dir=multirun/x/y", "trainer.steps=2,3", "experiment=quick"])
    assert reproduce("multirun/x/y/1", "hydra.run.dir=again") == 0
    assert launcher.calls[-1].cfg.trainer.steps == 3
    for _ in range(2):
        assert reproduce("quick", f"hydra.run.dir=outputs/quick/{len(launcher.calls)}") == 0
        assert result(launcher)["of"].endswith("multirun/x/y/1"), "not what was repeated of it"


def test_a_repetition_that_was_cut_off_is_not_what_to_repeat(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first("experiment=quick", folder="outputs/quick/a")
    monkeypatch.setattr(sys, "argv", ["trinity-sync", "reproduce", "quick"])
    launcher.behave = lambda cfg: 130
    assert reproduce("quick", "hydra.run.dir=outputs/quick/b") == 130
    launcher.behave = lambda cfg: 0
    assert reproduce("quick", "hydra.run.dir=again") == 0
    assert result(launcher)["of"].endswith("outputs/quick/a")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "not the folder of a run, a bundle or an experiment"),
        ("quick", "there is no run of experiment=quick"),
        ("empty", "empty is not the folder of a run"),
        ("sweep", "sweep is a sweep; name one of its jobs"),
        ("file", "file cannot be read as a bundle"),
    ],
)
def test_what_is_no_run_is_refused(
    launcher: Computing, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("sweep").mkdir()
    Path("sweep/multirun.yaml").touch()
    Path("file").touch()
    assert reproduce(name) == 2
    assert told in capsys.readouterr().err


def test_a_run_that_is_not_over_is_refused(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reproduce(run) == 2
    assert "the run is not over" in capsys.readouterr().err


def test_a_run_with_nothing_to_compare_is_refused(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    for name in ("events.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    rewrite(run / "run.json", lambda record: record.update(last_version=None, status="failed"))
    assert reproduce(run) == 2
    assert "has nothing to compare: it ended before its first version (status failed)" in capsys.readouterr().err


def test_the_record_and_the_settings_alone_are_enough(
    launcher: Computing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first()
    sent = tmp_path / "sent"
    sent.mkdir()
    shutil.copytree(run / ".hydra", sent / ".hydra")
    shutil.copy(run / "run.json", sent)
    shutil.rmtree(run)
    assert reproduce(sent) == 0
    assert capsys.readouterr().out == "equal: 1 version and 0 values of metrics, bit for bit\n"
    launcher.spoilt = 5
    assert reproduce(sent, "hydra.run.dir=again") == 1


def test_a_repetition_without_versions_is_called_equal_by_its_metrics_only(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(first(), "sync.verify=off") == 0
    told = "equal: 0 versions and 10 values of metrics, bit for bit; no version was compared\n"
    assert capsys.readouterr().out == told


# bundles


def test_a_bundle_reproduces_elsewhere(launcher: Computing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = first("seed=3", "checkpoint.dir=secret", "checkpoint={interval: 3, mirror_options: {key: secret}}")
    assert reproduce(run, "--bundle") == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == Path("copy-digits-run.bundle.json")
    assert "secret" not in path.read_text()
    shutil.rmtree(run)
    assert reproduce(path) == 0
    assert (launcher.calls[-1].cfg.seed, launcher.calls[-1].cfg.checkpoint.interval) == (3, 3)
    assert capsys.readouterr().out.startswith("equal: 6 versions")


def test_a_bundle_that_was_changed_is_refused(launcher: Computing, capsys: pytest.CaptureFixture[str]) -> None:
    run = first()
    assert reproduce(run, "--bundle", "--output", "b.json") == 0
    Path("b.json").write_text(Path("b.json").read_text().replace('"seed": 0', '"seed": 1'))
    assert reproduce("b.json") == 2
    assert "was changed after it was written" in capsys.readouterr().err
    assert reproduce(run, "--bundle", "--output", "no/such/folder/b.json") == 1
    assert reproduce(run, "--bundle", "seed=4") == 2


# runs that are not the same bit for bit


def test_a_free_run_is_refused_with_what_can_be_compared(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("trainer.schedule=free")
    assert reproduce(run) == 2
    assert "--metrics-only" in capsys.readouterr().err
    assert len(launcher.calls) == 1


def test_the_end_of_a_run_is_compared_with_that_of_other_seeds(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first("trainer.schedule=free", "seed=7")
    assert reproduce(run, "--metrics-only") == 0
    assert [call.cfg.seed for call in launcher.calls[1:]] == [7, 8, 9]
    assert "alike: reward/mean at the end was 0.37; of 3 runs with seeds 7 to 9 it is 0.37, " in capsys.readouterr().out
    assert reproduce(run, "--metrics-only", "seed=99", "hydra.run.dir=far", "--repeats=2") == 1
    assert capsys.readouterr().out.startswith("differs: reward/mean at the end was 0.37")


@pytest.mark.parametrize("repeats", [1, 12])
def test_too_few_or_too_many_repeats_are_refused(
    launcher: Computing, repeats: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(first(), "--metrics-only", f"--repeats={repeats}") == 2
    assert f"--repeats is {repeats}; give 2 to 11 runs" in capsys.readouterr().err


def test_a_bundle_has_references_and_no_secrets(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENDPOINT", "endpoint-of-mine")
    monkeypatch.setattr(RunConfig, "check_values", lambda cfg: None)  # verl's engine has no such fields
    secrets = ("backend.overrides.api_key=typed-secret", "backend.overrides.deep={token: t0ken-of-mine, size: 3}")
    run = first("backend.overrides.endpoint=${oc.env:ENDPOINT}", *secrets)
    assert reproduce(run, "--bundle", "--output", "b.json") == 0
    text = Path("b.json").read_text()
    for secret in ("endpoint-of-mine", "typed-secret", "t0ken-of-mine"):
        assert secret not in text
    assert "${oc.env:ENDPOINT}" in text
    told = capsys.readouterr().err
    assert "left out: backend.overrides.api_key=***: give it again" in told
    assert "typed-secret" not in told
    shutil.rmtree(run)
    monkeypatch.setenv("ENDPOINT", "endpoint-elsewhere")
    again = "backend.overrides.endpoint='${oc.env:ENDPOINT}'"
    assert reproduce("b.json", "backend.overrides.api_key=another", again, "backend.overrides.deep.size=3") == 0
    overrides = launcher.calls[-1].cfg.backend.overrides
    assert (overrides.endpoint, overrides.api_key, overrides.deep) == ("endpoint-elsewhere", "another", {"size": 3})
    assert "another" not in capsys.readouterr().err


def test_a_server_s_address_is_no_setting_of_what_was_computed(
    launcher: Computing, capsys: pytest.CaptureFixture[str]
) -> None:
    addressed = ("explorer=vllm_server", "explorer.url=http://me:word-of-mine@host:8000", "model=path", "model.path=m")
    here, there = (config.compose([*addressed, f"explorer.url={url}"]) for url in ("http://a", "http://b"))
    assert config.config_digest(here) == config.config_digest(there)
    assert not {"url", "key_env"} & RunConfig(here).bundled().composed.explorer.keys()
    earlier = config.config_digest(here, places=EARLIER_LOCATIONS)
    assert earlier != config.config_digest(there, places=EARLIER_LOCATIONS)


@pytest.mark.parametrize("more", [[], ["--bundle", "--output=a.json"]])
@pytest.mark.few(1)
def test_a_place_that_only_the_run_could_name_is_not_asked_for(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FAR", str(tmp_path / "far"))
    mirrors = [f"checkpoint.mirror={tmp_path}/${{hydra:job.num}}", "checkpoint.dir='${oc.env:FAR}/${hydra:job.num}'"]
    assert cli.main(["run", "-m", "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5", *mirrors]) == 0
    monkeypatch.delenv("FAR")
    assert cli.main(["reproduce", "sweep/0", *more]) == 0


def test_what_is_changed_is_told_without_secrets(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunConfig, "check_values", lambda cfg: None)
    run = first("backend.overrides.api_key=typed-secret")
    assert reproduce(run, "backend.overrides.api_key=another-one") == 0
    told = capsys.readouterr()
    assert "backend.overrides.api_key" in told.err
    for secret in ("typed-secret", "another-one"):
        assert secret not in told.err + told.out
        assert secret not in json.dumps(result(launcher))
