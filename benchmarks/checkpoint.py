"""What a full checkpoint costs: ours, lazy and eager, beside verl's, torch.save, torch's dcp.async_save and raw limits.

    python benchmarks/checkpoint.py --json [--params 110e6] [--backends fsdp2 fsdp megatron] [--rounds 5] [--folder DIR]
                                    [--ranks 2] [--lost]

With ``--lost`` only the training time that one save costs: the time of the steps with a save, until it is on the disk,
minus the time of as many steps without.

Everything is measured in turn in each round on the same engines: real verl engines with Adam. Times in
seconds, medians and p95 over the rounds. `blocked_s` is how long training stood still (the slowest rank), `one_copy_s`
a single-thread copy of one rank's state between two existing buffers while nothing else runs, `disk_s` a plain write
and fsync of all the bytes by one process. `apart/` is measured with both ranks on one core and the node agent on the
other, all else with every process on any core.

`memory` is the sum over all processes of the run of their proportional share of resident bytes (PSS, slots included):
the most of it during training steps, and the most during a save with steps beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from checkpoint_worker import LIMIT_S, BenchWorker, run_on

from trinity_sync.actors.calls import Call, ended, results
from trinity_sync.actors.rank_client import RankClient, RankInfo
from trinity_sync.config import RunConfig, compose
from trinity_sync.host.hardware import own_modules_found, peak_rss
from trinity_sync.launch import launcher
from trinity_sync.launch.job import Job
from trinity_sync.samples.batch import PairBatch

_SAMPLE_S = 0.05
_HIDDEN, _WIDE = 768, 3072
_PER_LAYER = 4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _WIDE


class BenchJob(Job):
    """Drives the rounds in place of training."""

    worker = BenchWorker
    rounds = 5
    only_lost = False
    place = Path()
    found: dict[str, Any] = {}  # noqa: RUF012 - one run at a time

    def loop(self) -> None:
        """All rounds."""
        self._step = 0
        self._batch = ray.put(_batch(8, 8))
        for _ in range(2):
            self._train()
        if self.only_lost:
            type(self).found = self._rounds(lambda: lost(self))
            return
        with _Memory() as training:
            for _ in range(3):
                self._train()
        with _Memory() as saving:
            self._whole() if self._writes_itself else self._ours()
        state_bytes = self._state_bytes()
        measured = self._rounds(lambda: self._round(sum(state_bytes)))
        type(self).found = {
            "state_bytes": sum(state_bytes),
            "ranks": len(state_bytes),
            "peak_rss": self.actors.peak_memory(),
            "memory": {"training": training.peak, "with_a_save": saving.peak, "more": saving.peak - training.peak},
            **measured,
        }

    def _rounds(self, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
        measured: dict[str, list[float]] = {}
        for number in range(self.rounds + 1):
            for name, value in measure().items():
                if number:  # the first round pays for first use
                    measured.setdefault(name, []).append(value)
            print(f"round {number} of {self.rounds}", file=sys.stderr)
        return {name: _summary(values) for name, values in measured.items()}

    @property
    def _writes_itself(self) -> bool:
        return bool(self._cfg.backend.strategy == "megatron")

    def _state_bytes(self) -> list[int]:
        """Of each rank."""
        if not self._writes_itself:
            return self._call("state_bytes")
        newest = max(self._start.checkpoints.glob("global_step_*"), key=lambda folder: folder.stat().st_mtime)
        written = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        ranks = len(self.actors.trainer.ranks)
        return [written // ranks] * ranks

    def _round(self, nbytes: int) -> dict[str, float]:
        found = {"step_s": statistics.median(self._train() for _ in range(3))}
        each = nbytes // len(self.actors.trainer.ranks)
        found["one_copy_s"] = max(
            ray.get(rank.handle.one_copy.remote(each), timeout=LIMIT_S) for rank in self.actors.trainer.ranks
        )
        found["disk_s"] = _write(self.place / "raw", nbytes)
        found["verl/blocked_s"] = max(self._timed_in_folder("save_with_verl"))
        for lazy in (True, False):
            name = "lazy" if lazy else "eager"
            self._call("set_lazy", lazy)
            ours = self._whole() if self._writes_itself else self._ours()
            found |= {f"{name}/{key}": value for key, value in ours.items()}
        found |= {f"apart/{key}": value for key, value in self._apart().items()}
        if self._writes_itself:
            return found
        found["torch_save/blocked_s"] = max(self._timed_in_folder("save_inline"))
        for kind in ("thread", "process"):
            try:
                times = self._timed_in_folder("save_with_dcp", kind)
            except Exception as error:
                print(f"dcp.async_save ({kind}) failed: {str(error)[:300]}", file=sys.stderr)
                continue
            found[f"dcp_{kind}/blocked_s"] = max(returned for returned, _ in times)
            found[f"dcp_{kind}/total_s"] = max(total for _, total in times)
        return found

    def _whole(self) -> dict[str, float]:
        """One save of a backend that writes by itself, with steps beside it; once more, waited for."""
        self._train()
        began = time.perf_counter()
        folder = self._begin()
        step = self._step
        self._call("save", step, folder)
        beside = [self._train()]
        blocked = max(self._call("save_blocked", step))
        committed = self.actors.monitor.wait_committed(step, 0, LIMIT_S, kind="full")
        while not ended([committed]):
            beside.append(self._train())
        committed.result(LIMIT_S)
        done = time.perf_counter()
        self._call("finish_saves")
        self._train()
        folder = self._begin()
        waited = time.perf_counter()
        self._call("save", self._step, folder)
        self._call("finish_saves")
        written = time.perf_counter() - waited
        self._wait_committed(self._step)
        return {
            "blocked_s": blocked,
            "step_beside_s": statistics.median(beside),
            "synchronous_s": written,
            "write_s": written - blocked,
            "committed_s": done - began,
        }

    def _apart(self) -> dict[str, float]:
        """A lazy save where the node agent has a core for itself, and the ranks share another."""
        cores = sorted(os.sched_getaffinity(0))
        if self._writes_itself or len(cores) < 2:
            return {}
        self._place({cores[0]}, set(cores[1:]))
        self._call("set_lazy", True)
        try:
            steps = {"step_s": statistics.median(self._train() for _ in range(3))}
            return steps | self._beside()
        finally:
            self._place(set(cores), set(cores))

    def _place(self, ranks: set[int], agents: set[int]) -> None:
        """Have the processes run on these cores."""
        self._call("run_on", ranks)
        for agent in self.actors.agents.values():
            run_on(agent.memory().result(LIMIT_S)["pid"], agents)

    def _begin(self) -> str:
        parts = [info.part for info in self.actors.infos]
        return str(self.actors.monitor.begin(self._step, 0, "full", parts, {}).result(LIMIT_S))

    def _ours(self) -> dict[str, float]:
        """One save, with steps beside it."""
        self._train()
        began = time.perf_counter()
        found = self._beside()
        found["committed_s"] = time.perf_counter() - began
        # Once more with nothing beside it, for the writing alone.
        self._train()
        step = self._step
        self._call("save", step, self._begin())
        self._call("finish_saves")
        alone = time.perf_counter()
        self._wait_written()
        found["write_s"] = time.perf_counter() - alone
        self._wait_committed(step)
        return found

    def _beside(self) -> dict[str, float]:
        """One save, and steps until it is committed."""
        step = self._step
        self._call("save", step, self._begin())
        beside = [self._train()]
        blocked = max(self._call("save_blocked", step))
        self._call("finish_saves")
        handed_over = time.perf_counter()
        while not self._written(0):
            beside.append(self._train())
        self._wait_written()
        written = time.perf_counter() - handed_over
        self._wait_committed(step)
        return {
            "blocked_s": blocked,
            "step_with_copy_s": beside[0],
            "step_beside_s": statistics.median(beside[1:] or beside),
            "written_beside_steps_s": written,
        }

    def _wait_committed(self, step: int) -> None:
        self.actors.monitor.wait_committed(step, 0, LIMIT_S, kind="full").result(LIMIT_S)

    def _written(self, timeout_s: float) -> bool:
        calls = [self._agent_call(info, 0.0) for info in self.actors.infos]
        return len(ended(calls, 5)) == len(calls) and all(call.is_answered() for call in calls)

    def _wait_written(self) -> None:
        results([self._agent_call(info, LIMIT_S) for info in self.actors.infos], LIMIT_S)

    def _agent_call(self, info: RankInfo, timeout_s: float) -> Call[None]:
        return self.actors.agents[info.node].wait_state_written(info.part, timeout_s)

    def _train(self) -> float:
        self._step += 1
        began = time.perf_counter()
        self._call("train_step", self._step, self._batch, None)
        return time.perf_counter() - began

    def _timed_in_folder(self, method: str, *arguments: Any) -> list[Any]:
        folder = self.place / method
        folder.mkdir()
        try:
            return self._call(method, str(folder), *arguments)
        finally:
            shutil.rmtree(folder)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        def ask(rank: RankClient) -> Call[Any]:
            return Call(getattr(rank.handle, method).remote(*arguments), rank.who, method)

        return self.actors.trainer.all(ask, LIMIT_S)


class _Memory:
    """The most memory that the run's processes held together while it was open, bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Memory:
        self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._sampler.join()

    def _sample(self) -> None:
        own = f"TRINITY_SYNC_DRIVER={os.getpid()}".encode()
        processes = [path.parent for path in Path("/proc").glob("[0-9]*/environ") if own in _contents(path)]
        while not self._over.wait(_SAMPLE_S):
            self.peak = max(self.peak, sum(map(_share, processes)))


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def _share(process: Path) -> int:
    """Proportional share of resident bytes."""
    lines = _contents(process / "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--params", type=float, default=110e6, help="about how many parameters (default 110e6)")
    parser.add_argument("--backends", nargs="+", default=["fsdp2", "fsdp"], help="default: fsdp2 fsdp")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--lost", action="store_true", help="only the training time that a save costs, all in")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    options = parser.parse_args()
    results = {}
    for backend in options.backends:
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as folder,
            own_modules_found(Path(__file__).resolve().parent),  # the ranks import `checkpoint_worker`
        ):
            results[backend] = _measure(backend, options, Path(folder))
    arguments = f"--params {options.params:g} --backends {' '.join(options.backends)} --rounds {options.rounds}"
    arguments += f" --ranks {options.ranks}" + " --lost" * options.lost
    report = {
        "command": f"python benchmarks/checkpoint.py --json {arguments}",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(report, indent=2))


