"""The picture of a step's bytes: what is copied where, by whom, and who is told."""

from __future__ import annotations

from docs.figures.svg import Box, Figure


def draw() -> str:
    """The figure."""
    figure = Figure(960, 640, "How the bytes of a step flow from a trainer rank to explorers and to checkpoints")

    figure.frame(Box(20, 76, 640, 332), "one node")
    figure.box(
        Box(40, 112, 150, 276), "trainer rank", "trains; stands still for what is left of a copy only", "process"
    )
    figure.box(Box(286, 196, 140, 76), "slot", "a segment for each rank, wire dtype", "memory")
    figure.box(Box(286, 312, 140, 76), "training state", "model, optimizer, RNG", "memory")
    near = figure.box(Box(490, 100, 150, 66), "explorer", "on this node: maps the slot", "process")
    figure.box(Box(490, 226, 150, 162), "node agent", "owns shared memory; digests; writes files", "process")
    far = figure.box(Box(780, 100, 150, 66), "explorer", "on another node", "process")
    names = figure.box(Box(780, 226, 150, 78), "synchronizer", "seals, commits and leases versions", "process")
    monitor = figure.box(Box(286, 466, 140, 78), "monitor", "commits checkpoints, retention", "process")
    staging = figure.box(Box(490, 466, 150, 78), ".staging/20-0", "parts, fsynced", "disk")
    step = figure.box(Box(780, 466, 150, 78), "global_step_20", "whole, with its manifest", "disk")
    mirror = figure.box(Box(490, 566, 150, 56), "mirror", "remote storage", "disk")

    def bytes_of(
        *points: tuple[float, float], label: str = "", at: tuple[float, float] | None = None, inside: bool = False
    ) -> None:
        figure.arrow(*points, kind="bytes", label=label, at=at, inside=inside)

    bytes_of((190, 234), (286, 234), label="1 snapshot\nof a version", at=(238, 210), inside=True)
    bytes_of((190, 350), (286, 350), label="1 snapshot\nof the state", at=(238, 326), inside=True)
    bytes_of((426, 250), (490, 250), label="2 digest", at=(457, 242), inside=True)
    bytes_of((426, 350), (490, 350))
    bytes_of((356, 196), (356, 133), near.at(0, 0.5), label="3 memory", at=(420, 126), inside=True)
    bytes_of((640, 242), (712, 242), (712, 150), (780, 150), label="3 memory:\nin pieces", at=(712, 190))
    bytes_of(
        (115, 112), (115, 46), (855, 46), (855, 100), label="3 nccl: ranks broadcast from their slots", at=(480, 40)
    )
    bytes_of(
        (915, 466),
        (915, 430),
        (945, 430),
        (945, 133),
        far.at(1, 0.5),
        label="3 checkpoint:\nfiles are read",
        at=(868, 420),
    )
    bytes_of((565, 388), (565, 466), label="4 write", at=(565, 442))
    bytes_of(staging.at(1, 0.5), step.at(0, 0.5), label="5 commit: one rename", at=(710, 498))
    bytes_of(step.at(0.5, 1), (855, 594), mirror.at(1, 0.5), label="6 copied by a process of its own", at=(744, 587))

    figure.arrow((640, 286), (780, 286), kind="words", label="parts, digests", at=(710, 303))
    figure.arrow(names.at(0.5, 0), far.at(0.5, 1), kind="words", label="version, lease", at=(855, 200))
    figure.arrow(
        (516, 388), (516, 436), (356, 436), monitor.at(0.5, 0), kind="words", label="paths, digests", at=(420, 430)
    )
    figure.arrow(monitor.at(1, 0.5), staging.at(0, 0.5), kind="words")

    figure.note(24, 600, "blue: bytes")
    figure.note(24, 618, "dashed: names and digests")
    return figure.svg()
