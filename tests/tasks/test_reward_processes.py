"""Rewards in processes of their own: whatever the function does is that response's failure, and nobody else's."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.patience import until
from tests.tasks import bad_rewards
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.child_process import OWN_NAMES, start_child
from trinity_sync.host.origin import Origin, origin
from trinity_sync.host.process import driver_lifeline
from trinity_sync.host.threads import in_background
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks import reward_processes
from trinity_sync.tasks.base import Failure, Response, RewardResult, SummedResult, Verdict
from trinity_sync.tasks.reward_processes import RewardProcesses, decoded, encoded
from trinity_sync.tasks.rewards import FunctionReward, RewardSettings

SOURCE = bad_rewards.__file__
PROMPT = Prompt(index=5, text="61=", answer="61", fields={"level": 1})
LIMIT_S = 20.0
BRIEF_S = 0.2
"""For the end of a process that lives on."""


@contextmanager
def judging(
    on_error: str = "zero",
    *,
    timeout_s: float = LIMIT_S,
    processes: int = 1,
    reward: Callable[..., float] = bad_rewards.misbehave,
) -> Iterator[RewardProcesses]:
    function = FunctionReward(reward)
    found = RewardProcesses(function, RewardSettings(on_error, timeout_s, processes), function.name)
    try:
        yield found
    finally:
        found.close()


def verdicts(judge: RewardProcesses, *texts: str) -> list[Verdict]:
    return judge.judge([Response(PROMPT, text, True) for text in texts], step=7)


def process(judge: RewardProcesses) -> int:
    """The process that judges."""
    pid = int(verdicts(judge, "pid")[0].reward)
    assert pid > 1, "a signal to it would reach others"
    return pid


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
        ("closes all", "closed the connection of its process"),
        ("kills its group", r"ended its process by signal 9 \(Killed\)"),
        ("interrupts", r"ended its process by signal 2 \(Interrupt\)"),
        ("nan", "returned nan; it must return a finite number"),
        ("text", "returned '0.5'; it must return a finite number"),
        ("nothing", "returned None; it must return a finite number"),
        ("unpicklable", r"returned <function misbehave.<locals>.<lambda> at 0x\w+>; it must return a finite number"),
    ],
)
@pytest.mark.few(5)
def test_what_goes_wrong_is_that_responses_error_and_the_next_is_judged(
    response: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if response == "closes all":  # and lives on: its end is waited for in vain
        monkeypatch.setattr(reward_processes, "_END_S", BRIEF_S)
    with judging() as judge:
        before, bad, after = verdicts(judge, "fine", response, "fine")
    assert (before, after) == (Verdict(1.0, None), Verdict(1.0, None))
    assert (bad.reward, bad.exact) == (0.0, None)
    where = r"the reward function tests\.tasks\.bad_rewards\.misbehave, called for prompt 5 of step 7, "
    assert re.fullmatch(where + said, bad.error)


def test_one_that_ends_its_forks_is_worth_what_it_returns() -> None:
    with judging(timeout_s=5.0) as judge:
        assert verdicts(judge, "ends a fork") == [Verdict(float(signal.SIGTERM), None)]


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
        first, second = (process(judge) for _ in range(2))
        assert first == second
        os.kill(first, signal.SIGKILL)
        (worker,) = judge._workers
        deadline = time.monotonic() + LIMIT_S
        while not worker.lost:
            assert time.monotonic() < deadline
        assert verdicts(judge, "pid")[0].reward != first


LEFT_BEHIND = ["leaves a program behind", "leaves a session behind", "leaves a daemon behind"]


@pytest.mark.parametrize("response", LEFT_BEHIND)
@pytest.mark.parametrize("end", ["os._exit", "is killed", "crashes", "kills its group"])
@pytest.mark.few(5)
def test_what_it_has_started_ends_with_it(response: str, end: str) -> None:
    with judging() as judge:
        program, _ = verdicts(judge, response, end)
        assert gone(int(program.reward))


def test_what_it_has_started_goes_on_from_one_response_to_the_next_and_ends_with_the_judge() -> None:
    with judging() as judge:
        programs = [int(verdict.reward) for verdict in verdicts(judge, *LEFT_BEHIND)]
        assert all(psutil.pid_exists(pid) for pid in programs)
    assert all(map(gone, programs))


def test_what_one_that_hangs_has_started_ends_at_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    with judging(timeout_s=1) as judge:
        verdicts(judge, "leaves a session behind and sleeps")
        assert gone(int(capfd.readouterr().err))


def test_a_driver_that_is_gone_leaves_its_end_to_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with judging("stop") as judge:
        with driver_lifeline(tmp_path / "driver") as environment:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            (program,) = verdicts(judge, "leaves a session behind")
        assert verdicts(judge, "fine") == [Verdict(1.0, None)]
    assert gone(int(program.reward))


def test_a_process_does_not_outlive_its_keeper() -> None:
    with judging() as judge:
        judges = process(judge)
        (keeper,) = judge.pids
        assert keeper != judges
        os.kill(keeper, signal.SIGKILL)
        assert gone(judges)


_ASKED_LATE = """
import os, signal
from trinity_sync.host.child_process import go_on_kept
wait = os.waitpid