def _measure(backend: str, options: Any, folder: Path) -> dict[str, Any]:
    pairs = folder / "pairs.jsonl"
    pairs.write_text('{"prompt": "1=", "response": "1"}\n' * 8)
    layers = max(1, round(options.params / _PER_LAYER))
    overrides = [
        "algorithm=sft",
        "task=pairs",
        f"task.path={pairs}",
        f"backend={backend}",
        f"backend.ranks={options.ranks}",
        "live=off",
        "retention=keep_last",
        "retention.policies.keep_last.n=1",
        "checkpoint.timeout_s=600",
        f"model.architecture.hidden_size={_HIDDEN}",
        f"model.architecture.intermediate_size={_WIDE}",
        f"model.architecture.num_hidden_layers={layers}",
        "model.architecture.num_attention_heads=12",
        "model.architecture.num_key_value_heads=12",
        "model.architecture.head_dim=64",
    ]
    BenchJob.rounds, BenchJob.place, BenchJob.only_lost = options.rounds, folder, options.lost
    with contextlib.redirect_stdout(sys.stderr):  # the run's own summary
        code = launcher.run(RunConfig(compose(overrides)), folder / "run", job=BenchJob)
    assert code == 0
    found = BenchJob.found
    if options.lost:
        return {"parameters": layers * _PER_LAYER, "ranks": options.ranks, **found, "ratios": _lost_ratios(found)}
    median = {name: value["median"] for name, value in found.items() if isinstance(value, dict) and "median" in value}
    best = "lazy" if "lazy/blocked_s" in median else "eager"
    ratios = {
        "eager blocked / one copy": median["eager/blocked_s"] / median["one_copy_s"],
        f"{best} blocked / one copy": median[f"{best}/blocked_s"] / median["one_copy_s"],
        f"verl blocked / {best} blocked": median["verl/blocked_s"] / median[f"{best}/blocked_s"],
        "step beside a save / step": median[f"{best}/step_beside_s"] / median["step_s"],
        **(
            {
                "apart: step beside a save / step": median["apart/step_beside_s"] / median["apart/step_s"],
                "apart: step with the copy / step": median["apart/step_with_copy_s"] / median["apart/step_s"],
                "apart: blocked / one copy": median["apart/blocked_s"] / median["one_copy_s"],
            }
            if "apart/step_s" in median
            else {}
        ),
        "plain write / background write": median["disk_s"] / median[f"{best}/write_s"],
        "memory more with a save / state": found["memory"]["more"] / found["state_bytes"],
    }
    if f"{best}/synchronous_s" in median:
        ratios["synchronous / blocked"] = median[f"{best}/synchronous_s"] / median[f"{best}/blocked_s"]
    return {"parameters": layers * _PER_LAYER, "driver_peak_rss": peak_rss(), **found, "ratios": ratios}


