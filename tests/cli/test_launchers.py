"""Sweeps whose jobs run in other processes, and searches: `parallel` and `slurm`, `search` and `learning_rate`.
The launchers and the sweeper are real, Slurm and the runs are stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from tests.cli import in_other_processes
from tests.cli.stand_in import StandIn, standing_in
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.launch import app, sweeps

LIMIT_S = 120
SWEEP = Path("sweep")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(StandIn(), tmp_path, monkeypatch) as stand_in:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
        yield stand_in
    if "joblib" in sys.modules:  # its processes stay in the folder of the test
        from joblib.externals import loky

        loky.get_reusable_executor().shutdown(kill_workers=True)


def sweep(*overrides: str) -> int:
    """A sweep whose jobs may run in other processes."""
    entry = hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")
    return app.run_main(entry(in_other_processes.job), ["-m", f"hydra.sweep.dir={SWEEP}", *overrides])


def record(job: int) -> dict[str, Any]:
    return json.loads((SWEEP / str(job) / "run.json").read_text())


@pytest.mark.parametrize(
    ("choice", "plugin", "needed"),
    [
        ("hydra/launcher=parallel", "joblib", "joblib"),
        pytest.param("hydra/launcher=joblib", "joblib", "joblib", marks=pytest.mark.all),
        pytest.param("hydra/launcher=slurm", "submitit_slurm", "submitit", marks=pytest.mark.all),
        pytest.param("hydra/sweeper=search", "optuna", "Optuna", marks=pytest.mark.all),
        ("experiment=learning_rate", "optuna", "Optuna"),
    ],
)
def test_what_is_not_installed_is_told_with_the_extra_that_brings_it(
    launcher: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: str,
    plugin: str,
    needed: str,
) -> None:
    Plugins.instance()
    for group in ("launcher", "sweeper"):
        monkeypatch.delitem(ConfigStore.instance().repo["hydra"][group], f"{plugin}.yaml", raising=False)
    assert cli.main(["run", "-m", choice]) == 2
    told = rf"error: \S+\.yaml: {needed} is not installed; install it by: pip install 'trinity-sync\[launchers\]'\n"
    assert re.fullmatch(told, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_jobs_side_by_side_are_told_apart_and_a_failing_one_fails_the_sweep(
    launcher: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert sweep("hydra/launcher=parallel", "name=fails", "seed=1,2,3") == 1
    assert [record(job)["status"] for job in range(3)] == ["completed", "failed", "completed"]
    assert os.getpid() not in [record(job)["pid"] for job in range(3)]
    assert "  lr: 0.0005\n" in (SWEEP / "0" / ".hydra" / "config.yaml").read_text()  # no reference to other settings
    found = capfd.readouterr()
    assert "job 0  done\n" in found.out
    assert "job 2  done\n" in found.out
    assert "error: job 1: rank 0 died\n" in found.err
    assert "error: 1 of 3 jobs did not end well: 1 in sweep\n" in found.err
    assert (SWEEP / "report.html").exists()
    assert cli.main(["resume", str(SWEEP)]) == 0
    assert [(call.run_dir.name, bool(call.resume)) for call in launcher.calls] == [("1", True)]


def test_a_sweep_side_by_side_is_checked_before_its_first_job(
    launcher: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert sweep("hydra/launcher=parallel", "trainer.steps=5,0") == 2
    assert "error: job 1 of the sweep (trainer.steps=0) cannot run, so nothing was started" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_jobs_side_by_side_do_not_share_gpus_unawares(
    launcher: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.setattr(sweeps, "accelerator_count", lambda: 8)
    assert sweep("hydra/launcher=parallel", "seed=1,2") == 2
    assert "would all take the same GPUs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all
def test_jobs_side_by_side_may_share_the_gpus_of_one_ray(launcher: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.setattr(sweeps, "accelerator_count", lambda: 8)
    assert sweep("hydra/launcher=parallel", "cluster=existing", "cluster.address=here:1", "seed=1,2") == 0


@pytest.mark.all
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.all)])
def test_an_interrupt_ends_jobs_side_by_side_in_good_order(launcher: StandIn, signum: int) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arguments = ["-m", f"hydra.sweep.dir={SWEEP}", "hydra/launcher=parallel", "name=waits", "seed=1,2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.in_other_processes", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        waiting: set[str] = set()
        while len(waiting) < 2 and (line := process.stdout.readline()):
            waiting |= {line} if "waiting" in line else set()
        os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
        _, told = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert told.startswith("note: ending the jobs\nerror: interrupted\n")
    assert [record(job)["status"] for job in range(2)] == ["interrupted", "interrupted"]


@pytest.mark.all
def test_a_job_that_a_queue_starts_again_goes_on(launcher: StandIn) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert sweep("hydra/launcher=submitit_local", "name=preempted") == 0
    assert (record(0)["status"], record(0)["attempt"]) == ("completed", 1)
    assert record(0)["command"] == "trinity-sync run name=preempted"


SBATCH = """#!{python}
import os, re, subprocess, sys
script = sys.argv[-1]
if sys.argv[1] != "run":
    open("sbatch.txt", "w").write(open(script).read())
    print("Submitted batch job 7", flush=True)
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([*sys.argv[:1], "run", script], **quiet)
else:
    for job in "01":
        subprocess.run(["bash", script], env=dict(os.environ, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=job))
