"""What a death costs a run that goes on by itself, and what the journal of samples costs one to which nothing happens.

    python benchmarks/heal.py --json [--rounds 3] [--steps 24]
                              [--victims trainer-rank-0 node-agent synchronizer explorer-0]
                              [--output benchmarks/results/heal.json] [overrides of launch.py]

A round has a run with the journal and one without, to which nothing happens, and for each victim a run of which that
process is killed (SIGKILL) once half of the steps are recorded. Figures are medians over the rounds: seconds from the
death to the end of the next step (`total_s` of the `heal` event), steps done again, samples that were not generated
again; of the undisturbed runs seconds per step (a median over the steps but the first two), the most bytes that the
journal had, and those of a checkpoint. `same` says that each version had the digest of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VICTIMS = ("trainer-rank-0", "node-agent", "synchronizer", "explorer-0")
LIMIT_S = 600.0
_LOOK_S = 0.05

Line = dict[str, Any]


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only output format)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, choices=range(8, 1000), default=24, metavar="N", help="(default 24)")
    parser.add_argument("--victims", nargs="+", default=VICTIMS)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    parser.add_argument("overrides", nargs="*", help="for launch.py")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, figures in one_round(Path(folder), options, number).items():
                found.setdefault(name, []).append(figures)
                print(json.dumps({name: figures}), file=sys.stderr)
    medians = {name: {key: over(rounds, key) for key in rounds[0]} for name, rounds in found.items()}
    with_journal, without = medians["journal"], medians["no journal"]
    report = {
        "command": " ".join(["python", "benchmarks/heal.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "medians": medians,
        "journal/step": with_journal["step_s"] / without["step_s"] - 1,
        "journal/checkpoint": with_journal["journal_bytes"] / with_journal["checkpoint_bytes"],
        "rounds": found,
    }
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


def over(rounds: Sequence[dict[str, float]], key: str) -> float:
    """The median of a figure over the rounds; of `same` the least."""
    return (min if key == "same" else statistics.median)(one[key] for one in rounds)


def one_round(folder: Path, options: argparse.Namespace, number: int) -> dict[str, dict[str, float]]:
    """The figures of each run of a round. Runs with and without the journal take turns in coming first."""
    given = (f"trainer.steps={options.steps}", f"checkpoint.interval={options.steps // 4}", *options.overrides)
    found = {}
    settings = [("journal", "samples.journal=true"), ("no journal", "samples.journal=false")]
    for name, more in settings[:: -1 if number % 2 else 1]:
        run = folder / name.replace(" ", "-")
        journal_bytes = watch(run, [*given, more], None, options.steps)
        steps = [line["timing/step"] for line in lines(run, "metrics.jsonl") if line["step"] > 2]
        saved = [event["bytes"] for event in lines(run, "events.jsonl") if is_full(event)]
        found[name] = {
            "step_s": statistics.median(steps),
            "journal_bytes": journal_bytes,
            "checkpoint_bytes": max(saved),
        }
    undisturbed = digests(folder / "journal")
    for victim in options.victims:
        run = folder / victim
        watch(run, given, victim, options.steps)
        heals = [event for event in lines(run, "events.jsonl") if event["event"] == "heal"]
        if len(heals) != 1:
            raise SystemExit(f"the run went on by itself {len(heals)} times after the death of its {victim}")
        heal = heals[0]
        again = sum(line.get("samples/journaled", 0) for line in lines(run, "metrics.jsonl"))
        same = digests(run) == undisturbed
        found[victim] = {"total_s": heal["total_s"], "lost": heal["lost"], "journaled": again, "same": float(same)}
    return found


def watch(run: Path, given: Sequence[str], victim: str | None, steps: int) -> int:
    """Do a run, of which a process is killed after half of the steps; return the most bytes that its journal had."""
    command = [sys.executable, str(ROOT / "launch.py"), "live=off", f"hydra.run.dir={run}", *given]
    log, until, most = run.with_suffix(".log"), time.monotonic() + LIMIT_S, 0
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while process.poll() is None:
            time.sleep(_LOOK_S)
            most = max(most, sum(bytes_of(path) for path in run.glob("journal/*")))
            if (
                victim is not None
                and max((line["step"] for line in lines(run, "metrics.jsonl")), default=0) >= steps // 2
            ):
                os.kill(pid_of(run, victim), signal.SIGKILL)
                victim = None
            if time.monotonic() > until:
                process.kill()
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(log.read_text()[-5000:])
    return most


def bytes_of(path: Path) -> int:
    """The size of a file, which may be gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def pid_of(run: Path, name: str) -> int:
    """The process that writes to a log of the run."""
    log = str(run / "logs" / f"{name}.log")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "fd" / "1").readlink()) == log:
                return int(entry.name)
        except OSError:
            continue
    raise SystemExit(f"no process logs to {log}")


def lines(run: Path, name: str) -> list[Line]:
    """The whole lines of a record of a run."""
    path = run / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def digests(run: Path) -> dict[int, str]:
    """The digest of each version."""
    return {event["version"]: event["digest"] for event in lines(run, "events.jsonl") if event["event"] == "publish"}


def is_full(event: Line) -> bool:
    """Whether a full checkpoint was committed."""
    return bool(event["event"] == "commit" and event["kind"] == "full")


if __name__ == "__main__":
    main()
