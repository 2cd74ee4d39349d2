"""What grows with a run: the steps behind it, and the checkpoints that it keeps.

    python benchmarks/long_run.py --json [--steps 100000] [--explorers 2] [--kept 1000] [--ranks 2 64] [--output FILE]

`record`: the files of a run of so many steps, whose figures are made up. A process resumes the run (cuts the logs and
reads the state), ends it (summary.json) and writes its report; for each the seconds, and the most memory that the
process took beyond the memory after its imports. `checkpoints`: a folder with so many full checkpoints, for each number
of ranks. `first_s` is the first retention of a process, `retention_s` that of each later version, of which one
checkpoint is new and one is deleted (median of five); `list_s` is `trinity-sync ckpt list`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES = 5


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only output format)")
    parser.add_argument("--steps", type=int, default=100_000, help="of the run (default 100000); 0: none")
    parser.add_argument("--explorers", type=int, default=2, help="of the run (default 2)")
    parser.add_argument("--kept", type=int, default=1000, help="checkpoints in the folder (default 1000); 0: none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64], help="that wrote them (default 2 64)")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # in the process that is measured
    options = parser.parse_args()
    if options.of is not None:
        print(json.dumps(measure_record(options.of, options.steps)))
        return
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/long_run.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        if options.steps:
            write_run(Path(folder, "run"), options.steps, options.explorers)
            command = [sys.executable, __file__, "--of", f"{folder}/run", "--steps", str(options.steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            report["record"] = json.loads(done.stdout.splitlines()[-1])
        for ranks in options.ranks if options.kept else ():
            root = Path(folder, f"checkpoints-{ranks}")
            report[f"checkpoints of {ranks} ranks"] = measure_checkpoints(root, options.kept, ranks)
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


def write_run(folder: Path, steps: int, explorers: int) -> None:
    """Write run.json and the logs of a run that was killed after so many steps."""
    folder.mkdir()
    record = {"status": "running", "attempt": 0, "started": 1e9, "total_steps": steps}
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "events.jsonl").open("w") as events, (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            at, wave, digest = 1e9 + 2.0 * step, 1 + math.sin(step) / 2, f"{step * 0x9E3779B97F4A7C15 % 2**64:032x}"
            common = {"time": at, "attempt": 0, "version": step, "digest": digest}
            sync = {"mode": "memory", "encoding": "full", "bytes_full": 1_240_000_000, "bytes_moved": 1_240_000_000}
            times = {name: wave / 7 for name in ("blocked_s", "digest_s", "sealed_s", "total_s")}
            lines: list[dict[str, Any]] = [{"event": "publish", **common, **sync, **times}]
            for name in (f"explorer-{number}" for number in range(explorers)):
                work = {"explorer": name, "began": at + wave, "total_s": wave / 3}
                lines.append({"event": "load", **common, **work, "paused_s": wave / 9, "bytes": 1_240_000_000})
                lines.append({"event": "generate", "time": at, "attempt": 0, "step": step + 1, "version": step, **work})
            events.writelines(json.dumps(line) + "\n" for line in lines)
            values = {f"actor/figure_{number}": wave * number for number in range(30)}
            parts = {name: wave / 5 for name in ("generate", "train", "stage", "publish", "load", "save", "step")}
            timings = {f"timing/{name}": value for name, value in parts.items()}
            line = {"attempt": 0, "step": step, "time": at, "reward/mean": wave / 2, "loss": wave, **values, **timings}
            metrics.write(json.dumps(line) + "\n")


def measure_record(folder: Path, steps: int) -> dict[str, Any]:
    """Resume, end and report; seconds, and peak memory of each beyond that of the imports, bytes."""
    from rich.console import Console

    from trinity_sync.report import write_report
    from trinity_sync.tracking.recorder import Recorder
    from trinity_sync.tracking.run_record import RunFolder

    sizes = {name: (folder / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl")}
    found: dict[str, Any] = {"steps": steps, **sizes}
    before = peak()

    def timed(name: str, work: Callable[[], object]) -> Any:
        began = time.perf_counter()
        result = work()
        found[f"{name}_s"], found[f"{name}_bytes"] = time.perf_counter() - began, peak() - before
        return result

    with RunFolder.open(folder, resume=True) as opened:
        recorder = timed(
            "resume",
            lambda: Recorder.start(
                opened,
                command="resume",
                seed=7,
                config_digest=None,
                threads=1,
                total_steps=steps,
                resumed_from=steps,
                view="off",
                console=Console(file=io.StringIO()),
            ),
        )
        timed("end", lambda: recorder.finish("completed"))
        timed("report", lambda: write_report(folder))
    return found


def peak() -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_checkpoints(root: Path, kept: int, ranks: int) -> dict[str, Any]:
    """Measure retention and the list of a folder."""
    from trinity_sync.checkpoint.disk import CheckpointDisk
    from trinity_sync.cli.main import main as trinity_sync
    from trinity_sync.protocol.retention import KeepLast

    for step in range(1, kept + 1):
        write_checkpoint(root, step, ranks)
    disk = CheckpointDisk(
        root=root, attempt=0, policies=[KeepLast(kept)], keep_state_dicts=2, fsync=False, clock=time.time
    )
    seconds = []
    for step in range(kept + 1, kept + TIMES + 2):
        began = time.perf_counter()
        pruned, warnings = disk.prune([])
        seconds.append(time.perf_counter() - began)
        assert (len(pruned), warnings) == (len(seconds) > 1, []), (pruned, warnings)
        write_checkpoint(root, step, ranks)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        trinity_sync(["ckpt", "list", str(root)])
    listed = time.perf_counter() - began
    manifest = (root / f"global_step_{kept + 1}" / "manifest.json").stat().st_size
    found = {"kept": kept, "manifest_bytes": manifest, "first_s": seconds[0]}
    return {**found, "retention_s": statistics.median(seconds[1:]), "list_s": listed}


def write_checkpoint(root: Path, step: int, ranks: int) -> None:
    """Make a full checkpoint of empty files."""
    from trinity_sync.checkpoint.folder.contents import Manifest, step_dir, write_manifest
    from trinity_sync.protocol.parts import FULL, FileEntry

    folder, digest = step_dir(root, step), f"{step:032x}"
    names = [
        f"actor/{kind}_rank_{rank}_of_{ranks}.bin" for kind in ("model", "optim", "extra") for rank in range(ranks)
    ]
    (folder / "actor").mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    files = tuple(FileEntry(name, 0, digest) for name in names)
    metrics = {f"figure/{number}": number / 7 for number in range(20)}
    manifest = Manifest(step=step, attempt=0, kind=FULL, created=1e9 + step, metrics=metrics, files=files)
    write_manifest(folder, manifest, durable=False)


if __name__ == "__main__":
    main()
