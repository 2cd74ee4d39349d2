"""A run that loses a process goes on by itself, and ends as one that was never disturbed. Mostly with `workload=bytes`,
whose steps cost next to nothing; the weights of each step depend on the step, as those of a real engine do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.runs import LIMIT_S, Run, Started, launch, resume, start
from tests.e2e.test_faults import assert_ended_clean, leftovers
from tests.e2e.test_free import FREE, assert_sound
from tests.models.test_shapes import SMALL
from trinity_sync.checkpoint.memory_states import states_path
from trinity_sync.weights.slots import DEFAULT_ROOT

STEPS, STRUCK_AT = 24, 10
LENGTH = (f"trainer.steps={STEPS}", "checkpoint.interval=4")


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """The settings of a run without an engine."""
    shapes = tmp_path_factory.mktemp("shapes") / "config.json"
    shapes.write_text(json.dumps(SMALL))
    of_model = ("workload=bytes", f"model.shapes={shapes}", "model.layers=2")
    return (*of_model, "backend.ranks=2", "sync.encoding=delta", *LENGTH)


@pytest.fixture(scope="module")
def undisturbed(of_bytes: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(tmp_path_factory.mktemp("reference") / "run", *of_bytes, small=False)
    assert run.code == 0, run.output
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def strike(started: Started, victim: str, signum: int = signal.SIGKILL, *, at: int = STRUCK_AT) -> int:
    """Send a signal to a process of a run that has published the version of a step; its pid."""
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == at)
    pid = started.pid_of(victim)
    os.kill(pid, signum)
    return pid


def assert_the_same(run: Run, undisturbed: Run, pid: int, heals: int = 1) -> None:
    """It has completed with the digests and steps of the undisturbed run, and tells each healing."""
    assert run.code == 0, run.output
    assert run.record["status"] == "completed"
    assert run.digests == undisturbed.digests
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    assert len(run.events("heal")) == heals
    assert_ended_clean(run, pid)


def assert_healed(run: Run, undisturbed: Run, pid: int, named: str) -> None:
    assert_the_same(run, undisturbed, pid)
    assert "the run goes on from its newest checkpoint (restart 1 of 3 within 3600 s" in " ".join(run.output.split())
    (heal,) = run.events("heal")
    assert named in heal["died"]
    assert heal["resumed_from"] >= STRUCK_AT - 6  # a save may have been under way
    assert heal["total_s"] > 0
    first, second = run.record["attempts"]
    assert (first["status"], second["resumed_from"]) == ("failed", heal["resumed_from"])
    assert named in first["error"]


@pytest.mark.all
@pytest.mark.parametrize(
    ("victim", "named"),
    [
        ("trainer-rank-1", "trainer rank 1 died"),
        ("node-agent", "the agent of node"),
        ("synchronizer", "the synchronizer died"),
        ("explorer-0", "explorer-0 died"),
    ],
)
def test_a_run_that_loses_a_process_goes_on_bit_for_bit(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run, victim: str, named: str
) -> None:
    started = start(folder, *of_bytes, small=False)
    strike(started, victim)
    assert_healed(run := started.finish(), undisturbed, started.process.pid, named)
    first, second = explorers(run)
    assert [one.how for one in (first, second)] == ["is up", "is up" if victim == "explorer-0" else "lives on"]
    assert (first.pid == second.pid) is (victim != "explorer-0")


IN_MEMORY = (f"checkpoint.interval={STEPS}", "checkpoint.memory_interval=2")


def states_in_memory(run: Path) -> list[Path]:
    """The folders of its attempts."""
    return [*states_path(run, Path(DEFAULT_ROOT)).parent.glob("*/")]


def wait_for_state(started: Started, step: int) -> None:
    """Until a state of the step or a later one is in memory."""
    ends = time.monotonic() + LIMIT_S
    while not any(
        step_of(path) >= step for folder in states_in_memory(started.folder) for path in folder.glob("global_step_*")
    ):
        assert started.process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("global_step_"))


def assert_goes_on_from_memory(run: Run) -> None:
    (heal,) = run.events("heal")
    assert heal["resumed_from"] >= STRUCK_AT
    assert f"the state of step {heal['resumed_from']} was in memory" in " ".join(run.output.split())
    assert [event["step"] for event in run.events("commit") if event["kind"] == "full"] == [STEPS]
    assert states_in_memory(run.folder) == []


@pytest.mark.all
@pytest.mark.parametrize("backend", ["bytes", "fsdp2", "megatron"])
@pytest.mark.parametrize("victim", ["trainer-rank-1", "node-agent"])
def test_a_run_without_a_checkpoint_goes_on_from_its_state_in_memory(
    folder: Path, of_bytes: Sequence[str], victim: str, backend: str
) -> None:
    settings = of_bytes if backend == "bytes" else (*LENGTH, f"backend={backend}", "backend.ranks=2")
    undisturbed = launch(folder.with_name("undisturbed"), *settings, *IN_MEMORY[:1], small=False)
    started = start(folder, *settings, *IN_MEMORY, small=False)
    wait_for_state(started, STRUCK_AT)
    os.kill(started.pid_of(victim), signal.SIGKILL)
    assert_the_same(run := started.finish(), undisturbed, started.process.pid)
    assert_goes_on_from_memory(run)


@pytest.mark.all
@pytest.mark.parametrize("victim", ["driver", "raylet"])
def test_a_supervised_run_goes_on_from_the_state_of_a_killed_driver_or_ray(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run, victim: str
) -> None:
    started = start(folder, "--supervise", *of_bytes, *IN_MEMORY, small=False)
    wait_for_state(started, STRUCK_AT)
    driver = psutil.Process(driver_of(started))
    struck = driver if victim == "driver" else next(one for one in driver.children() if one.name() == "raylet")
    struck.kill()
    assert_the_same(run := started.finish(), undisturbed, driver.pid)
    assert_goes_on_from_memory(run)


@pytest.mark.all
def test_a_refused_resume_leaves_the_state_of_a_killed_driver_to_the_next_one(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run
) -> None:
    started = start(folder, *of_bytes, *IN_MEMORY, small=False)
    wait_for_state(started, STRUCK_AT)
    started.process.kill()
    started.finish()
    refused = resume(folder, "trainer.steps=2")
    assert refused.code == 2, refused.output
    run = resume(folder)
    assert run.code == 0, run.output
    assert run.record["attempts"][-1]["resumed_from"] >= STRUCK_AT
    assert run.digests == undisturbed.digests
    assert states_in_memory(run.folder) == []


class Up(NamedTuple):
    """An explorer that has come up, as the log tells it."""

    name: str
    how: str
    pid: int


def explorers(run: Run) -> list[Up]:
    told = re.findall(
        r"(explorer-\d) (is up|lives on): pid (\d+) on node", (run.folder / "logs/driver.log").read_text()
    )
    return [Up(name, how, int(pid)) for name, how, pid in told]


def assert_the_same_explorers(run: Run, names: Sequence[str]) -> None:
    """Those of the first attempt have served the second one, which has loaded its own versions only."""
    found = explorers(run)
    pids = {one.name: one.pid for one in found}
    assert sorted(found) == sorted(Up(name, how, pids[name]) for name in names for how in ("is up", "lives on"))
    (heal,) = run.events("heal")
    assert heal["kept"] == ", ".join(names)
    for load in run.events("load"):
        assert load["attempt"] == 0 or load["version"] >= heal["resumed_from"]
        assert load["digest"] == run.digests[load["version"]]
    assert not run.events("fault")


@pytest.mark.all
@pytest.mark.parametrize("mode", ["checkpoint", "memory", "nccl"])
def test_explorers_live_on_and_make_the_same_samples(folder: Path, mode: str) -> None:
    settings = (*LENGTH, f"sync={mode}", "explorer.replicas=2")
    undisturbed = launch(folder.with_name("undisturbed"), *settings)
    started = start(folder, *settings)
    strike(started, "trainer-rank-1")
    assert_healed(run := started.finish(), undisturbed, started.process.pid, "trainer rank 1 died")
    assert_the_same_explorers(run, ["explorer-0", "explorer-1"])
    assert rewards(run) == rewards(undisturbed)


def rewards(run: Run) -> list[float]:
    return [line["reward/mean"] for line in run.lines("metrics.jsonl")]


@pytest.mark.all
def test_explorers_of_a_free_run_live_on(folder: Path) -> None:
    started = start(folder, *LENGTH, "trainer.schedule=free", "explorer.replicas=2")
    strike(started, "trainer-rank-1")
    run = started.finish()
    assert run.code == 0, run.output
    assert_the_same_explorers(run, ["explorer-0", "explorer-1"])
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
def test_an_explorer_that_stands_still_when_the_run_goes_on_is_started_anew(folder: Path) -> None:
    settings = (*LENGTH, "explorer.replicas=2")
    undisturbed = launch(folder.with_name("undisturbed"), *settings)
    started = start(folder, *settings)
    strike(started, "trainer-rank-1")
    started.wait_for_line("the run goes on from")
    os.kill(started.pid_of("explorer-1"), signal.SIGSTOP)
    assert_the_same(run := started.finish(), undisturbed, started.process.pid)
    lived, stopped = ([one for one in explorers(run) if one.name == f"explorer-{number}"] for number in range(2))
    assert [one.how for one in lived] == ["is up", "lives on"]
    assert [one.how for one in stopped] == ["is up", "is up"]
    assert not run.events("fault")


@pytest.mark.all
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_trains_goes_on_bit_for_bit_without_a_rank_that_dies_or_stands_still(
    folder: Path, signum: int
) -> None:
    settings = (*LENGTH, "backend.timeout_s=20")
    undisturbed = launch(folder.with_name("undisturbed"), *settings)
    started = start(folder, *settings)
    strike(started, "trainer-rank-1", signum)
    named = "trainer rank 1 died" if signum == signal.SIGKILL else "no answer from trainer rank 1"
    assert_healed(started.finish(), undisturbed, started.process.pid, named)


@pytest.mark.all
def test_a_healed_run_makes_no_finished_sample_again(folder: Path) -> None:
    settings = ("trainer.steps=12", "checkpoint.interval=100", "explorer.replicas=2")
    undisturbed = launch(folder.with_name("undisturbed"), *settings)
    started = start(folder, *settings)
    strike(started, "trainer-rank-1", at=6)
    run = started.finish()
    assert run.code == 0, run.output
    assert run.digests == undisturbed.digests
    of_step = len(undisturbed.events("generate")) // 12
    lines = run.lines("metrics.jsonl")
    journaled = [line["step"] for line in lines if line.get("samples/journaled") == 16]
    assert journaled[:6] == list(range(1, 7))
    assert len(run.events("generate")) <= of_step * 6
    assert "journal" not in " ".join(fault["where"] for fault in run.events("fault"))
    assert not list((run.folder / "journal").iterdir())


@pytest.mark.all
def test_a_free_run_that_is_healed_trains_on_the_same_batches_again(folder: Path) -> None:
    started = start(folder, *FREE, "trainer.steps=40", "checkpoint.interval=100", "samples.record_interval=1")
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] >= 20)
    before = Run(folder, 0, "").digests
    os.kill(started.pid_of("trainer-rank-0"), signal.SIGKILL)
    run = started.finish()
    assert_sound(run, 40)
    lines = run.lines("metrics.jsonl")
    assert [line.get("samples/journaled") for line in lines[:20]] == [16.0] * 20
    assert {step: digest for step, digest in run.digests.items() if step in before} == before
    assert len(before) > 10


SLOW_REWARD = """import time


