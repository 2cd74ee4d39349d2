"""Write the SVG files beside their sources."""

from __future__ import annotations

from pathlib import Path

from docs.figures import badges, chain, flow, house, logo, models, run, version

FIGURES = {
    Path(__file__).with_name(f"{source.__name__.rpartition('.')[2]}.svg"): source.draw
    for source in (house, flow, chain, run, version, logo)
} | {Path(__file__).with_name(f"{name}.svg"): draw for name, draw in badges.badges().items()}
if models.MEASURED.is_file():
    FIGURES[Path(__file__).with_name("models.svg")] = models.draw

if __name__ == "__main__":
    for path, draw in FIGURES.items():
        path.write_text(draw())
