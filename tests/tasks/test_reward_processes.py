"""Rewards in processes of their own: whatever the function does is that response's failure, and nobody else's."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.tasks import bad_rewards
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.origin import origin
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import Response, Verdict
from trinity_sync.tasks.functions import FunctionReward
from trinity_sync.tasks.judging import Judging
from trinity_sync.tasks.reward_processes import RewardProcesses

SOURCE = bad_rewards.__file__
PROMPT = Prompt(index=5, text="61=", answer="61", fields={"level": 1})
LIMIT_S = 20.0


@contextmanager
def judging(
    on_error: str = "zero",
    *,
    timeout_s: float = LIMIT_S,
    processes: int = 1,
    reward: Callable[..., float] = bad_rewards.misbehave,
) -> Iterator[RewardProcesses]:
    function = FunctionReward(reward)
    found = RewardProcesses(function, Judging(on_error, timeout_s, processes), function.name)
    try:
        yield found
    finally:
        found.close()


def verdicts(judge: RewardProcesses, *texts: str) -> list[Verdict]:
    return judge.judge([Response(PROMPT, text, True) for text in texts], step=7)


def gone(pid: int) -> bool:
    """Whether a process is no more, within a few seconds; what is dead and waited for by nobody counts."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raises", rf"failed: ValueError: nothing to compare \({SOURCE}:\d+\)"),
        ("sys.exit", rf"called sys\.exit\(3\) \({SOURCE}:\d+\)"),
        ("os._exit", "ended its process with exit code 4"),
        ("forks and dies", "ended its process with exit code 4"),
        ("crashes", rf"ended its process by signal 11 \(Segmentation fault\) \({SOURCE}:\d+\)"),
        ("is killed", r"ended its process by signal 9 \(Killed\)"),
        ("interrupts", r"ended its process by signal 2 \(Interrupt\)"),
        ("nan", "returned nan; it must return a finite number"),
        ("text", "returned '0.5'; it must return a finite number"),
        ("nothing", "returned None; it must return a finite number"),
        ("unpicklable", r"returned <function misbehave.<locals>.<lambda> at 0x\w+>; it must return a finite number"),
    ],
)
def test_what_goes_wrong_is_that_responses_error_and_the_next_is_judged(response: str, said: str) -> None:
    with judging() as judge:
        before, bad, after = verdicts(judge, "fine", response, "fine")
    assert (before, after) == (Verdict(1.0, None), Verdict(1.0, None))
    assert (bad.reward, bad.exact) == (0.0, None)
    where = r"the reward function tests\.tasks\.bad_rewards\.misbehave, called for prompt 5 of step 7, "
    assert re.fullmatch(where + said, bad.error)


@pytest.mark.parametrize("response", ["sleeps", "holds Python's lock"])
def test_one_that_hangs_is_ended_at_the_limit_and_says_where_it_hung(response: str) -> None:
    with judging(timeout_s=0.5) as judge:
        first, bad, last = verdicts(judge, "fine", response, "fine")
        assert verdicts(judge, "fine") == [Verdict(1.0, None)]
    assert [first.reward, last.reward] == [1.0, 1.0]
    assert f"did not return within 0.5 s ({SOURCE}:" in bad.error


def test_stop_ends_the_run_with_the_users_traceback() -> None:
    with judging("stop") as judge:
        with pytest.raises(RunError, match=r"prompt 5 of step 7, failed: ValueError") as caught:
            verdicts(judge, "fine", "raises", "fine")
        assert not judge.pids
    found = origin(caught.value)
    assert found is not None
    assert found.place.startswith(f"{SOURCE}:")
    assert found.traceback.endswith("ValueError: nothing to compare")


def test_skip_leaves_a_response_without_a_reward() -> None:
    with judging("skip") as judge:
        fine, bad = verdicts(judge, "fine", "raises")
    assert not fine.error
    assert math.isnan(bad.reward)
    assert "nothing to compare" in bad.error