# The training time that one save costs.


_STEPS = 2
"""With a save, at least; each time as many without come before."""


def lost(job: BenchJob) -> dict[str, float]:
    """One round: each way to save in turn, after steps without a save.

    Returns:
        ``step_s`` and for each way the seconds of training lost, of steps with it, and their number.
    """
    found: dict[str, float] = {}
    alone: list[float] = []
    for name, save in _ways(job).items():
        before = [job._train() for _ in range(_STEPS)]
        alone += before
        began = time.perf_counter()
        is_durable, clean_up = save()
        steps = 0
        while steps < _STEPS or not is_durable():
            job._train()
            steps += 1
        seconds = time.perf_counter() - began
        clean_up()
        found[f"{name}/with_save_s"], found[f"{name}/steps"] = seconds, steps
        found[f"{name}/lost_s"] = seconds - steps * statistics.mean(before)
        told = ", ".join(f"{one:.2f}" for one in before)
        print(f"{name}: {seconds:.2f} s for {steps} steps, alone {told}", file=sys.stderr)
    return {"step_s": statistics.median(alone), **found}


_Begun = tuple[Callable[[], bool], Callable[[], object]]
"""What tells whether a save is on the disk, and what ends it."""
_Save = Callable[[], _Begun]
"""Begins a save."""


