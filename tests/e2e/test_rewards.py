"""Reward functions that fail, in a run that is told to go on."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.e2e.runs import Run, launch
from tests.tasks.test_reward_processes import gone

REWARDS = """import os
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def judge(prompt, response):
    with open(FOLDER / "pids", "a") as file:
        print(os.getpid(), file=file)
    if prompt.answer == "0":
        raise ValueError("nothing to compare")
    if prompt.answer == "1" and not (FOLDER / "hung").exists():
        (FOLDER / "hung").touch()
        time.sleep(600)
    return len(response)
"""


def run_with(on_error: str, folder: Path, *overrides: str) -> Run:
    (folder / "my_rewards.py").write_text(REWARDS)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": f"{i}"}) + "\n" for i in range(4)))
    os.environ["PYTHONPATH"] = str(folder)
    try:
        return launch(
            folder / "run",
            "task=jsonl",
            f"task.path={prompts}",
            "task.reward._target_=my_rewards.judge",
            f"task.reward.on_error={on_error}",
            "task.reward.timeout_s=3",
            "task.response_length=3",
            "samples.record_interval=1",
            *overrides,
        )
    finally:
        del os.environ["PYTHONPATH"]


@pytest.mark.all
@pytest.mark.parametrize(
    ("on_error", "overrides"),
    [("zero", ()), ("skip", ("backend.ranks=2", "explorer.replicas=2", "task.reward.processes=2"))],
)
def test_a_run_goes_on_with_rewards_that_raise_and_hang_and_tells_of_them(
    tmp_path: Path, on_error: str, overrides: tuple[str, ...]
) -> None:
    run = run_with(on_error, tmp_path, *overrides)
    assert run.code == 0, run.output
    source = tmp_path / "my_rewards.py"
    steps = run.lines("metrics.jsonl")
    assert [line["reward/failed"] for line in steps] == [5, 4, 4]
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert {line["reward/min"] == 0 for line in steps} == {on_error == "zero"}
    told = run.events("failed_rewards")
    assert [(event["step"], event["count"]) for event in told] == [(1, 5), (2, 4), (3, 4)]
    for event in told:
        assert event["error"].startswith("the reward function my_rewards.judge, called for prompt ")
        assert f"({source}:" in event["error"]
    samples = run.lines("samples.jsonl")
    failed = {line["reward"] for line in samples if line["text"] == "0="}
    assert failed == ({0.0} if on_error == "zero" else {None})
    if on_error == "skip":
        assert {line["advantage"] for line in samples if line["reward"] is None} == {0.0}
    assert run.summary["failed_rewards"] == 13
    assert "13 responses could not be judged: see events.jsonl" in run.output
    logs = "".join(log.read_text() for log in (run.folder / "logs").glob("explorer-*.log"))
    assert f"failed: ValueError: nothing to compare ({source}:12)\nTraceback (most recent call last):\n" in logs
    assert f"did not return within 3 s ({source}:15)" in logs
    assert all(gone(int(pid)) for pid in set((tmp_path / "pids").read_text().split()))
