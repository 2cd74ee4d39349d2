"""Boxes, arrows and words of a figure, as SVG that is readable on a light page and on a dark one.

Lengths are in pixels. Where a font is wider than reckoned here nothing is cut off, but words that do not fit into their
box by this reckoning are refused: sans-serif fonts take 0.6 of their size for a letter, or less.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

_LETTER = 0.6
_STYLE = """
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-size: 14px; font-weight: 600 }
  .note { fill: #59636e }
  .more { fill: #0969da }
  .label { font-size: 11px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round }
  .page { fill: #ffffff; stroke: #d1d9e0 }
  .frame { fill: #f6f8fa; stroke: #d1d9e0; stroke-dasharray: 3 3 }
  .frame + .label, .inside { stroke: #f6f8fa }
  .box { fill: #ffffff; stroke: #818b98 }
  .process { fill: #ddf4ff; stroke: #0969da }
  .memory { fill: #fff8c5; stroke: #9a6700 }
  .disk { fill: #dafbe1; stroke: #1a7f37 }
  .line { fill: none; stroke: #818b98; stroke-width: 1.2 }
  .bytes { fill: none; stroke: #0969da; stroke-width: 2.4 }
  .words { fill: none; stroke: #818b98; stroke-width: 1.2; stroke-dasharray: 5 4 }
  .head { fill: #818b98 } .bytes-head { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .note { fill: #9198a1 }
    .more { fill: #4493f8 }
    .label { stroke: #0d1117 }
    .page { fill: #0d1117; stroke: #3d444d }
    .frame { fill: #151b23; stroke: #3d444d }
    .frame + .label, .inside { stroke: #151b23 }
    .box { fill: #0d1117; stroke: #9198a1 }
    .process { fill: #121d2f; stroke: #4493f8 }
    .memory { fill: #272115; stroke: #d29922 }
    .disk { fill: #12261e; stroke: #3fb950 }
    .line, .words { stroke: #9198a1 }
    .bytes { stroke: #4493f8 }
    .head { fill: #9198a1 } .bytes-head { fill: #4493f8 }
  }
"""


@dataclass(frozen=True)
class Box:
    """A box that is drawn; arrows begin and end at its edges."""

    x: float
    y: float
    width: float
    height: float

    def at(self, across: float, down: float) -> tuple[float, float]:
        """A point of it: ``at(0.5, 1)`` is the middle of its lower edge."""
        return self.x + across * self.width, self.y + down * self.height


@dataclass
class Figure:
    """A figure under construction; what is drawn later lies above.

    Args:
        title: what it shows, for those who cannot see it.
    """

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(self, place: Box, title: str, words: str = "", kind: str = "box", more: str = "") -> Box:
        """Draw a box with a title and words below it, broken into lines as they fit.

        Args:
            kind: ``box``, ``process``, ``memory`` or ``disk``.
            more: last lines, in another colour.

        Raises:
            ValueError: the words do not fit.
        """
        inner = place.width - 12
        lines, last = (
            [(line, kind) for line in textwrap.wrap(text, int(inner / (12 * _LETTER)))]
            for text, kind in ((words, "note"), (more, "more"))
        )
        lines += last
        if len(title) * 14 * _LETTER > inner or 16 + 15 * (len(lines) + 1) > place.height + 8:
            raise ValueError(f"{title}: {words} does not fit into {place.width} x {place.height}")
        self._rectangle(place, kind)
        x, top = place.at(0.5, 0.5)[0], place.at(0, 0.5)[1] - 15 * len(lines) / 2 + 5
        self._text(x, top, title, "title")
        for number, (line, style) in enumerate(lines, start=1):
            self._text(x, top + 1 + 15 * number, line, style)
        return place

    def frame(self, place: Box, label: str) -> Box:
        """Draw a frame around what is drawn later, with a label in its upper left corner."""
        self._rectangle(place, "frame")
        self._text(place.x + 10, place.y + 18, label, "label note", "start")
        return place

    def arrow(
        self,
        *points: tuple[float, float],
        kind: str = "line",
        label: str = "",
        at: tuple[float, float] | None = None,
        inside: bool = False,
    ) -> None:
        """Draw an arrow through points.

        Args:
            kind: ``line``, ``bytes`` or ``words``.
            label: at the middle of its first stretch, or at the point `at`.
            inside: whether the label lies in a frame, of which it takes the colour.
        """
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        head = "bytes-head" if kind == "bytes" else "head"
        self._parts.append(f'<path class="{kind}" d="M {path}" marker-end="url(#{head})"/>')
        if label:
            (x0, y0), (x1, y1) = points[:2]
            x, y = at or ((x0 + x1) / 2, (y0 + y1) / 2 - 7)
            for number, line in enumerate(label.split("\n")):
                self._text(x, y + 14 * number, line, "label inside" if inside else "label")

    def curve(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        """Draw a line through points, as `arrow` but without a head."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{kind}" d="M {path}"/>')

    def note(self, x: float, y: float, text: str) -> None:
        """Write a line that begins at a point."""
        self._text(x, y, text, "note", "start")

    def svg(self) -> str:
        """The whole file."""
        marker = (
            '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{1}" markerHeight="{1}" '
            'markerUnits="userSpaceOnUse" orient="auto"><path class="{0}" d="M 0 0 L 8 4 L 0 8 z"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                f"<defs>{marker.format('head', 8)}{marker.format('bytes-head', 10)}</defs>",
                f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def _rectangle(self, place: Box, kind: str) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" '
            f'height="{place.height:g}" rx="6"/>'
        )

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "middle") -> None:
        size = 14 if kind == "title" else 11 if kind.startswith("label") else 12
        long = len(text) * size * _LETTER
        left = x if anchor == "start" else x - long / 2
        if left < 0 or left + long > self.width or not size < y < self.height:
            raise ValueError(f"{text!r} leaves the figure")
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')


def row(x: float, y: float, width: float, height: float, count: int, gap: float = 16) -> Sequence[Box]:
    """So many boxes of the same size beside each other."""
    each = (width - gap * (count - 1)) / count
    return [Box(x + number * (each + gap), y, each, height) for number in range(count)]
