"""The picture of a run: its processes on a node, what lies in shared memory, and what is on the disk."""

from __future__ import annotations

from docs.figures.svg import Box, Figure, row


def draw() -> str:
    """The figure."""
    figure = Figure(
        880, 428, "A run: trainer ranks snapshot into shared memory; explorers and checkpoints read from it"
    )
    figure.box(
        Box(20, 20, 840, 52), "driver", "composes the config, drives the loop, writes the run's folder", "process"
    )
    figure.frame(Box(20, 96, 840, 204), "a node")
    ranks = [Box(40, 132, 190, 58), Box(40, 222, 190, 58)]
    for number, place in enumerate(ranks):
        figure.box(place, f"trainer rank {number}", "verl: FSDP2, FSDP, Megatron", "process")
    slot = figure.box(Box(330, 132, 220, 58), "slot", "a version, in shared memory", "memory")
    state = figure.box(Box(330, 222, 220, 58), "training state", "in shared memory, too", "memory")
    explorers = [Box(650, 132, 190, 58), Box(650, 222, 190, 58)]
    for number, place in enumerate(explorers):
        figure.box(place, f"explorer {number}", "transformers or vLLM", "process")
    for number, rank in enumerate(ranks):
        for to in (slot, state):
            figure.arrow(rank.at(1, 0.5), to.at(0, 0.35 + 0.3 * number), kind="bytes")
    figure.arrow(slot.at(1, 0.4), explorers[0].at(0, 0.4), kind="bytes", label="load", inside=True)
    figure.arrow(slot.at(1, 0.7), explorers[1].at(0, 0.4), kind="bytes")
    figure.note(250, 136, "snapshot")
    names, monitor, agent, disk = row(20, 340, 840, 68, 4, gap=20)
    figure.box(names, "synchronizer", "which version is the newest, who holds it", "process")
    figure.box(monitor, "monitor", "which checkpoint is whole, which stays", "process")
    figure.box(agent, "node agent", "owns this memory; digests, writes", "process")
    figure.box(disk, "checkpoints/", "whole or not there", "disk")
    figure.arrow(
        (440, 280),
        (440, 318),
        (548, 318),
        agent.at(0.5, 0),
        kind="bytes",
        label="written beside training",
        at=(648, 326),
    )
    figure.arrow(agent.at(1, 0.5), disk.at(0, 0.5), kind="bytes")
    return figure.svg()
