"""What it costs to bring new weights to the explorers, in every sync mode, beside raw limits and what others do.

    python benchmarks/sync.py --json [--model qwen3-8b] [--params 300e6] [--modes memory checkpoint nccl fleet ...]
                              [--backends staged] [--rounds 7] [--ranks 2] [--output FILE]

Real synchronizer, node agent, monitor, slots, transports and loads; the trainer's ranks hold fp32 weights and stage
them as FSDP2's would, but have no engine (`--backends fsdp2` runs a real one as well, and reads its run's events).
Weights travel in bf16. All ways are measured in turn in each round; times in seconds, medians and p95 over the rounds.
`one_copy_s` is a single-thread copy of the wire bytes between two buffers that exist, measured in every round.

Modes: memory (with Trinity 0.6's way beside it), checkpoint (write, map and read beside it), nccl (over gloo; a raw
broadcast beside it), fleet (four explorers), small (many small tensors; a broadcast for each beside it), growth (200
syncs, memory), control (512 ranks, 64 nodes, 64 explorers, no bytes: a sync and a save).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
from sync_members import LIMIT_S, BenchExplorer, Holder, Rank, Shapes, layout_of, memory

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call, results
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.checkpoint.monitor import MonitorConfig
from trinity_sync.launch.local_ray import start_ray
from trinity_sync.protocol.parts import CommitMeta, PartInfo, part_name
from trinity_sync.protocol.versions import Version, VersionBook
from trinity_sync.sync import Synchronizer, SynchronizerConfig
from trinity_sync.sync.base import TrainerSide
from trinity_sync.sync.checkpoint import CheckpointPublisher
from trinity_sync.sync.memory import MemoryPublisher
from trinity_sync.sync.nccl import NcclPublisher
from trinity_sync.sync.node_agent import AgentConfig, NodeAgent
from trinity_sync.tracking.events import Event
from trinity_sync.trainer.full_saves import SaveSettings, WeightSaves

MODES = ("memory", "checkpoint", "nccl", "fleet", "small", "growth", "control")
BUCKET_BYTES = 16 << 20  # conf/base/sync.yaml

_WARM = 3
"""Rounds that do not count: first use of everything, and until checkpoints are removed as fast as they are written."""

#: hidden size, width of the MLP, query heads, key and value heads, layers, vocabulary; heads of 128
MODELS = {
    "qwen3-0.6b": (1024, 3072, 16, 8, 28, 151_936),
    "qwen3-1.7b": (2048, 6144, 16, 8, 28, 151_936),
    "qwen3-8b": (4096, 12_288, 32, 8, 36, 151_936),
}


def shapes_of(model: str, params: float | None) -> dict[str, tuple[int, ...]]:
    """The tensors of a model; with `params` its first layers only, about so many parameters and no embedding."""
    hidden, wide, heads, groups, layers, vocabulary = MODELS[model]
    shapes: dict[str, tuple[int, ...]] = {} if params else {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        if params and sum(map(prod, shapes.values())) >= params:
            break
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (heads * 128, hidden),
            f"{prefix}.self_attn.k_proj.weight": (groups * 128, hidden),
            f"{prefix}.self_attn.v_proj.weight": (groups * 128, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * 128),
            f"{prefix}.self_attn.q_norm.weight": (128,),
            f"{prefix}.self_attn.k_norm.weight": (128,),
            f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}.mlp.up_proj.weight": (wide, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, wide),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,)}


class Fleet:
    """A trainer, a node agent and explorers, all on this node.

    Args:
        shapes: of the model.
        ranks: of the trainer.
        explorers: how many.
        folder: for checkpoints.
        slots: snapshots.
    """

    _numbers = itertools.count()

    def __init__(self, shapes: Shapes, *, ranks: int, explorers: int, folder: Path, slots: int = 2) -> None:
        name = f"bench-{os.getpid()}-{next(self._numbers)}"
        self.wire_bytes = sum(2 * prod(shape) for shape in shapes.values())
        self.synchronizer = Synchronizer.get_actor(
            SynchronizerConfig(slots=slots, lease_s=LIMIT_S, timeout_s=LIMIT_S), namespace=name
        )
        self.node = str(ray.get_runtime_context().get_node_id())
        config = AgentConfig(
            run_key=name,
            slots=slots,
            root="/dev/shm",
            fallback=str(folder / "slots"),
            verify="full",
            nodes=1,
            threads=max(1, (os.cpu_count() or 2) // 2),
        )
        actor = ray.remote(NodeAgent).options(num_cpus=0, max_concurrency=1000)
        self.agent = AgentClient(actor.remote(config, self.synchronizer.client, None), self.node)
        layouts = [layout_of(part_name(rank), rank, ranks, shapes, BUCKET_BYTES) for rank in range(ranks)]
        self.parts = [layout.part for layout in layouts]
        paths = self.agent.register({layout.part: layout for layout in layouts}).result(LIMIT_S).paths
        self.ranks = {
            f"trainer rank {rank}": ray.remote(Rank).options(num_cpus=0).remote(layout, rank)
            for rank, layout in enumerate(layouts)
        }
        attached = [
            handle.attach.remote(self.agent, {slot: files[part] for slot, files in paths.items()})
            for handle, part in zip(self.ranks.values(), self.parts, strict=True)
        ]
        self.rank_before = dict(zip(self.ranks, ray.get(attached, timeout=LIMIT_S), strict=True))
        self.explorers = {
            f"explorer-{index}": ray.remote(BenchExplorer)
            .options(num_cpus=0)
            .remote(f"explorer-{index}", self.synchronizer.client, {self.node: self.agent}, shapes)
            for index in range(explorers)
        }
        self.explorer_before = self.all(self.explorers, "memory")
        side = TrainerSide(
            synchronizer=self.synchronizer.client,
            agents={self.node: self.agent},
            ranks=[RankClient(handle, rank) for rank, handle in enumerate(self.ranks.values())],
            timeout_s=LIMIT_S,
        )
        self.monitor = CheckpointMonitor.get_actor(name, None, str(folder / name), config=MonitorConfig(fsync=False))
        settings = SaveSettings(attempt=0, seed=0, meta=_META, ranks=self.parts, save_timeout_s=LIMIT_S)
        store = WeightSaves(MonitorClient(self.monitor), settings, cast("Any", _Silent()), durable=False)
        self.modes: dict[str, Any] = {
            "memory": MemoryPublisher(side),
            "checkpoint": CheckpointPublisher(side, store, durable=False),
            "nccl": NcclPublisher(side, "gloo"),
        }
        self._steps = itertools.count()
        self._raw: Any = None

    def all(self, members: dict[str, Any], method: str, *args: Any) -> dict[str, Any]:
        """Call a method on all."""
        calls: list[Call[Any]] = [
            Call(getattr(one, method).remote(*args), name, method) for name, one in members.items()
        ]
        return dict(zip(members, results(calls, LIMIT_S), strict=True))

    def stage(self) -> tuple[Any, dict[str, float]]:
        """As the training loop does it: begin, stage on all ranks, wait until sealed."""
        began = time.perf_counter()
        version = Version(0, next(self._steps))
        slot = self.synchronizer.client.begin(version, self.parts, LIMIT_S).result(LIMIT_S)
        blocked = self.all(self.ranks, "stage", version, slot)
        staged = time.perf_counter()
        sealed = self.synchronizer.client.wait_sealed(version, LIMIT_S).result(LIMIT_S)
        ended = time.perf_counter()
        return sealed, {"blocked_s": max(blocked.values()), "stage_s": staged - began, "seal_s": ended - staged}

    def sync(self, mode: str, verify: str = "full", explorers: int = 1) -> dict[str, float]:
        """One version to the first explorers, end to end."""
        chosen = dict(itertools.islice(self.explorers.items(), explorers))
        self.all(chosen, "use", mode, verify)
        clients = {name: ExplorerClient(handle, name) for name, handle in chosen.items()}
        self.all(self.ranks, "change")
        began = time.perf_counter()
        sealed, found = self.stage()
        published = time.perf_counter()
        self.modes[mode].publish(sealed)
        committed = time.perf_counter()
        reports = self.modes[mode].deliver(clients, sealed.version).reports
        ended = time.perf_counter()
        assert len(reports) == explorers
        assert all(report.digest == (sealed.digest if verify == "full" else None) for report in reports)
        return {
            **found,
            "publish_s": committed - published,
            "deliver_s": ended - committed,
            "load_s": max(report.total_s for report in reports),
            "total_s": ended - began,
        }

    def one_copy(self) -> float:
        """Of the wire bytes, in the first explorer."""
        return float(ray.get(next(iter(self.explorers.values())).one_copy.remote(), timeout=LIMIT_S))

    def trinity(self, holder: Any) -> dict[str, float]:
        """Trinity 0.6: a dict of tensors into an actor, and out again."""
        rank, explorer = next(iter(self.ranks.values())), next(iter(self.explorers.values()))
        ray.get(rank.prepare_state.remote(), timeout=LIMIT_S)
        began = time.perf_counter()
        put = ray.get(rank.hand_over.remote(holder, 1), timeout=LIMIT_S)
        got = ray.get(explorer.fetch.remote(holder), timeout=LIMIT_S)
        return {"put_s": put, "get_s": got, "total_s": time.perf_counter() - began}

    def open_raw(self) -> None:
        """A group of the first rank and the first explorer for plain broadcasts."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._raw = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        pair = [next(iter(self.ranks.values())), next(iter(self.explorers.values()))]
        calls = [one.open_raw.remote(host, self._raw.port, index, 2) for index, one in enumerate(pair)]
        ray.get(calls, timeout=LIMIT_S)

    def raw(self, sending: str, receiving: str, *args: Any) -> float:
        """Both ends of something over that group; seconds until both are done."""
        rank, explorer = next(iter(self.ranks.values())), next(iter(self.explorers.values()))
        calls = [getattr(rank, sending).remote(*args), getattr(explorer, receiving).remote(*args)]
        seconds: list[float] = ray.get(calls, timeout=LIMIT_S)
        return max(seconds)

    def memory(self) -> dict[str, dict[str, int]]:
        """Of all processes."""
        agent = self.agent.memory().result(LIMIT_S)
        control = {
            "synchronizer": self.synchronizer.client.memory().result(LIMIT_S),
            "monitor": ray.get(self.monitor.memory.remote(), timeout=LIMIT_S),
        }
        return {
            **self.all(self.ranks, "memory"),
            **self.all(self.explorers, "memory"),
            "node agent": {"peak": agent["peak_rss"], **_status(agent["pid"])},
            **{
                name: {"peak": found["peak_rss"], **(_status(found["pid"]) if "pid" in found else {})}
                for name, found in control.items()
            },
        }

    def close(self) -> None:
        """End all processes and give the shared memory back."""
        self.agent.close().result(LIMIT_S)
        members = (*self.ranks.values(), *self.explorers.values())
        for one in (*members, self.agent.handle, self.monitor, self.synchronizer.actor):
            ray.kill(one)