def _ways(job: BenchJob) -> dict[str, _Save]:
    def ours() -> _Begun:
        step = job._step
        job._call("save", step, job._begin())
        committed = job.actors.monitor.wait_committed(step, 0, LIMIT_S, kind="full")
        return lambda: bool(ended([committed])), lambda: committed.result(LIMIT_S)

    def verls(fsync: bool) -> _Save:
        def save() -> _Begun:
            folder = job.place / "verl"
            folder.mkdir()
            job._call("save_with_verl", str(folder), fsync)
            return lambda: True, lambda: shutil.rmtree(folder)

        return save

    def dcps() -> _Begun:
        folder = job.place / "dcp"
        folder.mkdir()
        job._call("begin_with_dcp", str(folder), "thread")
        return lambda: all(job._call("end_with_dcp", 0.0)), lambda: shutil.rmtree(folder)

    ways = {"ours": ours, "verl": verls(True), "verl_without_fsync": verls(False)}
    return ways if job._writes_itself else {**ways, "dcp_async": dcps}


def _lost_ratios(found: dict[str, Any]) -> dict[str, float]:
    ours, verl, step = (found[name]["median"] for name in ("ours/lost_s", "verl/lost_s", "step_s"))
    return {"ours / verl": ours / verl, "ours / step": ours / step}


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": float(np.quantile(values, 0.95))}


def _batch(sequences: int, tokens: int) -> PairBatch:
    draw = np.random.default_rng(1)
    rows = [draw.integers(3, 25, tokens // 2).tolist() for _ in range(2 * sequences)]
    return PairBatch.of(rows[:sequences], rows[sequences:])


def _write(path: Path, nbytes: int) -> float:
    piece = np.ones(1 << 20, np.uint8).data
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes >> 20):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
