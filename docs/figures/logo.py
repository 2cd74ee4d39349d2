"""The mark: one snapshot, and three who read it. It brings its own ground, for the bar above each page and for tabs."""

from __future__ import annotations

_STYLE = """
  .ground { fill: #0b5cad } .way { fill: none; stroke: #ffffff } .end { fill: #ffffff }
  @media (prefers-color-scheme: dark) { .ground { fill: #2f6fb3 } .way { stroke: #ffffff } .end { fill: #ffffff } }
"""
_READERS = ((48, 13), (52, 32), (48, 51))


def draw() -> str:
    """The figure."""
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img">',
            "<title>Trinity Sync</title>",
            f"<style>{_STYLE}</style>",
            '<rect class="ground" width="64" height="64" rx="14"/>',
            *(f'<path class="way" stroke-width="4" d="M 20 32 L {x} {y}"/>' for x, y in _READERS),
            '<circle class="end" cx="20" cy="32" r="9"/>',
            *(f'<circle class="end" cx="{x}" cy="{y}" r="5"/>' for x, y in _READERS),
            "</svg>\n",
        ]
    )