def test_several_processes_judge_side_by_side(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reward = partial(bad_rewards.in_turn, fifo=str(tmp_path / "fifo"))
    with judging("stop", processes=2, reward=reward) as judge:
        assert [found.reward for found in verdicts(judge, "first", "last")] == [1.0, 2.0]


def test_several_processes_give_the_verdicts_in_the_order_of_the_responses() -> None:
    texts = ["x" * (number % 7) for number in range(200)]
    with judging(processes=3, reward=bad_rewards.count) as judge:
        for _ in range(20):  # who is done first differs
            assert [found.reward for found in verdicts(judge, *texts)] == [len(text) for text in texts]
        assert len(judge.pids) == 3
        assert verdicts(judge) == []


def test_processes_stay_from_one_batch_to_the_next_and_one_that_was_killed_meanwhile_is_started_again() -> None:
    with judging("stop") as judge:
        first, second = (int(verdicts(judge, "pid")[0].reward) for _ in range(2))
        assert first == second
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        assert verdicts(judge, "pid")[0].reward != first


def test_what_it_has_started_ends_with_it() -> None:
    with judging() as judge:
        program, _ = verdicts(judge, "leaves a program behind", "os._exit")
        assert gone(int(program.reward))


def test_what_it_prints_comes_as_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with judging() as judge:
        verdicts(judge, "prints", "fine")
    assert capfd.readouterr().err == "somebody else's\nhalf a line, and the rest\n"


def test_no_process_outlives_the_one_it_judges_for() -> None:
    script = f"""
import sys
sys.path[:] = {sys.path!r}
from tests.tasks.test_reward_processes import judging, verdicts
with judging() as judge:
    print(int(verdicts(judge, "pid")[0].reward), flush=True)
    verdicts(judge, "holds Python's lock")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as explorer:
        assert explorer.stdout is not None
        assert explorer.stderr is not None
        pid = int(explorer.stdout.readline())
        assert explorer.stderr.readline() == "holding it\n"
        explorer.kill()
        assert gone(pid)


def test_it_may_be_sent_elsewhere_and_takes_no_process_along() -> None:
    with judging() as judge:
        verdicts(judge, "fine")
        copy = pickle.loads(pickle.dumps(judge))
        assert not copy.pids
        assert verdicts(copy, "raises")[0].error
        copy.close()


def test_a_function_that_cannot_cross_is_refused() -> None:
    def inner(prompt: Prompt, response: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"<locals>\.inner, which cannot be sent to the process that judges: .*inner"):
        RewardProcesses(FunctionReward(inner), Judging(), "here.<locals>.inner")


class Unloadable:
    """Can be pickled; what comes of that raises."""

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> float:
        return 1.0

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return __import__, ("no_such_module_anywhere",)


def test_a_function_that_cannot_be_imported_there_ends_the_run_whatever_the_policy() -> None:
    judge = RewardProcesses(Unloadable(), Judging("zero"), "my.reward")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"my\.reward cannot be had in its process: ModuleNotFoundError"):
        verdicts(judge, "fine")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"on_error": "ignore"}, "task.reward.on_error is 'ignore'; must be one of stop, zero, skip"),
        ({"timeout_s": 0}, "task.reward.timeout_s is 0; must be a number of seconds, more than 0"),
        ({"timeout_s": "30"}, "task.reward.timeout_s is '30'; must be"),
        ({"timeout_s": math.inf}, "task.reward.timeout_s is inf; must be"),
        ({"processes": 0}, "task.reward.processes is 0; must be at least 1"),
        ({"processes": True}, "task.reward.processes is True; must be at least 1"),
    ],
)
def test_a_wrong_value_of_a_key_of_ours_is_named(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Judging.taken_from({"_target_": "a.b", **keys})


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (bad_rewards.waits, "waits, which is asynchronous; make it a plain function"),
        (bad_rewards.Waits(), "which is asynchronous"),
        (bad_rewards.yields, "yields, which is a generator"),
        (
            bad_rewards.wants_more,
            r"cannot be called with a prompt and a response: missing a required argument: 'answer'",
        ),
        (bad_rewards.wants_less, "cannot be called with a prompt and a response: too many positional arguments"),
        (partial(bad_rewards.count, volume=2), r"which does not take the keys given: volume"),
        (bad_rewards.has_our_key, r"has a parameter timeout_s; task\.reward\.timeout_s says how"),
    ],
)
def test_a_function_that_is_none_of_ours_is_refused_before_the_run(function: Callable[..., float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FunctionReward(function)


def test_a_process_that_ends_after_its_last_answer_costs_nobody_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with judging("stop") as judge:
        assert [verdict.reward for verdict in verdicts(judge, "a")] == [1.0]
        (pid,) = judge.pids
        heard = judge._heard

        def late() -> object:  # as on a host that has much to do
            assert gone(pid)
            return heard()

        monkeypatch.setattr(judge, "_heard", late)
        assert [verdict.reward for verdict in verdicts(judge, "dies afterwards")] == [1.0]
        monkeypatch.undo()
        assert [verdict.reward for verdict in verdicts(judge, "a", "numpy")] == [1.0, 1.0]
        assert judge.pids != [pid]


def test_a_process_that_is_forked_holds_nothing_by_which_those_that_judge_would_live_on() -> None:
    with judging("stop") as judge:
        assert [verdict.reward for verdict in verdicts(judge, "a")] == [1.0]
        (worker,) = judge._workers
        held = [worker._lifeline, worker._connection.fileno()]
        if (child := os.fork()) == 0:
            os._exit(sum(is_open(descriptor) for descriptor in held))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(map(is_open, held))
        assert [verdict.reward for verdict in verdicts(judge, "a")] == [1.0]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
