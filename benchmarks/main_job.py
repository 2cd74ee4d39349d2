"""What a newcomer waits for: the default experiment from start to end, and the answers that need no run. Prints JSON.

    python benchmarks/main_job.py --runs 3 [overrides for launch.py]

Figures are medians over the runs, times in seconds, memory in bytes. `first_step_s` counts from the start of the run
to the end of the first trainer step, `reward_0_9_s` to the end of the first one whose mean reward is 0.9 (null where
there is none), `help_s`, `cfg_s` and `config_error_s` are whole commands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of the experiment (default 3)")
    parser.add_argument("overrides", nargs="*", help="overrides for launch.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(Path(folder) / str(index), arguments.overrides) for index in range(arguments.runs)]
    answers = {
        "help_s": _answers(["--help"], 0),
        "cfg_s": _answers(["--cfg", "job"], 0),
        "config_error_s": _answers(["backend.ranks=zero"], 2),
    }
    command = ["python", "benchmarks/main_job.py", "--runs", str(arguments.runs), *arguments.overrides]
    print(
        json.dumps(
            {
                "command": " ".join(command),
                "cores": os.cpu_count(),
                "median": {name: _median([run[name] for run in runs]) for name in runs[0]} | answers,
                "runs": runs,
            },
            indent=2,
        )
    )


def _run(folder: Path, overrides: list[str]) -> dict[str, Any]:
    began = time.time()
    command = [sys.executable, str(ROOT / "launch.py"), "live=off", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    total = time.time() - began
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "total_s": total,
        "first_step_s": metrics[0]["time"] - began,
        "step_s": statistics.median(line["timing/step"] for line in metrics),
        "train_s": statistics.median(line["timing/train"] for line in metrics),
        "generate_s": statistics.median(line["timing/generate"] for line in metrics),
        "reward_0_9_s": next((line["time"] - began for line in metrics if line["reward/mean"] >= 0.9), None),
        "reward_first": summary["reward_first"],
        "reward_last": summary["reward_last"],
        **{f"peak_rss/{role}": peak for role, peak in summary["peak_memory"].items()},
    }


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _answers(arguments: list[str], code: int) -> float:
    """Median seconds of five calls that need no run."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *arguments], capture_output=True)
        times.append(time.perf_counter() - began)
        assert done.returncode == code, done.stderr.decode()
    return statistics.median(times)


if __name__ == "__main__":
    main()
