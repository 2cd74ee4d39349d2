"""What a version costs by size, explorers and ranks, and which aims hold: what `benchmarks/models.py` found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.figures.svg import Box, Figure

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "models.json"
CURVES = {"size": "GB a version", "explorers": "explorers, 0.25 GB each", "ranks": "ranks, 0.25 GB together"}
_LINES = {"publish_s": "bytes", "load_s": "line"}


def draw(measured: dict[str, Any] | None = None) -> str:
    """Draw it.

    Args:
        measured: as the benchmark writes it; None: what is kept of the last time.
    """
    found = measured or json.loads(MEASURED.read_text())
    aims = found["aims"]
    figure = Figure(900, 340 + 20 * len(aims), "What a version costs: seconds of publish and load, and the aims")
    machine = found["machine"]
    if machine is not None:
        figure.note(24, 30, f"{machine['processor']}, {machine['cores']} cores; rounds: {found['rounds']}")
    figure.note(24, 48, found["command"][:110])
    for number, (curve, label) in enumerate(CURVES.items()):
        points = [point for point in found["curves"] if point["curve"] == curve and "error" not in point]
        _chart(figure, Box(70 + 285 * number, 84, 220, 170), label, points)
    figure.note(70, 72, "blue: publish, grey: load, in seconds")
    for number, aim in enumerate(aims):
        y = 328 + 20 * number
        figure.note(70, y, aim["what"])
        figure.note(480, y, f"{aim['value']:.3g} {aim['unit']}")
        figure.note(650, y, f"aim {aim['aim']:g}: {'holds' if aim['holds'] else 'does not hold'}")
    return figure.svg()


def _chart(figure: Figure, place: Box, label: str, points: list[dict[str, Any]]) -> None:
    """Draw the curves of publish and load over a value, from zero on."""
    figure.curve([place.at(0, 0), place.at(0, 1), place.at(1, 1)])
    figure.note(place.x, place.at(0, 1)[1] + 34, label)
    if not points:
        figure.note(place.x + 20, place.at(0, 0.5)[1], "not measured")
        return
    widest = max(point["value"] for point in points)
    highest = max(point[key] for point in points for key in _LINES)
    figure.note(place.x - 46, place.y + 10, f"{highest:.2g} s")
    free = place.x
    for point in points:
        x, bottom = place.at(point["value"] / widest, 1)
        if x >= free:
            figure.note(x - 8, bottom + 16, f"{point['value']:.2g}")
            free = x + 26
    for key, kind in _LINES.items():
        figure.curve([place.at(point["value"] / widest, 1 - point[key] / highest) for point in points], kind)