_META: CommitMeta = {"backend": "staged", "world_size": 1, "config_digest": "0" * 32}


class _Silent:
    def event(self, event: Event) -> None:
        pass

    def fault(self, where: str, error: BaseException | str) -> None:
        print(f"{where}: {error}", file=sys.stderr)

    def saving(self, step: int) -> None:
        pass


def _status(pid: int) -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    kept = {"VmRSS": "rss", "RssAnon": "private", "RssShmem": "shared"}
    return {name: int(lines[key].split()[0]) << 10 for key, name in kept.items()}


# ---- what is measured


class Rounds:
    """Times by name, over rounds; the first round pays for first use and does not count."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, prefix: str, found: dict[str, float] | float) -> None:
        """One round's."""
        for name, value in found.items() if isinstance(found, dict) else [("", found)]:
            self._values.setdefault(f"{prefix}/{name}".rstrip("/"), []).append(value)

    def forget(self) -> None:
        """The first round."""
        self._values.clear()

    def summary(self) -> dict[str, dict[str, float]]:
        """Median and p95 of each."""
        return {name: _summary(values) for name, values in self._values.items()}


def measure_bytes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The modes that move a whole model."""
    shapes = shapes_of(options.model, options.params)
    modes = set(options.modes)
    fleet = Fleet(shapes, ranks=options.ranks, explorers=4 if "fleet" in modes else 1, folder=folder)
    whole = Fleet(shapes, ranks=1, explorers=1, folder=folder) if modes & {"memory", "nccl"} else None
    rounds = Rounds()
    try:
        if whole is not None:
            whole.open_raw()
            holder = ray.remote(Holder).options(num_cpus=0).remote()
        memory_found = _memory_of_a_sync(fleet) if "memory" in modes else {}
        for number in range(options.rounds + _WARM):
            rounds.add("one_copy_s", fleet.one_copy())
            if "memory" in modes:
                rounds.add("memory", fleet.sync("memory"))
                rounds.add("memory/verify=off", fleet.sync("memory", "off"))
                assert whole is not None
                rounds.add("memory/one rank", whole.sync("memory"))
                if number < _WARM + 3:  # seconds each
                    rounds.add("trinity 0.6", whole.trinity(holder))
            if "fleet" in modes:
                rounds.add("fleet/alone", fleet.sync("memory"))
                rounds.add("fleet/four", fleet.sync("memory", explorers=4))
            if "checkpoint" in modes:
                rounds.add("checkpoint", fleet.sync("checkpoint"))
                rounds.add("checkpoint/raw", _write_and_read(folder, number, fleet.wire_bytes))
            if "nccl" in modes:
                assert whole is not None
                rounds.add("nccl/raw_s", whole.raw("raw_broadcast", "raw_broadcast", fleet.wire_bytes))
                rounds.add("nccl/verify=off", whole.sync("nccl", "off"))
                rounds.add("nccl", whole.sync("nccl"))
                rounds.add("nccl/two ranks", fleet.sync("nccl"))
            if number < _WARM:
                rounds.forget()
            print(f"round {number - _WARM + 1} of {options.rounds}", file=sys.stderr)
    finally:
        fleet.close()
        if whole is not None:
            whole.close()
    found: dict[str, Any] = rounds.summary()
    found["memory of a sync"] = memory_found
    return {"wire_bytes": fleet.wire_bytes, "tensors": len(shapes), **found, "ratios": _ratios(found, modes)}


def _ratios(found: dict[str, Any], modes: set[str]) -> dict[str, float]:
    def median(name: str) -> float:
        return float(found[name]["median"])

    one = median("one_copy_s")
    ratios = {}
    if "memory" in modes:
        ratios["memory: publish + load / copy (<= 4)"] = median("memory/total_s") / one
        ratios["memory, one rank: publish + load / copy (<= 4)"] = median("memory/one rank/total_s") / one
        ratios["memory, verify=off: publish + load / copy"] = median("memory/verify=off/total_s") / one
        ratios["memory: blocked / copy (<= 2)"] = median("memory/blocked_s") / one
        ratios["memory, one rank: blocked / copy (<= 2)"] = median("memory/one rank/blocked_s") / one
        ratios["trinity 0.6 / memory (>= 20)"] = median("trinity 0.6/total_s") / median("memory/total_s")
    if "fleet" in modes:
        alone = median("fleet/alone/load_s")
        cores = min(os.cpu_count() or 1, 4)
        ratios["four loads / (4 loads / cores) (<= 1.2)"] = median("fleet/four/load_s") / (4 * alone / cores)
    if "checkpoint" in modes:
        raw = median("checkpoint/raw/total_s")
        ratios["checkpoint: all / (write + map and read) (<= 1.5)"] = median("checkpoint/total_s") / raw
    if "nccl" in modes:
        raw = median("nccl/raw_s")
        ratios["nccl: raw broadcast / buckets, verify=off (>= 0.85)"] = raw / median("nccl/verify=off/deliver_s")
        ratios["nccl: raw broadcast / all, verify=full (>= 0.6)"] = raw / median("nccl/total_s")
    return ratios


def _memory_of_a_sync(fleet: Fleet) -> dict[str, Any]:
    """Peaks over three syncs, less what was resident before the first: of it private, and shared with the slots."""
    fleet.all(fleet.explorers, "reset_peak")
    fleet.all(fleet.ranks, "reset_peak")
    for _ in range(3):
        fleet.sync("memory", explorers=len(fleet.explorers))
    after = fleet.memory()
    found = {}
    for name, before in {**fleet.rank_before, **fleet.explorer_before}.items():
        now = after[name]
        found[name] = {
            "peak_delta": now["peak"] - before["rss"],
            "of it slots": now["shared"] - before["shared"],
            "private_delta": now["peak"] - before["rss"] - (now["shared"] - before["shared"]),
        }
    slots = 2 * fleet.wire_bytes
    found["node agent"] = {**after["node agent"], "slots": slots}
    return {**found, "synchronizer": after["synchronizer"], "monitor": after["monitor"]}


def measure_small(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Many small tensors."""
    shapes = {f"layers.{index}.weight": (8, 1024) for index in range(4000)}
    fleet = Fleet(shapes, ranks=1, explorers=1, folder=folder)
    rounds = Rounds()
    try:
        fleet.open_raw()
        ray.get(next(iter(fleet.ranks.values())).prepare_state.remote(), timeout=LIMIT_S)
        for number in range(options.rounds + 1):
            rounds.add("each_s", fleet.raw("broadcast_each", "receive_each"))
            rounds.add("nccl", fleet.sync("nccl"))
            if not number:
                rounds.forget()
    finally:
        fleet.close()
    found = rounds.summary()
    each = found["each_s"]["median"]
    ratios = {
        "a broadcast per parameter / nccl, end to end (>= 10)": each / found["nccl/total_s"]["median"],
        "a broadcast per parameter / nccl, delivery (>= 10)": each / found["nccl/deliver_s"]["median"],
    }
    return {"wire_bytes": fleet.wire_bytes, "tensors": len(shapes), **found, "ratios": ratios}