def judge(prompt, response):
    time.sleep(0.05)
    return float(len(response))
"""


@pytest.fixture
def slow_explorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The settings of a free run whose explorers are not done when a rank dies."""
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARD)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number}=", "answer": ""}) + "\n" for number in range(200)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = ("task=jsonl", f"task.path={prompts}", "task.reward._target_=slow_rewards.judge", "task.response_length=3")
    ahead = ("sync.max_staleness=30", "samples.buffer=40", "trainer.steps=30", "checkpoint.interval=100")
    return (*FREE, *task, *ahead, "samples.record_interval=1", "samples.record_groups=4")


@pytest.mark.all
def test_explorers_of_a_free_run_generate_while_it_is_healed_and_its_steps_use_the_samples(
    folder: Path, slow_explorers: Sequence[str]
) -> None:
    started = start(folder, *slow_explorers)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] >= 5)
    os.kill(started.pid_of("trainer-rank-0"), signal.SIGKILL)
    run = started.finish()
    assert_sound(run, 30, bound=30)
    (heal,) = run.events("heal")
    assert heal["kept"] == "explorer-0, explorer-1"
    assert heal["made"] > 0
    journaled = sum(line.get("samples/journaled", 0.0) for line in run.lines("metrics.jsonl")) / 4
    assert journaled >= 4 * heal["lost"] + heal["made"], "each was trained on"
    places = {(line["for_step"], line["prompt"], line["step"]) for line in run.lines("samples.jsonl")}
    assert len({place[:2] for place in places}) == len(places) == 4 * 30, "none was trained on twice"
    assert f"{heal['made']} groups of samples made meanwhile" in (run.folder / "logs/driver.log").read_text()
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
@pytest.mark.parametrize("restarts", [1, 3])
def test_another_death_while_explorers_generate_is_healed_or_ends_the_run(
    folder: Path, slow_explorers: Sequence[str], restarts: int
) -> None:
    started = start(folder, *slow_explorers, f"trainer.max_restarts={restarts}")
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] >= 5)
    os.kill(first := started.pid_of("trainer-rank-0"), signal.SIGKILL)
    os.kill(wait_for_another(started, "trainer-rank-0", first), signal.SIGKILL)
    run = started.finish()
    assert_ended_clean(run, started.process.pid)
    if restarts == 1:
        assert (run.code, run.record["status"]) == (1, "failed")
        return
    assert_sound(run, 30, bound=30)
    (heal,) = run.events("heal")
    assert (heal.get("kept"), [one.how for one in explorers(run)]) == (None, ["is up"] * 4)


