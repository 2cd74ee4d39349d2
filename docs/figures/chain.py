"""The picture of a version between nodes: each piece leaves the trainer's node once, and every node passes it on."""

from __future__ import annotations

from docs.figures.svg import Box, Figure

_NODES = {"trainer's node": ("0 to 120", 120), "node 1": ("0 to 57", 57), "node 2": ("0 to 56", 56)} | {
    "node 3": ("0 to 55", 55)
}
"""The pieces that a node has of a part of 121 pieces, and the last of them."""
_WIDTH, _GAP = 176, 58


def draw() -> str:
    """The figure."""
    figure = Figure(940, 372, "A version travels in pieces from the trainer's node through a chain of nodes")
    slots = []
    for number, (name, (pieces, _)) in enumerate(_NODES.items()):
        left = 20 + number * (_WIDTH + _GAP)
        figure.frame(Box(left, 20, _WIDTH, 236), name)
        top = figure.box(
            Box(left + 16, 52, _WIDTH - 32, 52),
            "explorers" if number else "ranks",
            "map the slot" if number else "copy their parts",
            "process",
        )
        slot = figure.box(Box(left + 16, 146, _WIDTH - 32, 56), "slot", f"pieces {pieces}", "memory")
        if number:
            figure.arrow(slot.at(0.5, 0), top.at(0.5, 1), kind="bytes")
            figure.arrow(
                slots[-1].at(1, 0.5),
                slot.at(0, 0.5),
                kind="bytes",
                label=f"piece {list(_NODES.values())[number][1] + 1}",
                at=(left - _GAP / 2, 140),
            )
        else:
            figure.arrow(top.at(0.5, 1), slot.at(0.5, 0), kind="bytes")
        figure.note(left + 16, 232, "agent: its owner" if not number else "agent: checks, passes on")
        slots.append(slot)
    for number in range(1, len(slots)):
        place = 20 + number * (_WIDTH + _GAP) + 40 + 20 * number
        figure.arrow((place, 256), (place, 276), (100, 276), (100, 256), kind="words")
    for number, text in enumerate(
        (
            "Dashed: an agent asks the owner for its source, the node that asked before it, or the owner itself.",
            "A piece has 4 MiB and a digest, which is checked before the piece is used or passed on.",
            "A source that dies, stalls or sends damaged bytes is replaced, and the rest comes from the next one.",
        )
    ):
        figure.note(20, 308 + 20 * number, text)
    return figure.svg()
