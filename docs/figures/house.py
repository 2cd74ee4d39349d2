"""The picture of the packages: layers as `pyproject.toml` orders them, and what their modules do import."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import grimp

from docs.figures.svg import Box, Figure, row

ROOT = Path(__file__).resolve().parents[2]
PURPOSES = {
    "cli": "the command trinity-sync",
    "launch": "from a composed config to a finished run: cluster, actors, job, resume",
    "trainer": "ranks (verl's worker with our hooks), training loops",
    "explorer": "rollout replicas: engine, actor, pool",
    "integrations": "for programs of your own: verl, vLLM",
    "backends": "engines: FSDP, Megatron; their shards",
    "sync": "synchronizer, node agent; one file per sync mode",
    "checkpoint": "coordinator, monitor, folder, mirror/",
    "actors": "calls between processes: a typed client of each actor",
    "config": "schema, composition, checks between fields",
    "protocol": "pure state machines: commit, versions, rounds, leases, retention",
    "models": "models on disk and in transformers: files, shapes, tokens",
    "weights": "the data plane: shards, slots, digests, layouts, staging, applying",
    "host": "locks, durable files, signals, logs",
    "errors": "what a user is told, and exit codes",
    "report": "HTML report of a run or sweep",
    "reproduction": "is a repeated run the same?",
    "tracking": "run folder, metrics, events, trackers",
    "tasks": "prompts and rewards",
    "samples": "batches, queue, staleness",
}
"""What each package is for, in a few words."""
BESIDE = ["report", "reproduction", "tracking", "tasks", "samples"]
"""Packages beside the layers."""


def layers() -> list[list[str]]:
    """The packages of each layer, uppermost first, as the contract of import-linter has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[name.strip().removeprefix("trinity_sync.") for name in layer.split("|")] for layer in found]


def imports() -> dict[str, set[str]]:
    """Package -> other packages of which its modules import something."""
    graph = grimp.build_graph("trinity_sync", cache_dir=None, exclude_type_checking_imports=True)
    packages = sorted(graph.find_children("trinity_sync"))
    for package in packages:
        if graph.find_children(package):
            graph.squash_module(package)
    return {
        package.removeprefix("trinity_sync."): {
            name.removeprefix("trinity_sync.")
            for name in graph.find_modules_directly_imported_by(package)
            if name in packages and name != package
        }
        for package in packages
    }


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges that do not follow from two or more others."""

    def reach(name: str) -> set[str]:
        return {name}.union(*(reach(below) for below in edges[name]))

    return {
        name: {to for to in below if not any(to in reach(other) for other in below - {to})}
        for name, below in edges.items()
    }


def draw() -> str:
    """The figure."""
    rows, below = layers(), reduced(imports())
    heights = [{1: 62, 2: 78}.get(len(names), 109) for names in rows]
    tops = [24 + sum(heights[:number]) + 14 * number for number in range(len(rows))]
    figure = Figure(900, tops[-1] + heights[-1] + 62, "The packages of Trinity Sync, and which imports which")
    places: dict[str, Box] = {}
    for names, top, height in zip(rows, tops, heights, strict=True):
        places |= dict(zip(names, row(52, top, 648, height, len(names), gap=12), strict=True))
    places |= {name: Box(724, tops[1] + 108 * number, 152, 94) for number, name in enumerate(BESIDE)}
    for name, place in places.items():
        arrow = "\u2192 " + ", ".join(sorted(below[name])) if below[name] else ""
        figure.box(place, name, PURPOSES[name], more=arrow)
    figure.arrow((28, tops[0]), (28, tops[-1] + heights[-1]), kind="bytes")
    figure.note(
        52,
        figure.height - 36,
        "Imports run down. The four on the right know nothing of those on the left but host and errors.",
    )
    figure.note(
        52, figure.height - 18, "\u2192 what a package imports, without what it could reach through another of these."
    )
    return figure.svg()
