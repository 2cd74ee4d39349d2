"""Write the SVG files beside their sources."""

from __future__ import annotations

from pathlib import Path

from docs.figures import flow, house

FIGURES = {Path(__file__).with_name(f"{name}.svg"): draw for name, draw in (("house", house.draw), ("flow", flow.draw))}

if __name__ == "__main__":
    for path, draw in FIGURES.items():
        path.write_text(draw())