def measure_growth(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Private memory of every process over 200 syncs of a small model, half of them behind a reader that does not go
    on.
    """
    shapes = shapes_of("qwen3-0.6b", 15e6)
    fleet = Fleet(shapes, ranks=2, explorers=2, folder=folder, slots=3)
    try:
        samples = {}
        held = None
        for number in range(1, options.syncs + 1):
            if number == options.syncs // 2:
                newest = fleet.synchronizer.client.newest().result(LIMIT_S)
                assert newest is not None
                held = ray.get(fleet.explorers["explorer-1"].stop_reading.remote(tuple(newest)), timeout=LIMIT_S)
            fleet.sync("memory")
            if number in (options.syncs // 10, options.syncs // 2, options.syncs):
                samples[number] = {name: found.get("private", found["peak"]) for name, found in fleet.memory().items()}
        assert held is not None
        first, *_, last = samples.values()
        grown = {name: last[name] - first[name] for name in last}
        return {
            "wire_bytes": fleet.wire_bytes,
            "syncs": options.syncs,
            "private": samples,
            "grown": grown,
            "ratios": {"most grown, MiB (about 0)": max(grown.values()) / 2**20},
        }
    finally:
        fleet.close()


def measure_control(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A commit with 512 ranks on 64 nodes: begin, parts, digest, commit; the explorers wait for it, and then each takes
    a lease and ends it. A save: each rank starts and ends its part, the driver waits for the commit.
    """
    nodes, ranks, explorers = 64, 512, options.control_explorers
    parts = [part_name(rank) for rank in range(ranks)]

    def info(rank: int) -> PartInfo:
        path = f"/dev/shm/trinity-sync/run/slot-0/{parts[rank]}"
        return PartInfo(
            part=parts[rank],
            node=f"{rank % nodes:056x}",
            path=path,
            nbytes=1 << 30,
            layout=f"{rank:032x}",
            buckets=None,
        )

    by_node = [{parts[rank]: info(rank) for rank in range(node, ranks, nodes)} for node in range(nodes)]
    digest = "0" * 32
    book = VersionBook(2, time.monotonic)
    synchronizer = Synchronizer.get_actor(SynchronizerConfig(timeout_s=LIMIT_S), namespace=f"control-{os.getpid()}")
    actor = synchronizer.actor
    rounds = Rounds()
    for step in range(options.rounds + 1):
        version = Version(0, step)
        began = time.perf_counter()
        book.open(version, parts)
        for report in by_node:
            book.stage(version, report)
        book.digest(version, digest)
        book.commit(version)
        committed = time.perf_counter()
        for lease in [book.lease(f"explorer-{index}", 60.0) for index in range(explorers)]:
            book.release(lease.id)
        rounds.add("state machine", {"commit_s": committed - began, "total_s": time.perf_counter() - began})

        began = time.perf_counter()
        waiting = [actor.wait_newer.remote(Version(0, step - 1), LIMIT_S) for _ in range(explorers)]
        ray.get(actor.begin.remote(version, parts, LIMIT_S), timeout=LIMIT_S)
        sealed = actor.wait_sealed.remote(version, LIMIT_S)
        reports = [actor.staged.remote(version, report) for report in by_node]
        reports.append(actor.digested.remote(version, digest))
        ray.get([*reports, sealed], timeout=LIMIT_S)
        ray.get(actor.commit.remote(version), timeout=LIMIT_S)
        ray.get(waiting, timeout=LIMIT_S)
        committed = time.perf_counter()
        leases = ray.get([actor.lease.remote(f"explorer-{i}", version) for i in range(explorers)], timeout=LIMIT_S)
        ray.get([actor.release.remote(lease.id) for lease in leases], timeout=LIMIT_S)
        rounds.add("actor", {"commit_s": committed - began, "total_s": time.perf_counter() - began})
        if not step:
            rounds.forget()
    ray.kill(actor)
    config = MonitorConfig(timeout_s=LIMIT_S, fsync=False)
    monitor = CheckpointMonitor.get_actor(
        f"control-{os.getpid()}", default_local_dir=str(folder / "saves"), config=config
    )
    for step in range(1, options.rounds + 2):
        took = _save(monitor, step, parts, nodes)
        if step > 1:  # the first round does not count
            rounds.add("save/total_s", took)
    ray.kill(monitor)
    found = rounds.summary()
    ratios = {
        "sync, seconds (at most 0.15)": found["actor/total_s"]["median"],
        "save, seconds (at most 0.3)": found["save/total_s"]["median"],
    }
    return {"ranks": ranks, "nodes": nodes, "explorers": explorers, **found, "ratios": ratios}


def _save(monitor: Any, step: int, parts: list[str], nodes: int) -> float:
    """Save a step whose ranks report a file of a few bytes each; return the seconds until the commit."""
    place = Path(ray.get(monitor.begin.remote(step, 0, "full", [*parts, "digest"]), timeout=LIMIT_S))
    (place / "actor").mkdir()
    entries = [(f"actor/{part}", 1, "0" * 32) for part in parts]
    for path, *_ in entries:
        (place / path).write_bytes(b"x")
    began = time.perf_counter()
    writers = [(f"{rank % nodes:056x}", str(rank), part) for rank, part in enumerate(parts)]
    started = [
        monitor.notify_started.remote(node, job, step=step, part=part, attempt=0, ticket=f"{step}-{job}", life=job)
        for node, job, part in writers
    ]
    ray.get(started, timeout=LIMIT_S)
    finished = [
        monitor.notify_finished.remote(step, part=part, attempt=0, files=[entry], ticket=f"{step}-{job}")
        for (_, job, part), entry in zip(writers, entries, strict=True)
    ]
    finished.append(monitor.notify_finished.remote(step, part="digest", attempt=0, files=[], digest="0" * 32))
    ray.get([*finished, monitor.wait_committed.remote(step, 0, LIMIT_S)], timeout=LIMIT_S)
    return time.perf_counter() - began


def measure_engine(backend: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A real run for each mode, as a user would start it: what its own events say."""
    from trinity_sync.config import RunConfig, compose
    from trinity_sync.launch import launcher

    found: dict[str, Any] = {}
    modes = [mode for mode in ("memory", "checkpoint", "nccl") if mode in options.modes]
    runs = [(mode, mode, "lockstep") for mode in modes]
    runs += [("memory, free", "memory", "free")] if "memory" in modes else []
    for name, mode, schedule in runs:
        overrides = [
            f"backend={backend}",
            f"sync={mode}",
            f"trainer.schedule={schedule}",
            f"trainer.steps={options.rounds + 1}",
            "algorithm.prompts_per_step=8",
            "algorithm.samples_per_prompt=4",
            "live=off",
            "model.architecture.hidden_size=1024",
            "model.architecture.intermediate_size=3072",
            "model.architecture.num_hidden_layers=12",
            "model.architecture.num_attention_heads=16",
            "model.architecture.num_key_value_heads=8",
            "model.architecture.head_dim=64",
        ]
        run = folder / f"{backend}-{mode}-{schedule}"
        with contextlib.redirect_stdout(sys.stderr):
            code = launcher.run(RunConfig(compose(overrides)), run)
        assert code == 0, f"{backend} with {name} ended with {code}"
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        publishes = [event for event in events if event["event"] == "publish"][1:]
        loads = [event for event in events if event["event"] == "load" and event["version"] > 0]
        found[name] = {
            "wire_bytes": publishes[0]["bytes_full"],
            "blocked_s": _summary([event["blocked_s"] for event in publishes]),
            "publish_s": _summary([event["total_s"] for event in publishes]),
            "load_s": _summary([event["total_s"] for event in loads]),
        }
        copy = _summary([_copy(found[name]["wire_bytes"]) for _ in range(5)])
        found[name]["one_copy_s"] = copy
        found[name]["ratios"] = {
            "publish + load / copy": (found[name]["publish_s"]["median"] + found[name]["load_s"]["median"])
            / copy["median"],
            f"blocked / copy (<= {0.2 if schedule == 'free' else 2})": found[name]["blocked_s"]["median"]
            / copy["median"],
        }
    return found


def _copy(nbytes: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


_room: dict[int, np.ndarray] = {}


def _write_and_read(folder: Path, number: int, nbytes: int) -> dict[str, float]:
    """Through the page cache, by one thread: a new file of these bytes, mapped and copied to a buffer that exists.

    As many files stay as checkpoints do, and the oldest goes after the newest is there, so that the page cache needs
    new pages for both alike: on a virtual machine a page that was free for a while can cost ten times its copy.
    """
    room = _room.setdefault(nbytes, np.ones(nbytes, np.uint8))
    view = room.data
    path = folder / f"raw-{number}"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, 4 << 20):
            file.write(view[start : start + (4 << 20)])
    written = time.perf_counter()
    with path.open("rb") as read, mmap.mmap(read.fileno(), nbytes, access=mmap.ACCESS_READ) as mapping:
        found = np.frombuffer(mapping, np.uint8)
        np.copyto(room, found)
        del found
    ended = time.perf_counter()
    (folder / f"raw-{number - 2}").unlink(missing_ok=True)
    return {"write_s": written - began, "read_s": ended - written, "total_s": ended - began}


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": float(np.quantile(values, 0.95)), "best": min(values)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only form)")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="whose shapes (default: qwen3-8b)")
    parser.add_argument("--params", type=float, help="its first layers only, about so many parameters; 0: all of it")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument(
        "--backends",
        "--backend",
        nargs="+",
        choices=("staged", "fsdp", "fsdp2", "megatron"),
        default=["staged"],
        help="staged: ranks without an engine (default); the others run a real engine, through launch.py's own code",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer (default 2)")
    parser.add_argument("--syncs", type=int, default=200, help="of the mode growth (default 200)")
    parser.add_argument("--control-explorers", type=int, default=64, help="of the mode control (default 64)")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    if options.params is None:
        options.params = 0.0 if options.model == "qwen3-0.6b" else 300e6
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": f"python benchmarks/sync.py --json {' '.join(sys.argv[1:])}".replace("--json --json", "--json"),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "model": options.model,
        "results": {},
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _ray("staged" in options.backends):
        for name, measure in _measures(options, Path(folder)).items():
            report["results"][name] = measure()
            print(json.dumps({name: report["results"][name].get("ratios")}, indent=2), file=sys.stderr)
    for backend in [backend for backend in options.backends if backend != "staged"]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report["results"][backend] = measure_engine(backend, options, Path(folder))
    report["driver"] = memory()
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


def _measures(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    if "staged" not in options.backends:
        return {}
    measures: dict[str, Callable[[], dict[str, Any]]] = {}
    if {"memory", "checkpoint", "nccl", "fleet"} & set(options.modes):
        measures["model"] = lambda: measure_bytes(options, folder)
    if "small" in options.modes:
        measures["small tensors"] = lambda: measure_small(options, folder)
    if "growth" in options.modes:
        measures["growth"] = lambda: measure_growth(options, folder)
    if "control" in options.modes:
        measures["control plane"] = lambda: measure_control(options, folder)
    return measures


@contextlib.contextmanager
def _ray(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    start_ray(600.0, num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
