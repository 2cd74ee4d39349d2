"""How long a run takes to begin, with processes that are forks and without, and the second job of a sweep.

    python benchmarks/start.py --json --rounds 3

A round is a sweep of two short jobs for each way, one way after the other. Seconds, and processor seconds of all
processes, count from the start of the job to the end of its first step; of the first job they include Ray's start.
Memory is the most that all processes together have had resident at a time, what they share counted once (the sum of
their proportional set sizes), in bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_LOOK_S = 0.2


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("overrides", nargs="*", default=["experiment=quick"], help="overrides for launch.py")
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"forks": [], "no forks": []}
    for _ in range(arguments.rounds):
        for way, found in rounds.items():
            found.append(_sweep([f"cluster.forks={str(way == 'forks').lower()}", *arguments.overrides]))
    results = {
        way: {name: statistics.median(one[name] for one in found) for name in found[0]} for way, found in rounds.items()
    }
    command = f"python benchmarks/start.py --json --rounds {arguments.rounds} {' '.join(arguments.overrides)}"
    said = {"command": command, "cores": os.cpu_count(), "results": results, "rounds": rounds}
    print(json.dumps(said, indent=2) if arguments.json else json.dumps(results, indent=2))


def _sweep(overrides: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch.py"), "-m", "live=off", f"hydra.sweep.dir={folder}"]
        command += ["trainer.steps=3", "seed=0,1", *overrides]
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        most, cpu = 0, None
        metrics = [Path(folder) / job / "metrics.jsonl" for job in ("0", "1")]
        while True:
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(_LOOK_S)
                break
            processes = list(_processes(process))
            most = max(most, sum(map(_share, processes)))
            if cpu is None and metrics[0].exists() and metrics[0].read_bytes():
                cpu = sum(map(_cpu, processes))
        assert process.returncode == 0, command
        return {
            "first_job/first_step_s": _first_step(metrics[0]),
            "first_job/processor_s": cpu or 0.0,
            "second_job/first_step_s": _first_step(metrics[1]),
            "memory_bytes": most,
        }


def _first_step(metrics: Path) -> float:
    began = json.loads((metrics.parent / "run.json").read_text())["started"]
    return float(json.loads(metrics.read_text().splitlines()[0])["time"]) - float(began)


def _processes(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from process.children(recursive=True)


def _share(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


if __name__ == "__main__":
    main()