def ask(*arguments):
    ended = wait(*arguments)
    os.kill(os.getpid(), signal.SIGUSR1)
    return ended

os.waitpid = ask
go_on_kept(os.pipe()[0], signal.SIGUSR1, not_kept=[])
os._exit(3)
"""


def test_a_keeper_that_is_asked_when_the_process_is_no_more_ends_as_that_did() -> None:
    done = subprocess.run([sys.executable, "-c", _ASKED_LATE], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_process_whose_keeper_is_no_more_does_not_go_on() -> None:
    script = (
        "import os, signal\nfrom trinity_sync.host.child_process import go_on_kept\nos.getppid = lambda: 1\n"
        "go_on_kept(os.pipe()[0], signal.SIGUSR1, not_kept=[])\nos._exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 1


def test_a_keeper_that_stands_still_ends_with_the_judge() -> None:
    with judging() as judge:
        judges = process(judge)
        (keeper,) = judge.pids
        os.kill(keeper, signal.SIGSTOP)
    assert gone(keeper)
    assert gone(judges)


def test_the_first_failure_of_each_place_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with judging() as judge:
        verdicts(judge, "raises", "fine", "raises", "sys.exit", "nan", "nan")
        verdicts(judge, "raises")
    raised, exited, nan = (record.getMessage() for record in caplog.records)
    assert "failed: ValueError: nothing to compare" in raised
    assert raised.endswith("ValueError: nothing to compare")
    assert "called sys.exit(3)" in exited
    assert nan.endswith("returned nan; it must return a finite number")


NUMBERED = [Prompt(index=number, text="1=", answer="1") for number in range(6)]


def judged_by_number(judge: RewardProcesses, responses: Mapping[int, str]) -> list[Verdict]:
    """Judge six responses that do nothing, but for those given."""
    return judge.judge([Response(prompt, responses.get(prompt.index, ""), True) for prompt in NUMBERED], step=1)


FORKS = {
    "forks": "import os; os.fork()",
    "forks twice": "import os; os.fork(); os.fork()",
    "forks unseen": "import ctypes; ctypes.CDLL(None).fork()",
    "forks and raises": "import os\nif os.fork() == 0: raise ValueError",
    "fork answers by hand": f"from {__name__} import answer; answer(in_fork=True, again=500)",
    "fork says nonsense": f"from {__name__} import answer; answer(in_fork=True, message=bytes(range(256)))",
    "answers what nobody asked": f"from {__name__} import answer; answer(in_fork=False)",
}


def answer(*, in_fork: bool, again: int = 1, message: bytes = b'["0123456789abcdef", [77.0, null]]') -> None:
    """Answer in the place of the process that judges, over each of its sockets."""
    if in_fork and os.fork():
        return
    for descriptor in range(3, 100):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                for _ in range(again):
                    os.write(descriptor, len(message).to_bytes(4, "big") + message)
                    time.sleep(0.001 if in_fork else 0)
    if in_fork:
        os._exit(0)


@pytest.mark.parametrize("response", FORKS.values(), ids=FORKS)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.all), 2])
@pytest.mark.few(2)
def test_a_response_has_the_reward_that_it_was_given_whatever_another_one_starts(response: str, processes: int) -> None:
    with judging("stop", reward=bad_rewards.runs, processes=processes) as judge:
        for _ in range(3):
            rewards = [verdict.reward for verdict in judged_by_number(judge, {1: response, 4: response})]
            assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "message", [b"", b"{", b"[1]", b'["x"', b"\xff", b'["x", [NaN, null]]', b"[" * 100_000], ids=range(7)
)
@pytest.mark.few(2)
def test_an_answer_that_is_none_is_the_failure_of_its_response(message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_processes, "_END_S", BRIEF_S)
    code = f"from {__name__} import answer; answer(in_fork=False, message={message[:9]!r} * {len(message) // 9 or 1})"
    with judging(reward=bad_rewards.runs) as judge:
        verdicts = judged_by_number(judge, {1: code})
        assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
        assert "prompt 1 of step 1, closed the connection of its process" in verdicts[1].error


@pytest.mark.all
def test_an_answer_without_end_is_the_failure_of_its_response() -> None:
    code = f"from {__name__} import answer\nwhile True: answer(in_fork=False, message=b'x' * 65536)"
    with judging(reward=bad_rewards.runs, timeout_s=2) as judge:
        verdicts = judged_by_number(judge, {1: code})
        assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]


def test_nothing_that_an_answer_holds_is_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_processes, "_END_S", BRIEF_S)
    harmful = pickle.dumps(Harmful(str(tmp_path / "made")))
    code = f"from {__name__} import answer; answer(in_fork=False, message={harmful!r})"
    with judging(reward=bad_rewards.runs) as judge:
        judged_by_number(judge, {1: code})
    assert not (tmp_path / "made").exists()


class Harmful:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


def test_numbers_come_back_as_they_are() -> None:
    for result in (RewardResult(0.1 + 0.2, None), RewardResult(-5e-324, 1.7976931348623157e308)):
        assert decoded(encoded("x", result)) == ("x", result)
    assert decoded(encoded("x", SummedResult.of(0.5, {"a": -1.0})))[1].parts == {"a": -1.0}  # type: ignore[union-attr]
    for failure in (Failure("no \udcff"), Failure("no", Origin("a.py:3", "Traceback\n"))):
        assert decoded(encoded("x", failure)) == ("x", failure)


OTHER = [
    b'["x", 1e999, null]',
    b'["x", NaN, null]',
    b'["x", 1.0, NaN]',
    b'["x", 1.0]',
    b'{"x": 1}',
    b'["x", 1.0, null, 2]',
    b'["x", 1.0, null, {"a": NaN}]',
    b'["x", 1.0, null, {"a": "b"}]',
]


@pytest.mark.parametrize("data", OTHER)
def test_other_values_are_no_answer(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        decoded(b'["x", [' + data + b"]]")


@pytest.mark.parametrize("response", ["raises much", "exits with much", "has no bound"])
def test_an_error_text_is_short(response: str) -> None:
    with judging() as judge:
        (verdict,) = verdicts(judge, response)
    assert re.search(r"failed: ValueError: xxx|called sys.exit\('xxx|returned 'xxx", verdict.error)
    assert len(verdict.error) < 5000


@pytest.mark.parametrize("users", [None, "/somewhere"])
def test_programs_that_it_starts_have_the_users_environment(monkeypatch: pytest.MonkeyPatch, users: str | None) -> None:
    if users is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", users)
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("RAY_ADDRESS", "the user's")
    monkeypatch.setenv(OWN_NAMES, "RAY_ADDRESS")
    told = [f'test "${{PYTHONPATH-unset}}" = "{users or "unset"}"', 'test "$RAY_ADDRESS" = "the user\'s"']
    told += ['test "${RAY_JOB_ID-unset}" = unset', "/usr/bin/python3 -c 'import re, json, ctypes, ssl'"]
    # As of any program that is started here: a shell without job control ignores SIGINT in what runs in the background.
    ignored = subprocess.run(["grep", "^SigIgn:", "/proc/self/status"], capture_output=True, text=True, check=True)
    told += ["grep -q '^SigBlk:.0*$' /proc/self/status", f"grep -q '^{ignored.stdout.rstrip()}$' /proc/self/status"]
    told += ["test $(ls /proc/self/fd | wc -l) = 4"]  # its own look, too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does
    try:
        with judging("stop", reward=bad_rewards.environment) as judge:
            assert [verdict.reward for verdict in verdicts(judge, *told)] == [1.0] * len(told)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP]], ids=len)
def test_a_signal_to_all_that_ends_a_program_of_the_function_is_no_verdict(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    ran = tmp_path / "ran"
    program = f"echo >> {ran}; test $(wc -l < {ran}) = {len(signals) + 1} || exec sleep 600"
    with judging(reward=bad_rewards.environment) as judge:
        judge.warm_up()
        judging_process = in_background(partial(verdicts, judge, program, "true"), "judge")
        for number, signum in enumerate(signals, 1):
            until(lambda number=number: ran.exists() and len(ran.read_bytes()) == number)
            signal_all(judge, signum)
        assert judging_process.result(LIMIT_S) == [Verdict(1.0, None), Verdict(1.0, None)]


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.all
def test_a_signal_to_all_that_ends_a_lasting_program_of_the_function_is_no_verdict(idle: bool) -> None:
    with contextlib.closing(RewardProcesses(bad_rewards.Helped(), RewardSettings(), "helped")) as judge:
        judge.warm_up()
        if idle:
            assert verdicts(judge, "") == [Verdict(1.0, None)]
            signal_all(judge, signal.SIGTERM)
        judging_process = in_background(partial(verdicts, judge, "", ""), "judge")
        if not idle:
            until(lambda: judge._workers[0].current is not None)
            signal_all(judge, signal.SIGTERM)
        assert judging_process.result(LIMIT_S) == [Verdict(1.0, None), Verdict(1.0, None)]


def test_a_signal_to_an_idle_process_without_programs_does_not_end_it() -> None:
    with contextlib.closing(RewardProcesses(bad_rewards.Warm(), RewardSettings(), "warm")) as judge:
        verdicts(judge, "a")
        before = judge.pids
        for one in started_by(judge):
            one.send_signal(signal.SIGTERM)
        verdicts(judge, "a")
        assert judge.pids == before


def signal_all(judge: RewardProcesses, signum: signal.Signals) -> None:
    """Signal its processes and all below them, once a program of the function runs."""
    until(lambda: any(map(sleeps, started_by(judge))))
    for one in started_by(judge):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signum)


def sleeps(one: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(one.name() == "sleep")
    return False


def started_by(judge: RewardProcesses) -> list[psutil.Process]:
    """Its processes, and all below them."""
    found = [psutil.Process(pid) for pid in judge.pids]
    return [*found, *(below for one in found for below in one.children(recursive=True))]


def test_a_large_function_has_the_time_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_processes, "start_child", partial(start_child, message_s=0.01))
    reward = bad_rewards.Warm()
    reward.data = bytes(5_000_000)  # type: ignore[attr-defined]
    with contextlib.closing(RewardProcesses(reward, RewardSettings(), "large")) as judge:
        assert verdicts(judge, "fine") == [Verdict(1.0, None)]


class SignalledOnce(bad_rewards.Warm):
    """Gets a signal while it is warmed up for the first time."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def warm_up(self) -> None:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        super().warm_up()


