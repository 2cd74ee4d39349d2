"""What a version of a real model's shapes costs: `workload=bytes`, by size, explorers and ranks, beside one copy.

    python benchmarks/models.py --json [--only tensors moe lora size explorers ranks] [--rounds 1] [--largest-gb 4]
                                [--output benchmarks/results/models.json]

Runs `launch.py` as a user does, the settings of a round one after the other, round by round. Figures are medians over
the rounds of each run's medians, of the versions after the first. `copies` is publish and load in copies of the bytes
by one thread, whose speed the run measures beside each version. `tensors` is what a tensor costs beyond its bytes, in
one process (`model_tensors.py`). `aims` says what was to be reached, and whether it was; what was not measured is left
out. `make figures` draws what was written to `benchmarks/results/models.json`. Under 8 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model_tensors import measure as measure_tensors

from trinity_sync.tracking.events import read_events
from trinity_sync.tracking.summary import copies_taken

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
LAYER_GB = 0.126
VERSIONS = 4
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
"""A dense model whose layers have 0.126 GB in bf16."""
PARTS = ("tensors", "moe", "lora", "size", "explorers", "ranks")

Point = dict[str, Any]


class Setting(NamedTuple):
    """A run: of which curve, at which value, and what it is told."""

    curve: str
    value: float
    overrides: list[str]


def settings(folder: Path, only: Sequence[str], largest_gb: float) -> Iterator[Setting]:
    """Yield the runs of a round."""
    dense = folder / "dense.json"
    dense.write_text(json.dumps(DENSE))
    published = ROOT / "trinity_sync" / "models" / "published" / "qwen3-30b-a3b.json"
    moe = folder / "moe.json"
    moe.write_text(json.dumps({**json.loads(published.read_text()), "vocab_size": 91_000}))
    if "moe" in only:  # a layer and 91,000 tokens: 2 GB
        yield Setting("moe", 2.0, [f"model.shapes={moe}", "model.layers=1"])
    if "lora" in only:
        yield Setting("lora", 16, ["model.shapes=qwen3-0.6b", "model.lora.rank=16"])
    if "size" in only:
        for layers in (2, 4, 8, 16, 32):
            if layers * LAYER_GB <= largest_gb * 1.05:
                yield Setting("size", layers * LAYER_GB, [f"model.shapes={dense}", f"model.layers={layers}"])
    small = [f"model.shapes={dense}", "model.layers=2"]
    for curve, key, counts in (("explorers", "explorer.replicas", (1, 2, 4, 8)), ("ranks", "backend.ranks", (1, 2, 4))):
        if curve in only:
            for count in counts:
                yield Setting(curve, count, [*small, f"{key}={count}"])


def run(overrides: list[str], folder: Path) -> Point:
    """Run once; return its figures, or why it has none."""
    command = [sys.executable, str(ROOT / "launch.py"), "workload=bytes", "checkpoint.interval=0", "live=off"]
    command += [f"trainer.steps={VERSIONS}", *overrides, f"hydra.run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {LIMIT_S:.0f} s"}
    if done.returncode:
        return {"error": " ".join(done.stderr.split())[-500:] or f"exit {done.returncode}"}
    lines, events = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "events")
    )
    publishes = [event for event in events if event["event"] == "publish" and event["version"]]
    loads = [event for event in events if event["event"] == "load" and event["version"]]
    nbytes = publishes[-1]["bytes_full"]
    publish = statistics.median(event["total_s"] for event in publishes)
    load = statistics.median(event["total_s"] for event in loads)
    return {
        "bytes": nbytes,
        "share": lines[-1]["model/share"],
        "blocked_s": statistics.median(event["blocked_s"] for event in publishes),
        "publish_s": publish,
        "load_s": load,
        "memcpy_gb_s": statistics.median(line["memcpy_gb_s"] for line in lines),
        "copies": statistics.median(copies_taken(lines, read_events(folder / "events.jsonl"))),
        "gb_s": nbytes / (publish + load) / 1e9,
    }


def points(chosen: Sequence[Setting], rounds: int, folder: Path) -> list[Point]:
    """Run all settings, round by round; a point of each."""
    runs: list[list[Point]] = [[] for _ in chosen]
    for turn in range(rounds):
        for index, setting in enumerate(chosen):
            print(f"round {turn + 1}: {setting.curve}, {setting.value:g}", file=sys.stderr)
            runs[index].append(run(setting.overrides, folder / f"{turn}-{index}"))
    found = []
    for setting, of_setting in zip(chosen, runs, strict=True):
        good = [one for one in of_setting if "error" not in one]
        figures = {key: statistics.median(one[key] for one in good) for key in good[0]} if good else of_setting[-1]
        found.append({"curve": setting.curve, "value": setting.value, "runs": len(good), **figures})
    return found


def aims(curves: Sequence[Point], tensors: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What was to be reached, as far as it was measured: value, aim (at most), unit, and whether it holds."""
    found = []

    def aim(what: str, value: float, most: float, unit: str) -> None:
        found.append({"what": what, "value": value, "aim": most, "unit": unit, "holds": value <= most})

    good = [point for point in curves if "error" not in point]
    for point in good:
        if point["curve"] == "moe":
            aim("Qwen3-30B-A3B cut to 2 GB: publish + load", point["copies"], 3.5, "copies")
        if point["curve"] == "lora":
            aim("LoRA of rank 16, 0.6B: bytes of a version", 100 * point["share"], 2, "% of the model")
            aim("LoRA of rank 16, 0.6B: publish + load", 1e3 * (point["publish_s"] + point["load_s"]), 30, "ms")
    if tensors is not None:
        for what, value in tensors["us_a_tensor"].items():
            aim(f"{tensors['tensors']:,} tensors: {what}", value, 3, "us a tensor")
    sizes = [(point["bytes"], point["publish_s"] + point["load_s"]) for point in good if point["curve"] == "size"]
    if len(sizes) > 2:
        aim(f"0.25 to {sizes[-1][0] / 1e9:.2g} GB: farthest from a line", 100 * off_the_line(sizes), 10, "%")
    return found


