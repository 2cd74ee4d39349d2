"""Kills of single processes of runs that go on by themselves: each is one line of a JSONL, and a table tells of all.

    python -m tests.kills.restarts --kills 300 --seed 1 --parallel 2     (make restarts N=300 SEED=1)

A run has a backend, a mode and a schedule, and is started once, with `--supervise`. Nobody resumes it. At instants that
are drawn, one of its processes is killed or, more rarely, stopped; in one case of six another one some seconds later.
In the end every step was done, the versions of a lockstep run have the digests of an undisturbed one, no finished
sample was made again, and no prompt of a free run is lost or trained on twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.runs import ROOT
from tests.kills import processes
from tests.kills.plan import CONFIGS, Instant
from tests.kills.processes import Member
from tests.kills.running import SMALL, Launch
from trinity_sync.checkpoint.memory_states import states_path
from trinity_sync.host.threads import comes_true
from trinity_sync.tracking import json_lines
from trinity_sync.weights.slots import DEFAULT_ROOT

ROLES = ("rank", "agent", "synchronizer", "explorer", "monitor", "driver", "raylet")
_RESTARTED = ("explorer", "monitor")  # mostly within the attempt
_STANDS_STILL = ("rank", "agent", "synchronizer")
_MOST_LOST = {True: 6, False: 12}  # steps done again, by whether states are kept in memory
_SAMPLES = 16  # of a step
_EACH, _LAST = 9, 12  # steps for each kill, and after the last one
_KILLS = 15  # of a run, at most
_SECOND, _STOPPED = 1 / 6, 1 / 12  # shares: kills with a second one, processes that are stopped
_START_S, _INSTANT_S, _GOES_ON_S, _EVENT_S, _END_S, _GONE_S = 900.0, 60.0, 240.0, 2.0, 600.0, 60.0


@dataclass
class Kill:
    """One process that was killed or stopped, and how the run went on. `seconds`: until the end of the next step."""

    seed: int
    chain: int
    config: str
    signal: str
    victim: str
    instant: str
    attempts: int = 0  # that were begun because of it
    lost: int = 0  # steps that were done again
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """The run of a chain."""

    backend: str
    sync: str
    schedule: str
    in_memory: bool  # checkpoints are rare; each step's state is kept in memory
    encoding: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.sync}-{self.schedule}" + ("-states" if self.in_memory else "")

    def overrides(self, steps: int) -> list[str]:
        """For `launch.py`."""
        free = self.schedule == "free"
        own = ("trainer.max_restarts", "checkpoint.interval", "live")
        return [
            *(one for one in SMALL if one.partition("=")[0] not in own),
            "live=off",
            "trainer.max_restarts=1000",
            f"trainer.steps={steps}",
            f"checkpoint.interval={1000 if self.in_memory else 4}",
            f"checkpoint.memory_interval={int(self.in_memory)}",
            f"backend={self.backend}",
            "backend.ranks=2",
            f"sync={self.sync}",
            f"sync.encoding={self.encoding}",
            f"trainer.schedule={self.schedule}",
            f"explorer.replicas={2 if free else 1}",
            *(["sync.max_staleness=1"] if free else []),
        ]


class Chain:
    """A run, its kills, and what came of them."""

    def __init__(
        self, home: Path, seed: int, number: int, kills: int, stop: threading.Event, references: References
    ) -> None:
        self._rng = random.Random(f"{seed}-{number}")
        backend, sync, schedule = CONFIGS[number % len(CONFIGS)]
        in_memory = self._rng.random() < 1 / 3
        encoding = self._rng.choice(("auto", "delta"))
        self.setup = Setup(backend, sync, schedule, in_memory, encoding)
        self._home, self._seed, self._number, self._stop = home / f"{seed}-{number}", seed, number, stop
        self._count, self._steps = kills, kills * _EACH + _LAST
        self._references = references
        self.kills: list[Kill] = []

    def run(self) -> list[Kill]:
        """Do it all. The folder stays where something is wrong."""
        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir(parents=True)
        with self._launch() as launch:
            if not launch.wait_steps(3, _START_S):
                raise RuntimeError(f"the run did no step: {launch.text[-2000:]}")
            for _ in range(self._count):
                if not self._strike(launch):
                    break
            last = self.kills[-1] if self.kills else Kill(0, 0, "", "", "", "")
            if not last.problems and not self._stop.is_set() and not launch.wait_end(_END_S):
                last.problems.append(f"the run did not end within {_END_S:g} s")
            elif launch.code is not None and (left := launch.wait_gone(_GONE_S)):
                last.problems.append(f"left behind: {[one.name for one in left]}")
            code = launch.code
        if not self.kills or self._stop.is_set():
            return self.kills
        if not any(kill.problems for kill in self.kills):
            last.problems += self._judge(code)
        if any(kill.problems for kill in self.kills):
            print(f"    see {self._home}", flush=True)
        else:
            shutil.rmtree(self._home)
        return self.kills

    @property
    def _folder(self) -> Path:
        return self._home / "run"

    def _launch(self) -> Launch:
        overrides = [*self.setup.overrides(self._steps), f"hydra.run.dir={self._folder}"]
        return Launch(
            [str(ROOT / "launch.py"), "--supervise", *overrides],
            mark=processes.own_mark(f"restarts-{self._seed}-{self._number}"),
            output=self._home / "output.txt",
            run=self._folder,
            checkpoints=self._folder / "checkpoints",
            stop=self._stop,
        )

    def _lines(self, name: str) -> list[Mapping[str, Any]]:
        return list(json_lines.read(self._folder / name))

    def _step(self) -> int:
        """The last step that is recorded."""
        return max((line["step"] for line in self._lines("metrics.jsonl")[-1:]), default=0)

    def _attempts(self) -> int:
        return len(json.loads((self._folder / "run.json").read_text())["attempts"])

    def _strike(self, launch: Launch) -> bool:
        """Kill a process, sometimes a second one soon after it, and wait until the run has done a further step; False:
        it does not go on.
        """
        rng = self._rng
        after = ("publish", "load") if self.setup.in_memory else ("publish", "load", "commit", "begin", "visible")
        instant = Instant(rng.choice(after), 1, rng.uniform(0.0, 0.3))
        launch.wait_for(instant, _INSTANT_S)
        done, attempts = self._step(), self._attempts()
        role = rng.choice(ROLES)
        stops = rng.random() < _STOPPED and role in _STANDS_STILL
        struck = self._blow(launch, role, "SIGSTOP" if stops else "SIGKILL", str(instant))
        began = time.monotonic()
        if rng.random() < _SECOND:
            self._stop.wait(delay := rng.uniform(0.3, 8.0))
            struck += self._blow(launch, rng.choice(ROLES), "SIGKILL", f"{delay:.1f} s later")
        if not struck:  # the process was gone
            return launch.code is None and not self._stop.is_set()
        goes_on = self._goes_on(launch, [one.victim for one in struck], attempts)
        kill = struck[-1]
        if goes_on:
            kill.seconds = round(time.monotonic() - began, 2)
            kill.attempts = self._attempts() - attempts
            if kill.attempts:  # else Ray has restarted the process
                self._look(kill, done, attempts)
        elif launch.code != 0 and not self._stop.is_set():
            how = f"ended with {launch.code}" if launch.code is not None else f"did no step within {_GOES_ON_S:g} s"
            kill.problems.append(f"the run {how}: {launch.text[-600:]}")
        return goes_on

    def _blow(self, launch: Launch, role: str, name: str, instant: str) -> list[Kill]:
        """Strike a process; return the kill, or nothing if it was gone."""
        member = self._member(launch, role)
        if member is None:
            return []
        name = "SIGKILL" if member.role == "driver" else name  # nobody restarts a driver that stands still
        if not launch.strike(member, signal.Signals[name]):
            return []
        self.kills.append(Kill(self._seed, self._number, self.setup.name, name, member.role, instant))
        return self.kills[-1:]

    def _goes_on(self, launch: Launch, victims: Sequence[str], attempts: int) -> bool:
        """Wait until a later attempt has done a step; after deaths that may cost none, or until two further steps."""
        deadline, step = time.monotonic() + _GOES_ON_S, self._step()
        within = all(victim in _RESTARTED for victim in victims)
        while time.monotonic() < deadline and not self._stop.is_set() and launch.code is None:
            lines = self._lines("metrics.jsonl")[-1:]
            if any(line["attempt"] >= attempts or (within and line["step"] >= step + 2) for line in lines):
                return True
            time.sleep(0.02)
        return False

    def _look(self, kill: Kill, last: int, attempts: int) -> None:
        """At the steps that are done again: their samples are those of the journal."""
        heals: list[Mapping[str, Any]] = []
        comes_true(lambda: heals.extend(self._heals(attempts)) or heals, _EVENT_S, 0.05)
        if not heals:
            kill.problems.append("there is no heal event")
            return
        kill.lost = heals[-1]["lost"]
        if kill.lost > _MOST_LOST[self.setup.in_memory]:
            kill.problems.append(f"lost: {kill.lost} steps are done again")
        again = [line for line in self._lines("metrics.jsonl") if heals[-1]["resumed_from"] < line["step"] <= last]
        made = sum(_SAMPLES - line.get("samples/journaled", 0) for line in again)
        if made:
            kill.problems.append(f"{made:g} finished samples of {len(again)} steps were made again")

    def _heals(self, attempts: int) -> list[Mapping[str, Any]]:
        events = self._lines("events.jsonl")
        return [event for event in events if event["event"] == "heal" and event["attempt"] >= attempts]

    def _member(self, launch: Launch, role: str) -> Member | None:
        """A process of a role, or the driver if there is none."""
        found, driver = [], None
        for member in launch.members():
            if _parent(member.pid) == launch.pid:
                driver = Member(member.pid, "driver", "driver")
            elif member.role == role and member.pid != launch.pid:
                found.append(member)
        return self._rng.choice(sorted(found, key=lambda one: one.name)) if found else driver

    def _judge(self, code: int | None) -> list[str]:
        """What is wrong with a run that has ended."""
        problems = []
        if (left := states_path(self._folder, Path(DEFAULT_ROOT)).parent).exists():
            problems.append(f"left behind: {left}")
        record = json.loads((self._folder / "run.json").read_text())
        if code != 0 or record["status"] != "completed":
            problems.append(f"the run ended with {code}, {record['status']}: {record.get('error')}")
            return problems
        steps = [line["step"] for line in self._lines("metrics.jsonl")]
        if steps != list(range(1, self._steps + 1)):
            problems.append(f"lost: the steps are {steps}")
        published: dict[int, set[str]] = {}
        for event in self._lines("events.jsonl"):
            if event["event"] == "publish":
                published.setdefault(event["version"], set()).add(event["digest"])
            if event["event"] == "fault" and "journal" in event["where"]:
                problems.append(f"{event['where']}: {event['error']}")
        wrong = [version for version, digests in published.items() if len(digests) > 1]
        if wrong:
            problems.append(f"mislabelled: versions {wrong} have two digests")
        if self.setup.schedule == "lockstep":
            expected = self._references.of(self.setup, self._steps)
            other = [version for version, digests in published.items() if digests != {expected.get(version)}]
            if other or sorted(published) != sorted(expected):
                problems.append(f"mislabelled: versions {other} are not those of the undisturbed run")
        else:
            problems += self._judge_prompts()
        return problems

    def _judge_prompts(self) -> list[str]:
        """Each prompt of a free run that was given out was trained on once, or is left."""
        text = (self._folder / f"checkpoints/global_step_{self._steps}/trainer_state.json").read_text()
        data = json.loads(text)["data"]
        left = len({tuple(group) for group in data["waiting"]})
        epoch, prompt = data["next"]
        given, trained = (epoch - 1) * 4 + prompt - left, 4 * self._steps
        return [] if given == trained else [f"lost: {given} prompts were given out, {trained} were trained on"]


class References:
    """The digests of undisturbed runs, each done once."""

    def __init__(self, home: Path, stop: threading.Event) -> None:
        self._home, self._stop = home, stop
        self._lock = threading.Lock()

    def of(self, setup: Setup, steps: int) -> dict[int, str]:
        """Return the digest of each version. How weights travel does not change them."""
        with self._lock:
            cached = self._home / f"reference-{setup.backend}-{steps}.json"
            if not cached.exists():
                cached.write_text(json.dumps(self._undisturbed(setup, steps)))
            return {int(step): digest for step, digest in json.loads(cached.read_text()).items()}

    def _undisturbed(self, setup: Setup, steps: int) -> dict[int, str]:
        home = self._home / f"reference-{setup.backend}-{steps}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        overrides = [*setup.overrides(steps), "checkpoint.interval=0", f"hydra.run.dir={home / 'run'}"]
        with Launch(
            [str(ROOT / "launch.py"), *overrides],
            mark=processes.own_mark(f"reference-{setup.backend}-{steps}"),
            output=home / "output.txt",
            run=home / "run",
            checkpoints=home / "run/checkpoints",
            stop=self._stop,
        ) as launch:
            launch.wait_end(_START_S)
            if launch.code != 0:
                raise RuntimeError(f"the undisturbed run ended with {launch.code}: {launch.text[-1000:]}")
        events = json_lines.read(home / "run/events.jsonl")
        return {event["version"]: event["digest"] for event in events if event["event"] == "publish"}


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def render(kills: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each role."""
    head = "| SIGKILL or SIGSTOP of | kills | steps done again, most | median s | most s | problems |"
    rows = [head, "|---|---:|---:|---:|---:|---:|"]
    for role in (*ROLES, "all"):
        these = [one for one in kills if role in (one["victim"], "all")]
        seconds = [one["seconds"] for one in these if one["seconds"] is not None and one["signal"] == "SIGKILL"]
        if these:
            middle, most = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
            wrong, lost = sum(bool(one["problems"]) for one in these), max(one["lost"] for one in these)
            rows.append(f"| {role} | {len(these)} | {lost} | {middle:.1f} | {most:.1f} | {wrong} |")
    return "\n".join(rows)