@pytest.mark.all
def test_a_signal_ends_a_free_run_whose_explorers_generate_while_it_is_healed(
    folder: Path, slow_explorers: Sequence[str]
) -> None:
    started = start(folder, *slow_explorers)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] >= 5)
    os.kill(started.pid_of("trainer-rank-0"), signal.SIGKILL)
    started.wait_for_line("the run goes on from")
    time.sleep(1)
    started.process.send_signal(signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
def test_an_explorer_that_dies_while_a_free_run_is_healed_is_started_anew(folder: Path) -> None:
    started = start(folder, *FREE, "trainer.steps=30", "checkpoint.interval=100")
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] >= 5)
    victim = started.pid_of("explorer-1")
    os.kill(started.pid_of("trainer-rank-0"), signal.SIGKILL)
    started.wait_for_line("the run goes on from")
    os.kill(victim, signal.SIGKILL)
    run = started.finish()
    assert_sound(run, 30)
    (heal,) = run.events("heal")
    assert heal["kept"] == "explorer-0"
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
def test_a_run_whose_monitor_dies_needs_no_other_attempt(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run
) -> None:
    started = start(folder, *of_bytes, small=False)
    strike(started, "checkpoint_monitor")
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid, heals=0)
    assert len(run.record["attempts"]) == 1