def off_the_line(sizes: Sequence[tuple[float, float]]) -> float:
    """The largest distance of a time from the straight line that fits best, as a share of the time on the line.

    Args:
        sizes: bytes and seconds of each point. Each counts as much as the others, however long it took.
    """
    weights = [1 / seconds**2 for _, seconds in sizes]
    total = sum(weights)
    mean_x = sum(weight * x for weight, (x, _) in zip(weights, sizes, strict=True)) / total
    mean_y = sum(weight * y for weight, (_, y) in zip(weights, sizes, strict=True)) / total
    slope = sum(weight * (x - mean_x) * (y - mean_y) for weight, (x, y) in zip(weights, sizes, strict=True)) / sum(
        weight * (x - mean_x) ** 2 for weight, (x, _) in zip(weights, sizes, strict=True)
    )
    lines = [mean_y + slope * (x - mean_x) for x, _ in sizes]
    return max(abs(y - line) / line for (_, y), line in zip(sizes, lines, strict=True))


def machine() -> dict[str, Any]:
    """What was measured on."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--largest-gb", type=float, default=4.0)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    begun = machine()
    tensors = measure_tensors() if "tensors" in options.only else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curves = points(list(settings(folder, options.only, options.largest_gb)), options.rounds, folder)
    found = {
        "command": " ".join(["python", "benchmarks/models.py", *sys.argv[1:]]),
        "machine": begun,
        "rounds": options.rounds,
        "aims": aims(curves, tensors),
        "tensors": tensors,
        "curves": curves,
    }
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    if options.json:
        print(text)
        return
    for one in found["aims"]:
        how = "holds" if one["holds"] else "does not hold"
        print(f"{one['what']:55} {one['value']:8.3g} {one['unit']:15} aim {one['aim']:g}: {how}")
    for point in curves:
        print(f"{point['curve']:10} {point['value']:6.3g}  " + (point.get("error") or f"{point['copies']:.2f} copies"))


if __name__ == "__main__":
    main()