def main() -> int:
    """Exit code 1: something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--chain", type=int, help="this run of the seed only, again")
    parser.add_argument("--each", type=int, default=_KILLS, help="kills of a run")
    parser.add_argument("--out", type=Path, default=Path("outputs/restarts/kills.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    processes.end_orphans()
    stop, lock = threading.Event(), threading.Lock()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    home = options.out.resolve().parent
    for path in home.glob("reference-*.json"):
        path.unlink()  # of other code
    references = References(home, stop)
    numbers = itertools.count() if options.chain is None else iter([options.chain])
    done: list[Kill] = []

    def work() -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
                if number is None or len(done) + 1 > options.kills:
                    return
            chain = Chain(home, options.seed, number, options.each, stop, references)
            began = time.monotonic()
            try:
                kills = chain.run()
            except Exception as error:
                stop.set()
                print(f"chain {number}: {type(error).__name__}: {error}", flush=True)
                raise
            with lock, options.out.open("a") as file:
                done.extend(kills)
                file.writelines(json.dumps(asdict(kill)) + "\n" for kill in kills)
                took = time.monotonic() - began
                print(f"run {number} ({chain.setup.name}): {len(kills)} kills in {took:.0f} s", flush=True)
                for kill in kills:
                    line = f"  {kill.signal} {kill.victim:13} {kill.instant:22} lost {kill.lost} {kill.seconds} s"
                    print("\n    PROBLEM: ".join([line, *kill.problems]), flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
    print(render([asdict(kill) for kill in done]))
    return 1 if stop.is_set() or any(kill.problems for kill in done) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
