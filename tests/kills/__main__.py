"""The command line of the campaign: so many trials, each one line of a JSONL, and a table of all of them."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from tests.e2e.runs import ROOT
from tests.kills import checks, places, processes
from tests.kills.chain import STEPS, Chain
from tests.kills.places import Places
from tests.kills.plan import Setup, draw_plan
from tests.kills.running import SMALL, Launch
from tests.kills.sharing import SharedServer, Stranger
from tests.kills.table import render
from tests.kills.trial import Trial
from trinity_sync.tracking import json_lines

REFERENCE_S = 1800.0


class Campaign:
    """Chains side by side, until there are enough trials.

    Args:
        out: the JSONL, appended to; folders of chains lie beside it.
    """

    def __init__(self, seed: int, out: Path, wanted: int, only: int | None) -> None:
        self._seed, self._out, self._wanted, self._only = seed, out, wanted, only
        self._home = out.with_suffix("")
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._references: dict[str, threading.Lock] = {}
        done = [line for line in json_lines.read(out) if line["seed"] == seed]
        self._next = 1 + max((line["chain"] for line in done), default=-1) if only is None else only
        self._made: list[Trial] = []
        self._mounts = False
        self._server = SharedServer(self._home / "server")
        self._serves = importlib.util.find_spec("vllm") is not None

    def run(self, parallel: int) -> int:
        """Exit code: 0 where every trial passed, 1 where one has not, 130 where it was interrupted."""
        self._home.mkdir(parents=True, exist_ok=True)
        lock = open(self._home / ".lock", "a")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"error: another campaign writes {self._out}; give --out another file", file=sys.stderr)
            return 2
        processes.end_orphans()
        places.remove_orphans(self._home)
        self._mounts = places.can_mount(self._home / "mount")
        possible = {"a full disk": self._mounts, "a vLLM server": self._serves, "a second user": os.geteuid() == 0}
        for what in (what for what, there in possible.items() if not there):
            print(f"skipped: trials with {what}; they need root, or vLLM", flush=True)
        os.environ["XDG_STATE_HOME"] = str(self._home / "state")  # of all runs
        self._machine = places.make_machine(self._home / "machine")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        try:
            self._stranger = Stranger.make(self._home / "stranger", self._stop)
            self._work_beside(parallel)
        finally:
            self._server.close()
            places.remove_orphans(self._home)
        print(render(json_lines.read(self._out)))
        if self._stop.is_set():
            return 130
        return 1 if any(trial.problems for trial in self._made) else 0

    def _work_beside(self, parallel: int) -> None:
        threads = [threading.Thread(target=self._work, name=f"chains-{index}") for index in range(parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if len(self._made) >= self._wanted:
                    return
                number, self._next = self._next, self._next + 1
            try:
                self._one(number)
            except Exception as error:
                self._stop.set()
                print(f"chain {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                raise
            if self._only is not None:
                return

    def _one(self, number: int) -> None:
        plan = draw_plan(self._seed, number, mounts=self._mounts, serves=self._serves)
        home = self._home / f"{self._seed}-{number}"
        shutil.rmtree(home, ignore_errors=True)
        reference = None if plan.setup.free or plan.setup.served else self._reference(plan.setup)
        if self._stop.is_set():
            return
        with self._server.held() if plan.setup.served else contextlib.nullcontext([]) as server:
            began = time.monotonic()
            stranger, machine = self._stranger, self._machine
            chain = Chain(plan, home, reference, self._stop, stranger=stranger, machine=machine, server=server)
            trials = chain.run()
        took = time.monotonic() - began
        with self._lock:
            self._made += trials
            with open(self._out, "a") as file:
                file.writelines(json.dumps(asdict(trial)) + "\n" for trial in trials)
            print(f"chain {number} ({plan.setup.name}): {len(trials)} trials in {took:.0f} s", flush=True)
            for trial in trials:
                self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        what = f"{trial.kind} {trial.victim}".strip()
        print(f"  {trial.outcome:9} {what:20} {trial.instant:28} {trial.noticed[:120]}", flush=True)
        for problem in trial.problems:
            print(f"    PROBLEM: {problem}", flush=True)
        if trial.problems:
            print(f"    again: python -m tests.kills --seed {trial.seed} --chain {trial.chain}; see {trial.folder}")

    def _reference(self, setup: Setup) -> dict[int, str]:
        """Digests of the undisturbed run, made once per engine: how weights travel does not change them."""
        with self._lock:
            lock = self._references.setdefault(setup.backend, threading.Lock())
        with lock:
            cached = self._home / f"reference-{setup.backend}.json"
            if not cached.exists():
                cached.write_text(json.dumps(self._undisturbed(setup)))
            return {int(step): digest for step, digest in json.loads(cached.read_text()).items()}

    def _undisturbed(self, setup: Setup) -> dict[int, str]:
        home = self._home / f"reference-{setup.backend}"
        shutil.rmtree(home, ignore_errors=True)
        spots = Places.make(home, small_disk=False)
        overrides = [
            *SMALL,
            *spots.overrides(),
            f"backend={setup.backend}",
            f"backend.ranks={setup.ranks}",
            f"trainer.steps={STEPS}",
            "checkpoint.interval=0",
        ]
        mark = processes.own_mark(f"reference-{setup.backend}")
        command = [str(ROOT / "launch.py"), *overrides]
        began = time.monotonic()
        try:
            with Launch(
                command,
                mark=mark,
                output=home / "output.txt",
                run=spots.run,
                checkpoints=spots.checkpoints,
                stop=self._stop,
            ) as launch:
                while launch.code is None and time.monotonic() - began < REFERENCE_S and not self._stop.wait(0.2):
                    pass
                if launch.code != 0 and not self._stop.is_set():
                    raise RuntimeError(f"the undisturbed run failed: {checks.error_of(launch.text)}; see {home}")
            events = json_lines.read(spots.run / "events.jsonl")
            print(f"reference of {setup.backend} in {time.monotonic() - began:.0f} s", flush=True)
            return {event["version"]: event["digest"] for event in events if event["event"] == "publish"}
        finally:
            spots.close(remove=False)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="trials to make now")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="chains at a time")
    parser.add_argument("--out", type=Path, default=Path("outputs/kills/trials.jsonl"))
    parser.add_argument("--chain", type=int, help="this chain of the seed only, again")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and do nothing")
    options = parser.parse_args()
    if options.table:
        print(render(json_lines.read(options.out)))
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return Campaign(options.seed, options.out.absolute(), options.trials, options.chain).run(options.parallel)


if __name__ == "__main__":
    sys.exit(main())
