"""What ends a run ends it with a clear word, resumable, and with nothing left behind."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import LIMIT_S, Run, Started, kill_at, launch, resume, start
from trinity_sync.checkpoint.folder import catalog

LONG = ("trainer.steps=400", "checkpoint.interval=5")
LONG_ENOUGH = ("trainer.steps=120", "checkpoint.interval=5")  # of which each tenth part is shown
ENDS = "trainer.max_restarts=0"
STATE_FILES = 6  # of two ranks: model, optimizer and the rest


def ray_folders(run_pid: int) -> list[Path]:
    """Where Ray has the session of this driver process, which bears its number."""
    wanted = Path(tempfile.gettempdir(), f"trinity-ray-{os.geteuid()}-*", f"session_*_{run_pid}")
    # not `Path.glob`, which fails where the folder of another run goes meanwhile
    return [Path(session).parent for session in glob.glob(str(wanted))]  # noqa: PTH207


def leftovers(run_pid: int) -> list[str]:
    """Shared memory, Ray folders and processes that a run of this driver process left."""
    found = [str(path) for path in Path("/dev/shm").glob(f"trinity-sync-{os.geteuid()}/{run_pid}-*")]
    found += [str(path) for path in ray_folders(run_pid)]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            command = (entry / "cmdline").read_text()[:80]
        except OSError:
            continue
        if f"TRINITY_SYNC_DRIVER={run_pid}\0" in environment and int(entry.name) != run_pid and state != "Z":
            found.append(f"process {entry.name}: {command}")
    return found


def assert_ended_clean(run: Run, pid: int) -> None:
    assert leftovers(pid) == []
    trackers = run.folder / "checkpoints/latest_checkpointed_iteration.txt"
    if trackers.exists():
        step = int(trackers.read_text())
        assert run.manifests[step]["kind"] == "full"
    assert list((run.folder / "checkpoints").glob(".staging/*")) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def interrupt(started: Started, signum: int = signal.SIGINT) -> Path:
    """Tell a run of `LONG_ENOUGH` to end while it trains, by a Ctrl-C or by telling its driver; where its Ray is."""
    started.wait_for_line("step 12/120", 2 * LIMIT_S)  # other runs may come first
    pid = started.process.pid
    (ray_folder,) = ray_folders(pid)
    assert any("/dev/shm/" in place for place in leftovers(pid))
    assert any("node-agent" in place or "NodeAgent" in place for place in leftovers(pid))
    # a terminal tells all in the foreground
    (os.killpg if signum == signal.SIGINT else os.kill)(pid, signum)
    return ray_folder


def assert_interrupted(run: Run, pid: int, ray_folder: Path) -> None:
    assert run.code == 130, run.output
    assert run.record["status"] == "interrupted"
    assert_ended_clean(run, pid)
    assert not ray_folder.exists()


@pytest.mark.all  # in `make test` a Ctrl-C ends the last run of `test_short_runs`
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly(folder: Path, signum: int) -> None:
    started = start(folder, *LONG_ENOUGH)
    ray_folder = interrupt(started, signum)
    assert_interrupted(started.finish(), started.process.pid, ray_folder)


def processes(run_pid: int) -> list[psutil.Process]:
    """All processes of a run: the driver and what has come of it."""
    driver = psutil.Process(run_pid)
    return [driver, *driver.children(recursive=True)]


@pytest.mark.all
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_run_means_what_it_means_to_the_driver(folder: Path, signum: int) -> None:
    started = start(folder, *LONG, "checkpoint.interval=0", "checkpoint.save_on_sigterm=true")
    started.wait_for_line("step 40/400")
    pid, began = started.process.pid, time.monotonic()
    for process in processes(pid):
        process.send_signal(signum)
    run = started.finish()
    assert time.monotonic() - began < 30
    assert run.code == 130, run.output
    assert run.record["status"] == "interrupted"
    assert_ended_clean(run, pid)
    assert len(run.manifests) == (signum != signal.SIGINT)


@pytest.mark.all
def test_no_process_of_a_run_outlives_its_driver_even_where_all_others_are_stopped(folder: Path) -> None:
    started = start(folder, *LONG)
    started.wait_for_line("step 40/400")
    pid = started.process.pid
    driver, *others = processes(pid)
    for process in others:
        process.suspend()
    driver.kill()
    started.process.wait()
    deadline = time.monotonic() + 30
    while left := [what for what in leftovers(pid) if what.startswith("process ")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.all
def test_an_interrupted_run_goes_on_after_its_last_checkpoint(folder: Path) -> None:
    started = start(folder, *LONG)
    kill_at(started, "step 40/400", lambda run: run.process.pid, signal.SIGINT)
    started.finish()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    again = resume(folder, f"trainer.steps={last + 3}")
    assert again.code == 0, again.output
    assert sorted(again.digests)[-1] == last + 3


@pytest.mark.all
def test_without_restarts_a_trainer_rank_that_dies_ends_the_run_with_its_name(folder: Path) -> None:
    started = start(folder, *LONG_ENOUGH, ENDS)
    kill_at(started, "step 12/120", lambda run: run.pid_of("trainer-rank-1"))
    run = started.finish(limit_s=60)
    assert run.code == 1
    assert "trainer rank 1 died before it could" in run.output
    assert "its process was ended by signal 9 (Killed)" in run.output
    assert run.record["status"] == "failed"
    assert "trainer rank 1 died" in run.record["error"]
    assert_ended_clean(run, started.process.pid)


def stop_in_a_save(folder: Path, agent: int) -> int:
    """Stop the node agent in a save that a rank has not handed over to it yet; the step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for staged in (folder / "checkpoints/.staging").glob("[0-9]*-0"):
            os.kill(agent, signal.SIGSTOP)
            while "State:\tT" not in Path(f"/proc/{agent}/status").read_text():
                pass
            if staged.exists() and len(list(staged.glob("actor/*_world_size_2_rank_?.pt"))) < STATE_FILES:
                return int(staged.name.partition("-")[0])
            os.kill(agent, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("no save was met half-way")


@pytest.mark.all
def test_a_node_agent_that_dies_in_a_save_ends_the_run_and_the_save_is_reported_failed(folder: Path) -> None:
    started = start(folder, *LONG, ENDS)
    started.wait_for_line("step 40/400")
    agent = started.pid_of("node-agent")
    step = stop_in_a_save(folder, agent)
    os.kill(agent, signal.SIGKILL)
    run = started.finish(limit_s=60)
    assert run.code == 1
    named = r"the agent of node [0-9a-f]{56} died before it could \w+ version \d+"
    assert re.search(named, run.output), run.output
    assert run.record["status"] == "failed"
    assert re.search(named, run.record["error"])
    (fault,) = run.events("fault")
    assert fault["where"] == f"save of step {step}"
    # whether it had taken the state over already, or was about to
    assert re.search(r"(node.agent|the agent of node) .*(died|was lost)", fault["error"])
    assert_ended_clean(run, started.process.pid)
    assert max(run.manifests) == step - 5
    assert catalog.verify(folder / f"checkpoints/global_step_{step - 5}").ok


@pytest.mark.all
def test_an_explorer_that_dies_ends_the_run_and_says_how_to_have_it_restarted(folder: Path) -> None:
    started = start(folder, *LONG, ENDS)
    kill_at(started, "step 40/400", lambda run: run.pid_of("explorer-0"))
    run = started.finish(limit_s=60)
    assert run.code == 1
    assert "explorer-0 died before it could" in run.output
    assert "explorer.max_restarts" in run.output
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
@pytest.mark.parametrize("mode", ["memory", "checkpoint"])
@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_restarted_explorer_changes_nothing_in_the_run(folder: Path, mode: str, encoding: str) -> None:
    sync = (f"sync={mode}", f"sync.encoding={encoding}", "trainer.lr=1e-5")
    settings = ("trainer.steps=40", "checkpoint.interval=0", "explorer.max_restarts=1", *sync)
    undisturbed = launch(folder.with_name("undisturbed"), *settings)
    started = start(folder, *settings)
    kill_at(started, "step 8/40", lambda run: run.pid_of("explorer-0"))
    run = started.finish()
    assert run.code == 0, run.output
    assert [event["where"] for event in run.events("fault")] == ["explorer-0"]
    assert run.digests == undisturbed.digests


@pytest.mark.all
def test_a_full_disk_fails_the_save_and_keeps_the_run_folder_readable(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        run = launch(folder, f"checkpoint.dir={disk}")
        assert run.code == 1
        assert "No space left on device" in run.output
        assert run.record["status"] == "failed"
        faults = [event["where"] for event in run.events("fault")]  # the monitor's notes may find no room either
        assert [where for where in faults if not where.startswith("journal of")] == ["save of step 2", "save of step 3"]
        assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3]
        assert not list(disk.glob("global_step_*"))
        assert not list(disk.glob(".staging/*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.all
def test_a_preempted_run_saves_the_step_it_is_in_and_goes_on_from_there(folder: Path) -> None:
    started = start(
        folder,
        *LONG,
        "checkpoint.interval=0",
        "checkpoint.save_on_sigterm=true",
        "sync.interval=3",
        "sync.max_staleness=2",
    )
    kill_at(started, "step 40/400", lambda run: run.process.pid, signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    assert run.record["status"] == "interrupted"
    assert_ended_clean(run, started.process.pid)
    (saved,) = run.manifests
    assert saved >= 40
    again = resume(folder, f"trainer.steps={saved + 2}")
    assert again.code == 0, again.output
    assert [line["step"] for line in again.lines("metrics.jsonl")] == list(range(1, saved + 3))


BROKEN_REWARD = """\
def broken(prompt, response):
    print(f"judging {prompt.text}")
    return share(len(response), int(response == prompt.answer))  # the start tries the answer


def share(part, whole):
    return part / whole
"""


@pytest.mark.all
def test_a_reward_that_raises_ends_the_run_and_its_traceback_is_in_the_logs(folder: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(BROKEN_REWARD)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": f"{i}"}) + "\n" for i in range(10)))
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        run = launch(
            folder,
            "task=jsonl",
            f"task.path={prompts}",
            "task.reward._target_=my_rewards.broken",
            "task.response_length=3",
        )
    finally:
        del os.environ["PYTHONPATH"]
    assert run.code == 1
    told = (
        "the reward function my_rewards.broken, called for prompt 0 of step 1, failed: "
        f"ZeroDivisionError: division by zero ({rewards}:7)"
    )
    assert f"error: {told} (traceback in {folder / 'logs/driver.log'})\n" in run.output
    assert run.record["error"] == told
    assert run.record["attempt"] == 0
    logs = {name: (folder / "logs" / f"{name}.log").read_text() for name in ("driver", "explorer-0")}
    for log in logs.values():
        _, _, trace = log.partition(f"{told}\nTraceback (most recent call last):\n")
        assert trace.startswith(f'  File "{rewards}", line 3, in broken\n'), log
        assert trace.partition("\nZeroDivisionError: division by zero\n")[0].count("File") == 2
    assert re.search(r"\njudging \d=\n", logs["explorer-0"])
    assert re.search(
        r"INFO trinity_sync: explorer-0 loaded version 0: .* kB in .* digest [0-9a-f]{32}\n", logs["driver"]
    )
    assert re.search(rf"run failed after 0 steps and .*: {re.escape(told)}\n$", logs["driver"])


@pytest.mark.all
def test_a_run_folder_in_use_is_refused(folder: Path) -> None:
    started = start(folder, *LONG)
    started.wait_for_line("step 1/400")
    second = resume(folder)
    os.kill(started.process.pid, signal.SIGTERM)
    first = started.finish()
    assert second.code == 2
    assert f"pid {started.process.pid}" in second.output or str(started.process.pid) in second.output
    assert first.code == 130


@pytest.mark.all  # with a validation: test_data.py
def test_supervised_training_learns_from_pairs_without_explorers(folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i:02d}=", "response": f"{i:02d}"}) + "\n" for i in range(64)))
    run = launch(
        folder,
        "algorithm=sft",
        "task=pairs",
        f"task.path={pairs}",
        "algorithm.batch_size=32",
        "trainer.steps=30",
        "backend.ranks=1",
        small=False,
    )
    assert run.code == 0, run.output
    losses = [line["loss"] for line in run.lines("metrics.jsonl")]
    assert losses[-1] < losses[0] / 2
    assert not run.events("load")
    assert not (folder / "logs" / "explorer-0.log").exists()
