"""The picture of a version's way: who has it in hand when, and what it is called meanwhile."""

from __future__ import annotations

from docs.figures.svg import Box, Figure

_LEFT = 150
_LANES = {"trainer ranks": 14, "node agent": 74, "synchronizer": 134, "explorer": 194, "checkpoint": 254}
_HEIGHT = 48


def draw() -> str:
    """The figure."""
    figure = Figure(920, 398, "The way of version 8 from the trainer to an explorer and into a checkpoint, by time")
    for name, top in _LANES.items():
        figure.frame(Box(12, top, 896, _HEIGHT), name)

    def part(lane: str, start: float, end: float, words: str, kind: str = "process") -> Box:
        return figure.box(Box(_LEFT + start, _LANES[lane] + 5, end - start, _HEIGHT - 10), words, "", kind)

    part("trainer ranks", 0, 130, "step 8")
    copy = part("trainer ranks", 138, 218, "copy", "memory")
    part("trainer ranks", 226, 740, "step 9")
    digest = part("node agent", 226, 320, "digest")
    write = part("node agent", 360, 560, "write files")
    sealed = part("synchronizer", 328, 412, "sealed", "box")
    committed = part("synchronizer", 430, 550, "committed", "box")
    load = part("explorer", 558, 640, "load")
    part("explorer", 0, 540, "generates with version 7")
    part("explorer", 668, 740, "8")
    whole = part("checkpoint", 568, 740, "global_step_8", "disk")
    figure.arrow(copy.at(0.9, 1), (copy.at(0.9, 1)[0], digest.at(0, 0.5)[1]), digest.at(0, 0.5), kind="bytes")
    figure.arrow(digest.at(0.8, 1), (digest.at(0.8, 1)[0], sealed.at(0, 0.5)[1]), sealed.at(0, 0.5), kind="words")
    figure.arrow(sealed.at(1, 0.5), committed.at(0, 0.5), kind="words")
    figure.arrow(committed.at(1, 0.5), (load.at(0.3, 0)[0], committed.at(1, 0.5)[1]), load.at(0.3, 0), kind="words")
    figure.arrow(write.at(1, 0.5), (804, write.at(1, 0.5)[1]), (804, whole.at(0, 0)[1]), kind="bytes")
    notes = (
        "The trainer stands still for the copy only, or for less: it may run beside the next forward and backward.",
        "Sealed: all parts are in, and their digests known. Committed: from this instant the newest, for everybody.",
        "A full checkpoint is written from a copy of the training state, and files of a version from its slot.",
        "While it loads, an explorer holds no version and generates nothing. A failure leaves the one before in force.",
    )
    for number, text in enumerate(notes):
        figure.note(16, 328 + 18 * number, text)
    return figure.svg()
