"""What a version costs vLLM, beside vLLM's own reload of the same tensors; and samples per second of both explorers.

    python benchmarks/explorers.py --json [--only own pause spread memory samples] [--megabytes 500] [--rounds 7]
                                   [--updates 100] [--output benchmarks/results/explorers.json]

In one process and vLLM's, without Ray. `own` is memory of the worker's own (anonymous) before the first version and at
most while three are taken. `pause` takes versions in turns with vLLM's `reload_weights` of the same tensors, which lie
in the worker's memory, and gives medians in seconds; `spread` does so with versions in two parts, each of half the rows
of every tensor, as two FSDP ranks leave them. `memory` is what vLLM's processes have resident after a tenth of
the updates and after all of them. `samples` generates for 64 prompts of the default task
with vLLM and with transformers, in turns. `aims` says what was to be reached, and whether it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that a worker can be handed a function
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import psutil
import torch
from safetensors.torch import load_file

from trinity_sync import config
from trinity_sync.explorer.hf import HFEngine
from trinity_sync.explorer.vllm import VLLMEngine
from trinity_sync.host.references import Settings
from trinity_sync.integrations.vllm.control import AsyncControl
from trinity_sync.integrations.vllm.own import EngineWeights
from trinity_sync.integrations.vllm.target import WorkerTarget
from trinity_sync.models.architecture import make_model
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import ExplorerSide, LayoutCache
from trinity_sync.sync.memory import MemoryMode
from trinity_sync.tasks.copy_digits import CopyDigits
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import row_slice
from trinity_sync.weights.slots import SlotArena
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import from_torch, state_digest

DIGITS = config.plain(config.compose([]).model.architecture)
"""The model of the default experiment."""
LAYER_MB = 25.2
PARTS = ("own", "pause", "spread", "memory", "samples")
SETTINGS: dict[str, Any] = {"dtype": "bf16", "temperature": 1.0, "batch_size": 512, "response_length": 3, "seed": 0}

Point = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def large(megabytes: float) -> Settings:
    """A dense model of about so many megabytes in bf16."""
    return DIGITS | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": max(1, round(megabytes / LAYER_MB)),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }


def vllm_of(path: Path) -> VLLMEngine:
    """The engine of an explorer."""
    return VLLMEngine(str(path), **SETTINGS)


def weights_of(engine: VLLMEngine) -> EngineWeights:
    """How it takes versions."""
    return EngineWeights(engine._llm, engine._loop)


class SpreadWeights:
    """Has an engine take versions in two parts, each of half the rows of every tensor."""

    def __init__(self, engine: VLLMEngine, tensors: Tensors) -> None:
        kinds = {name: (from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        self._halves = [
            PartLayout.build(
                f"rank-{number:05d}",
                [
                    row_slice(name, *kind, number * kind[1][0] // 2, (number + 1) * kind[1][0] // 2)
                    for name, kind in kinds.items()
                ],
                4 << 20,
            )
            for number in range(2)
        ]
        sizes = {layout.part: layout.nbytes for layout in self._halves}
        self._arena = SlotArena.create("spread", 1, sizes, fallback=Path(tempfile.gettempdir()))
        layouts = LayoutCache({}, 600.0)
        parts = {}
        for layout in self._halves:
            layouts.learn(layout)
            path = str(self._arena.path(0, layout.part))
            parts[layout.part] = PartInfo(
                part=layout.part, node="here", path=path, nbytes=layout.nbytes, layout=layout.digest, buckets=None
            )
        self._lease = Lease(
            id=0,
            reader="spread",
            version=Version(0, 0),
            slot=0,
            expires=float("inf"),
            parts=parts,
            digest=None,
            location=None,
        )
        side = ExplorerSide(name="spread", node="here", agents={}, layouts=layouts, timeout_s=600.0)
        control = AsyncControl(engine._llm, engine._loop, "vLLM", 600.0)
        self._target = WorkerTarget(
            control,
            workers=1,
            tensors=kinds,
            mode=MemoryMode(),
            side=side,
            verify="full",
            on_update="wait",
            start_timeout_s=600.0,
        )

    def take(self, tensors: Tensors, step: int) -> str:
        """As `EngineWeights.take`."""
        for number, layout in enumerate(self._halves):
            sources = {name: tensor.chunk(2)[number] for name, tensor in tensors.items()}
            stage(layout, sources, self._arena.map(0, layout.part))
        digest = state_digest(tensors, None)
        lease = replace(self._lease, version=Version(0, step), digest=digest)
        self._target.check(lease)
        self._target.take(lease, None, lambda: None)
        return digest

    @property
    def paused_s(self) -> float:
        """As `EngineWeights.paused_s`."""
        return self._target.paused_s

    def close(self) -> None:
        """Let the workers go, and give the memory back."""
        self._target.close()
        self._arena.close()


def reload_in(worker: Any, file: Path) -> float:
    """In a worker: have vLLM load the tensors of a file, which are in memory, by its own means; seconds."""
    if not hasattr(worker, "_tensors"):
        worker._tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    began = time.perf_counter()
    worker.reload_weights(weights_iterator=iter(worker._tensors.items()))
    return time.perf_counter() - began


def anonymous(pid: int) -> int:
    """Bytes of memory of a process's own: what no file and nobody else has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def measure_own(folder: Path, megabytes: float) -> Point:
    """What taking versions costs a worker in memory of its own, looked at every 5 ms."""
    path = make_model(large(megabytes), 0, folder / "own")
    tensors = load_file(path / "model.safetensors")
    engine = vllm_of(path)
    weights = weights_of(engine)
    [worker] = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("VLLM")]
    before, most, done = anonymous(worker.pid), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous(worker.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(3):
        weights.take(tensors, step)
    done.set()
    watcher.join()
    weights.close()
    engine.close()
    whole = sum(tensor.nbytes for tensor in tensors.values())
    found = {"megabytes": whole / 1e6, "before_mb": before / 1e6, "most_mb": most[0] / 1e6}
    return found | {"in_versions": (most[0] - before) / whole}


def measure_pause(folder: Path, megabytes: float, rounds: int, *, spread: bool) -> Point:
    """Versions in turns with vLLM's own reload."""
    path = make_model(large(megabytes), 0, folder / ("spread" if spread else "large"))
    tensors = load_file(path / "model.safetensors")
    engine = vllm_of(path)
    weights = SpreadWeights(engine, tensors) if spread else weights_of(engine)
    paused, taken, reloaded = [], [], []
    for step in range(rounds + 1):
        began = time.perf_counter()
        weights.take(tensors, step)
        whole = time.perf_counter() - began
        own = asyncio.run_coroutine_threadsafe(
            engine._llm.collective_rpc(reload_in, args=(path / "model.safetensors",)), engine._loop
        ).result(600)
        if step:  # the first ones touch memory for the first time
            paused.append(weights.paused_s)
            taken.append(whole)
            reloaded.append(own[0])
    weights.close()
    engine.close()
    return {
        "megabytes": round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, 1),
        "paused_s": statistics.median(paused),
        "take_s": statistics.median(taken),
        "reload_weights_s": statistics.median(reloaded),
        "paused_in_reloads": statistics.median(paused) / statistics.median(reloaded),
        "rounds": rounds,
    }