@pytest.mark.all
def test_a_death_before_the_first_step_and_one_within_the_healing_are_healed_too(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run
) -> None:
    started = start(folder, *of_bytes, small=False)
    started.wait_for_line("loading trainer and explorers")
    os.kill(first := started.pid_of("trainer-rank-0"), signal.SIGKILL)
    os.kill(wait_for_another(started, "trainer-rank-0", first), signal.SIGKILL)
    run = started.finish()
    assert_the_same(run, undisturbed, started.process.pid)
    (heal,) = run.events("heal")
    assert "; then " in heal["died"]
    assert [attempt["attempt"] for attempt in run.record["attempts"]] == [0, 1, 2]
    assert "the run begins again at step 1" in run.output


def wait_for_another(started: Started, name: str, before: int) -> int:
    """The process of an actor in the next attempt."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            if (pid := started.pid_of(name)) != before:
                return pid
        except AssertionError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"no other {name} was started")


@pytest.mark.all
def test_a_run_with_no_restart_left_ends_and_tells_each_attempt(folder: Path, of_bytes: Sequence[str]) -> None:
    started = start(folder, *of_bytes, "trainer.max_restarts=1", small=False)
    strike(started, "trainer-rank-1")
    started.wait_for_event(lambda event: event["event"] == "heal")
    strike(started, "synchronizer", at=STRUCK_AT + 4)
    run = started.finish()
    assert run.code == 1
    told = run.output[run.output.rindex("error: ") :]
    assert told.startswith("error: the synchronizer died before it could")
    assert "The restarts are used up (trainer.max_restarts=1" in told
    assert "attempt 0: trainer rank 1 died before it could" in told
    assert run.record["status"] == "failed"
    assert "trinity-sync resume" in run.output
    assert_ended_clean(run, started.process.pid)


@pytest.mark.all
def test_a_signal_ends_a_run_that_is_about_to_go_on(folder: Path, of_bytes: Sequence[str]) -> None:
    started = start(folder, *of_bytes, small=False)
    strike(started, "trainer-rank-1")
    started.wait_for_line("the run goes on from")
    started.process.send_signal(signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    assert_ended_clean(run, started.process.pid)


# -- a supervised run: its driver is a child of the program that was started


KILLED = "the driver was killed by signal 9"


def driver_of(started: Started, before: int | None = None) -> int:
    """The driver that comes after another."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        for child in psutil.Process(started.process.pid).children():
            if child.pid != before:
                return child.pid
        time.sleep(0.02)
    raise AssertionError("no other driver was started")


def kill_driver(started: Started, at: int = STRUCK_AT) -> int:
    """Kill the driver of a run that has published the version of a step; its pid."""
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == at)
    os.kill(pid := driver_of(started), signal.SIGKILL)
    return pid


LOST = {
    "explorer-0": "explorer-0 died",
    "trainer-rank-1": "trainer rank 1 died",
    "node-agent": "the agent of node",
    "synchronizer": "the synchronizer died",
}