def test_a_signal_while_the_function_is_imported_has_it_imported_once_more(tmp_path: Path) -> None:
    with contextlib.closing(RewardProcesses(SignalledOnce(tmp_path / "mark"), RewardSettings(), "signalled")) as judge:
        assert verdicts(judge, "fine") == [Verdict(1.0, None)]


def test_what_it_prints_comes_as_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with judging() as judge:
        verdicts(judge, "prints", "fine")
    assert capfd.readouterr().err == "somebody else's\nhalf a line, and the rest\n"


def test_what_it_prints_of_a_line_is_there_while_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    with judging() as judge:
        verdicts(judge, "begins a line")
        until(lambda: capfd.readouterr().err == "so far")


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
        RewardProcesses(FunctionReward(inner), RewardSettings(), "here.<locals>.inner")


class Unloadable:
    """Can be pickled; what comes of that raises."""

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> float:
        return 1.0

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return __import__, ("no_such_module_anywhere",)


def test_a_reward_is_warmed_up_where_it_judges() -> None:
    judge = RewardProcesses(bad_rewards.Warm(), RewardSettings(), "my.reward")
    try:
        assert verdicts(judge, "") == [Verdict(1.0, None)]
    finally:
        judge.close()


def test_a_function_that_cannot_be_imported_there_ends_the_run_whatever_the_policy() -> None:
    judge = RewardProcesses(Unloadable(), RewardSettings("zero"), "my.reward")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"my\.reward cannot be loaded in its process: ModuleNotFoundError"):
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
        RewardSettings.taken_from({"_target_": "a.b", **keys})


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
        held = [worker._lifeline, worker.descriptors[0]]
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