"""
SRUN = """#!{python}
import subprocess, sys
command = sys.argv[sys.argv.index("-u") - 1 :]
while subprocess.run(command).returncode == 255:
    pass
"""
SCONTROL = """#!{python}
import sys
open("scontrol.txt", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""
SACCT = """#!{python}
print("JobID|State|NodeList")
for job in ("7", "7_0", "7_1"):
    print(f"{{job}}|RUNNING|here")
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in place of Slurm's, which run jobs here and at once, and again when they were queued again."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "sacct": SACCT}.items():
        (place / name).write_text(text.format(python=sys.executable))
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.all
def test_a_sweep_on_slurm_asks_for_what_it_needs_and_goes_on_when_it_is_preempted(
    launcher: StandIn, queue: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    asks = ["hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=3"]
    assert sweep("hydra/launcher=slurm", *asks, "name=preempted", "seed=1,2") == 0
    asked = dict(re.findall(r"#SBATCH --(\S+?)=(\S+)", (queue / "sbatch.txt").read_text()))
    expected = {
        "partition": "gpu",
        "gpus-per-node": "3",
        "signal": "USR2@300",
        "time": "240",
        "job-name": "preempted",
        "array": "0-1%2",
    }
    assert expected.items() <= asked.items()
    assert (queue / "scontrol.txt").read_text() == "requeue 7_0\nrequeue 7_1\n"
    assert [(record(job)["status"], record(job)["attempt"]) for job in range(2)] == [("completed", 1)] * 2


@pytest.mark.all
def test_a_machine_without_slurm_is_told(launcher: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert sweep("hydra/launcher=slurm", "seed=1,2") == 2
    assert "srun" in capsys.readouterr().err


@pytest.mark.all
def test_a_search_takes_the_highest_reward_and_bears_jobs_that_fail(
    launcher: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    rates = "trainer.lr=tag(log, interval(0.0001, 0.01))"
    assert sweep("hydra/sweeper=search", "hydra.sweeper.n_trials=8", "name=fails", rates, "seed=choice(1,2)") == 1
    statuses = [record(job)["status"] for job in range(8)]
    assert {"completed", "failed"} == set(statuses)
    found = OmegaConf.load(SWEEP / "optimization_results.yaml")
    rewards = [
        json.loads((SWEEP / str(job) / "summary.json").read_text())["reward_last"]
        for job, status in enumerate(statuses)
        if status == "completed"
    ]
    assert found.best_value == max(rewards)
    assert found.best_params["trainer.lr"] == max(rewards)
    assert (SWEEP / "report.html").exists()
    capsys.readouterr()
    assert cli.main(["resume", str(SWEEP)]) == 2
    assert "chooses values while it runs; name one of its jobs" in capsys.readouterr().err


def test_a_search_in_a_folder_with_runs_is_refused(launcher: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (SWEEP / "3").mkdir(parents=True)
    (SWEEP / "3" / "run.json").write_text("{}")
    assert sweep("hydra/sweeper=search", "hydra.sweeper.n_trials=1", "seed=choice(1,2)") == 2
    assert "sweep/3 already holds a run, so nothing was started: a search needs" in capsys.readouterr().err
    assert [path.name for path in SWEEP.iterdir()] == ["3"]


@pytest.mark.all
def test_a_search_of_which_all_jobs_fail_says_so(launcher: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert sweep("hydra/sweeper=search", "hydra.sweeper.n_trials=2", "name=fails", "seed=choice(2)") == 1
    told = capsys.readouterr().err
    assert told.count("rank 0 died") == 2
    assert "error: 2 of 2 jobs did not end well: 0, 1 in sweep\n" in told


@pytest.mark.all
def test_a_search_side_by_side(launcher: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    together = ["hydra/launcher=parallel", "hydra/sweeper=search", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=4"]
    assert sweep(*together, "name=fails", "seed=choice(1,2)", "trainer.lr=interval(0.001, 0.01)") == 1
    assert {"completed", "failed"} == {record(job)["status"] for job in range(4)}
    assert "best_value" in OmegaConf.load(SWEEP / "optimization_results.yaml")