def test_a_supervised_run_that_loses_each_of_its_processes_once_goes_on(folder: Path, of_bytes: Sequence[str]) -> None:
    steps = 6 * (len(LOST) + 3)
    started = start(folder, "--supervise", *of_bytes, f"trainer.steps={steps}", "trainer.max_restarts=9", small=False)

    def wait_for(attempt: int, version: int) -> None:
        started.wait_for_event(
            lambda event: (event["event"], event["attempt"]) == ("publish", attempt) and event["version"] >= version
        )

    wait_for(0, 3)
    os.kill(started.pid_of("checkpoint_monitor"), signal.SIGKILL)  # Ray starts another within the attempt
    for attempt, victim in enumerate(LOST):
        wait_for(attempt, 6 * (attempt + 1))
        os.kill(started.pid_of(victim), signal.SIGKILL)
    wait_for(len(LOST), 6 * (len(LOST) + 1))
    os.kill(pid := driver_of(started), signal.SIGKILL)
    run = started.finish()
    assert run.code == 0, run.output
    assert sorted(run.digests) == list(range(steps + 1))
    assert len({(event["version"], event["digest"]) for event in run.events("publish")}) == steps + 1
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    heals = run.events("heal")
    for named, heal in zip([*LOST.values(), KILLED], heals, strict=True):
        assert named in heal["died"]
        assert heal["lost"] <= 6  # of the save before, which may have been under way
    assert [one["status"] for one in run.record["attempts"]] == ["failed"] * len(heals) + ["completed"]
    assert f"warning: {KILLED}; the run is resumed" in run.output
    assert_ended_clean(run, pid)


@pytest.mark.all
def test_a_supervised_run_ends_as_one_whose_driver_lives_also_after_a_death_within_the_restart_and_a_resume(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run
) -> None:
    started = start(folder, "--supervise", *of_bytes, small=False)
    first = kill_driver(started)
    second = driver_of(started, before=first)
    time.sleep(2)  # within its imports, or the start of Ray
    os.kill(second, signal.SIGKILL)
    third = driver_of(started, before=second)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == STRUCK_AT + 4)
    started.process.send_signal(signal.SIGTERM)
    run = started.finish()
    assert run.code == 130, run.output
    assert run.record["status"] == "interrupted"
    again = start(folder, "resume", str(folder), "--supervise", command=["-m", "trinity_sync.cli"])
    fourth = kill_driver(again, at=STRUCK_AT + 10)
    run = again.finish()
    assert_the_same(run, undisturbed, third, heals=2)
    assert [heal["died"] for heal in run.events("heal")] == [f"{KILLED}; then {KILLED}", KILLED]
    assert [leftovers(pid) for pid in (first, second, fourth)] == [[], [], []]


@pytest.mark.all
def test_a_supervised_run_whose_raylet_dies_goes_on_bit_for_bit(
    folder: Path, of_bytes: Sequence[str], undisturbed: Run
) -> None:
    """In the same driver, or Ray ends that."""
    started = start(folder, "--supervise", *of_bytes, small=False)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == STRUCK_AT)
    pid = driver_of(started)
    (raylet,) = [child for child in psutil.Process(pid).children() if child.name() == "raylet"]
    raylet.kill()
    assert_the_same(started.finish(), undisturbed, pid)


@pytest.mark.all
def test_a_supervised_run_without_restarts_ends_as_its_driver_dies(folder: Path, of_bytes: Sequence[str]) -> None:
    started = start(folder, "--supervise", *of_bytes, "trainer.max_restarts=0", small=False)
    kill_driver(started)
    run = started.finish()
    assert run.code == 1
    assert run.output.endswith(f"error: {KILLED}. The restarts are used up (trainer.max_restarts=0)\n")
    assert resume(folder).code == 0


@pytest.mark.all
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_no_driver_outlives_its_supervisor(folder: Path, of_bytes: Sequence[str], signum: int) -> None:
    """Killed alone; or a Ctrl-C in a terminal, twice, which comes to both."""
    started = start(folder, "--supervise", *of_bytes, small=False)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == STRUCK_AT)
    pid = driver_of(started)
    for _ in range(1 if signum == signal.SIGKILL else 2):
        (os.kill if signum == signal.SIGKILL else os.killpg)(started.process.pid, signum)
        time.sleep(0.5)
    run = started.finish()  # waits for the output of both
    assert run.code == (-9 if signum == signal.SIGKILL else 130), run.output
    assert run.record["status"] == "interrupted"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its parent is gone
    assert_ended_clean(run, pid)