def test_numpy_is_left_to_the_users_function() -> None:
    """Its import starts threads, whose number the file of the function may set before."""
    code = "import sys, trinity_sync.tasks.reward_processes; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class VerlsForm:
    def __call__(self, data_source: str, solution_str: str, ground_truth: str) -> float:
        return 1.0


def of_both_forms(prompt: Prompt, response: str, solution_str: str = "", ground_truth: str = "") -> float:
    return 1.0


def test_an_object_of_verls_form_is_named_as_such_and_a_function_of_both_forms_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"VerlsForm.*, a function of verl's form"):
        FunctionReward(VerlsForm())
    FunctionReward(of_both_forms)


# a trial before the run


@pytest.mark.parametrize(("on_error", "ends"), [("stop", True), ("zero", False), ("skip", False)])
def test_a_failed_trial_ends_the_start_where_it_would_end_the_run(on_error: str, ends: bool) -> None:
    prompt = Prompt(index=0, text="61=", answer="raises")
    with judging(on_error) as judge:
        if ends:
            with pytest.raises(ConfigError, match=r"^task\.reward: .*the first row.*nothing to compare"):
                judge.trial(prompt, elsewhere=False)
        else:
            assert "nothing to compare" in str(judge.trial(prompt, elsewhere=False))
        assert judge.pids == []