def resident() -> int:
    """Resident bytes of vLLM's processes."""
    return sum(one.memory_info().rss for one in psutil.Process().children(recursive=True))


def measure_memory(folder: Path, updates: int) -> Point:
    """What many updates leave behind."""
    path = make_model(DIGITS | {"num_hidden_layers": 8}, 0, folder / "small")
    tensors = load_file(path / "model.safetensors")
    engine = vllm_of(path)
    weights = weights_of(engine)
    for step in range(updates // 10):
        weights.take(tensors, step)
    early = resident()
    for step in range(updates // 10, updates):
        weights.take(tensors, step)
    late = resident()
    weights.close()
    engine.close()
    return {"updates": updates, "early_mb": early / 1e6, "late_mb": late / 1e6, "growth_mb": (late - early) / 1e6}


def measure_samples(folder: Path, rounds: int) -> Point:
    """Samples per second of both engines for 64 prompts with 1 and 16 samples each."""
    path = make_model(DIGITS, 0, folder / "digits")
    tensors = load_file(path / "model.safetensors")
    engine, task = vllm_of(path), CopyDigits(2, 0)
    weights = weights_of(engine)
    weights.take(tensors, 0)
    reference = HFEngine(str(path), device="cpu", **SETTINGS)
    for name, tensor in reference.destinations().items():
        tensor.copy_(tensors[name])
    found: Point = {"prompts": 64}
    for count in (1, 16):
        spent: dict[str, list[float]] = {"vllm": [], "hf": []}
        for step in range(rounds + 1):
            prompts = task.prompts(step, 64)
            makers: dict[str, Callable[..., object]] = {"vllm": engine.generate, "hf": reference.generate}
            for name, generate in makers.items():
                began = time.perf_counter()
                generate(prompts, task, step=step, samples_per_prompt=count, version=(0, 0))
                if step:
                    spent[name].append(time.perf_counter() - began)
        for name, seconds in spent.items():
            found[f"{name}_samples_per_s_{count}"] = 64 * count / statistics.median(seconds)
    weights.close()
    engine.close()
    return found


def aims(found: Point) -> list[Point]:
    """What was to be reached of what was measured."""
    told = []
    if "own" in found:
        told.append(_aim("memory of a worker's own, in versions", found["own"]["in_versions"], 0.5))
    if "pause" in found:
        told.append(_aim("paused in vLLM's own reloads", found["pause"]["paused_in_reloads"], 1.3))
    if "spread" in found:
        told.append(_aim("the same, of versions in two parts", found["spread"]["paused_in_reloads"], 1.3))
    if "memory" in found:
        told.append(_aim("growth of memory over the updates, MB", found["memory"]["growth_mb"], 8.0))
    if "samples" in found:
        samples = found["samples"]
        times = samples["vllm_samples_per_s_1"] / samples["hf_samples_per_s_1"]
        told.append({"what": "samples per second in those of hf, 64 prompts", "found": times, "at_least": 5.0})
        told[-1]["reached"] = times >= 5.0
    return told


def _aim(what: str, found: float, at_most: float) -> Point:
    return {"what": what, "found": found, "at_most": at_most, "reached": found <= at_most}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    found: Point = {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        if "own" in options.only:
            found["own"] = measure_own(Path(scratch), options.megabytes)
        if "pause" in options.only:
            found["pause"] = measure_pause(Path(scratch), options.megabytes, options.rounds, spread=False)
        if "spread" in options.only:
            found["spread"] = measure_pause(Path(scratch), options.megabytes, options.rounds, spread=True)
        if "memory" in options.only:
            found["memory"] = measure_memory(Path(scratch), options.updates)
        if "samples" in options.only:
            found["samples"] = measure_samples(Path(scratch), options.rounds)
    found["aims"] = aims(found)
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text if options.json else "\n".join(f"{aim['what']}: {aim['found']:.3g}" for aim in found["aims"]))


if __name__ == "__main__":
    main()