@dataclass
class Unimportable:
    """A reward that only other machines can import."""

    slow: bool = False

    def warm_up(self) -> None:
        raise ImportError("no judge here")

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        raise AssertionError


def test_a_failure_of_a_server_that_may_come_up_does_not_end_the_start() -> None:
    with judging("stop", reward=bad_rewards.runs) as judge:
        down = Prompt(index=0, text="1=", answer="raise ConnectionRefusedError('nobody listens')")
        assert "nobody listens" in str(judge.trial(down, elsewhere=False))


def test_a_failure_here_does_not_end_the_start_of_a_run_on_other_machines() -> None:
    with judging("stop") as judge:
        assert "nothing to compare" in str(judge.trial(Prompt(index=0, text="1=", answer="raises"), elsewhere=True))


@pytest.mark.parametrize("answer", ["", " ", ["4"], None])
def test_the_response_of_a_trial_is_never_blank(answer: object) -> None:
    with judging("stop") as judge, pytest.raises(ConfigError, match="nothing to compare"):
        judge.trial(Prompt(index=0, text="raises", answer=answer), elsewhere=False)


def test_a_function_that_only_other_machines_can_import_is_left_to_them() -> None:
    judge = RewardProcesses(Unimportable(), RewardSettings(), "judge")
    assert "no judge here" in str(judge.trial(PROMPT, elsewhere=True))
    with pytest.raises(ConfigError, match="no judge here"):
        judge.trial(PROMPT, elsewhere=False)


def test_a_function_whose_import_is_slow_is_not_tried() -> None:
    assert RewardProcesses(Unimportable(slow=True), RewardSettings(), "judge").trial(PROMPT, elsewhere=False) is None
