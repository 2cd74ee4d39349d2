"""Charts as inline SVG for the report pages: their geometry is computed here, and templates write it.

The page's style has the colours, for light and dark. Long runs are thinned. Values show on hover: by the page's script,
without it by SVG titles where points are few. A constant curve becomes a line of text.
"""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trinity_sync.report.figures import Better, Figure
from trinity_sync.tracking import units

COLOURS = 8
_MOST_POINTS, _MOST_TOGETHER = 600, 12_000
_MOST_HOVERS = 240
_WIDTH, _HEIGHT = 560, 250
_MOST_BARS = 60
_DASHES = ("", "7 3", "2 3", "9 3 2 3")

Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        name: its name in the legend.
        points: (x, y) by x; a None breaks the line.
        colour: 0 to `COLOURS` - 1.
        style: ``line``, ``faint`` (in the background), ``steps`` (level until the next point) or ``dots``.
        dash: index of a dash pattern, 0 for a full line.
        low, high: edges of a band around it, as points; none if empty.
    """

    name: str
    points: Points
    colour: int = 0
    style: Literal["line", "faint", "steps", "dots"] = "line"
    dash: int = 0
    low: Points = ()
    high: Points = ()

    @property
    def fill(self) -> str:
        """The colour in the page's style."""
        return _fill(self.colour)

    @property
    def faint(self) -> bool:
        return self.style == "faint"

    @property
    def dashes(self) -> str:
        """The dash pattern in SVG's notation."""
        return _DASHES[self.dash % len(_DASHES)]

    @property
    def band(self) -> list[tuple[float, float]]:
        """The corners of the band: the lower edge, and the upper one back."""
        return [(x, y) for x, y in [*self.low, *reversed(self.high)] if y is not None]

    @property
    def pieces(self) -> list[list[tuple[float, float]]]:
        """The corners of each unbroken part."""
        parts = groupby(self.points, lambda point: point[1] is None)
        pieces = [[(x, y) for x, y in part if y is not None] for missing, part in parts if not missing]
        if self.style != "steps":
            return pieces
        return [
            [piece[0], *(at for (_, before), (x, y) in pairwise(piece) for at in ((x, before), (x, y)))]
            for piece in pieces
        ]


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """The axes of a chart: texts, place in pixels, and ranges."""

    label: str
    x_label: str
    y_format: Format
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    y_ticks: Sequence[float]
    width: int = _WIDTH
    height: int = _HEIGHT
    log: bool = False
    top: int = 12

    @cached_property
    def left(self) -> int:
        """Space for the ticks' texts, also in the larger letters of a narrow screen."""
        return max(58, 12 + 9 * max(len(self.y_format(value)) for value in self.y_ticks))

    @property
    def end(self) -> int:
        return self.width - 14

    @property
    def floor(self) -> int:
        return self.height - 38

    @property
    def x_ticks(self) -> list[float]:
        low, high = self.x_range
        return [value for value in ticks(low, high, 6)[0] if low <= value <= high and value == int(value)]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.end - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.floor - (value - low) / (high - low) * (self.floor - self.top)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str = "step",
    y_format: Format,
    y_bounds: tuple[float | None, float | None] = (None, None),
    log: bool = False,
    marks: Mapping[float, str] | None = None,
    empty: str = "Nothing recorded yet.",
) -> Markup:
    """Draw curves over one axis of numbers."""
    most = min(_MOST_POINTS, max(100, _MOST_TOGETHER // max(len(series), 1)))
    curves = [item for item in (thinned(item, log, most) for item in series) if item.pieces]
    if not curves:
        return _said(empty)
    xs = [x for item in curves for x, _ in item.points]
    known = [(x, y) for item in curves for x, y in (*item.points, *item.band) if y is not None]
    ys = [y for _, y in known]
    if min(ys) == max(ys) and len({x for x, _ in known}) > 1:
        first, last = min(known)[0], max(known)[0]
        return _said(f"{label}: {y_format(ys[0])} throughout, from {x_label} {first:g} to {last:g}.")
    ys += [bound for bound in y_bounds if bound is not None]
    y_ticks, y_range = log_ticks(min(ys), max(ys)) if log else ticks(min(ys), max(ys))
    plot = _Plot(
        label=label,
        x_label=x_label,
        y_format=y_format,
        width=_WIDTH,
        height=_HEIGHT,
        x_range=_widen(min(xs), max(xs), 0.5),
        y_range=y_range,
        y_ticks=y_ticks,
        log=log,
    )
    return render("line_chart.html", plot=plot, curves=curves, marks=marks or {}, hovers=len(xs) <= _MOST_HOVERS)


def bar_chart(
    xs: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    label: str,
    y_format: Format,
    empty: str = "Nothing recorded yet.",
) -> Markup:
    """Draw stacked bars by step: one bar per step, or in a long run per few steps (means)."""
    if not xs or not parts:
        return _said(empty)
    share = math.ceil(len(xs) / _MOST_BARS)
    bins = [range(start, min(start + share, len(xs))) for start in range(0, len(xs), share)]
    heights = {name: [sum(values[i] for i in bin_) / len(bin_) for bin_ in bins] for name, values in parts.items()}
    tops = [sum(column) for column in zip(*heights.values(), strict=True)]
    gap = (xs[-1] - xs[0]) / (len(xs) - 1) if len(xs) > 1 else 1.0
    y_ticks, y_range = ticks(0.0, max(tops))
    plot = _Plot(
        label=label,
        x_label="step",
        y_format=y_format,
        x_range=(xs[0] - gap / 2, xs[-1] + gap / 2),
        y_range=y_range,
        y_ticks=y_ticks,
    )
    bars = []
    for index, bin_ in enumerate(bins):
        begin, end = plot.x(xs[bin_[0]] - gap / 2), plot.x(xs[bin_[-1]] + gap / 2)
        space = min(2.0, (end - begin) * 0.2)
        where = f"step {xs[bin_[0]]:g}" + (f" to {xs[bin_[-1]]:g}" if len(bin_) > 1 else "")
        below = 0.0
        for colour, (name, values) in enumerate(heights.items()):
            top, bottom = plot.y(below + values[index]), plot.y(below)
            below += values[index]
            bars.append(
                {
                    "x": begin + space / 2,
                    "y": top,
                    "width": max(end - begin - space, 0.5),
                    "height": max(bottom - top, 0),
                    "fill": _fill(colour),
                    "title": f"{where}: {name} {y_format(values[index])}",
                }
            )
    total = sum(tops) or 1.0
    legend = [
        (_fill(colour), f"{name} {y_format(sum(values) / len(values))} ({sum(values) / total:.0%})")
        for colour, (name, values) in enumerate(heights.items())
    ]
    return render("bar_chart.html", plot=plot, bars=bars, legend=legend)


def ticks(low: float, high: float, count: int = 5) -> tuple[list[float], tuple[float, float]]:
    """Return about `count` round values around [low, high], and the range from the first to the last."""
    low, high = _widen(low, high, abs(low) * 0.1 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [float(f"{index * step:.12g}") for index in range(first, last + 1)]
    return values, (values[0], values[-1])


def log_ticks(low: float, high: float) -> tuple[list[float], tuple[float, float]]:
    """Return powers of ten around [low, high], at most seven of them, and the range from the first to the last."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    last = first + every * math.ceil((last - first) / every)
    return [10.0**power for power in range(first, last + 1, every)], (10.0**first, 10.0**last)


def _said(text: str) -> Markup:
    return Markup('<p class="quiet">{}</p>').format(text)


def _fill(colour: int) -> str:
    return f"var(--s{colour % COLOURS})"


def thinned(series: Series, log: bool, most: int = _MOST_POINTS) -> Series:
    """Return a curve with as many points as a chart draws at most."""
    drawable = [(x, y if y is None or not log or y > 0 else None) for x, y in series.points]
    return replace(series, points=thin(drawable, most), low=thin(series.low, most), high=thin(series.high, most))


def _widen(low: float, high: float, by: float) -> tuple[float, float]:
    """Widen a range that is empty, or too narrow for distinct ticks."""
    return (low, high) if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-300) else (low - by, high + by)


# Marks of a comparison.


Mark = Literal["best", "tie"]
RULE = (
    "Not distinguishable: the difference is within twice its standard error (over seeds; of one job over its last "
    "steps, or the samples of its validation), the middle halves of measured times overlap, or the figures read the "
    "same. A single measurement has no mark. Only jobs that completed compete."
)


def marks(figures: Sequence[Figure | None], better: Better, text: Callable[[float], str]) -> list[Mark | None]:
    """Mark the best figure of a column, and all ties with it; fewer than two figures, or equal ones, get no mark."""
    known = [one for one in figures if one is not None]
    if len({text(one.value) for one in known}) < 2 or any(one.count < 2 and one.error is None for one in known):
        return [None] * len(figures)
    best = text((min if better == "lower" else max)(one.value for one in known))
    leading = [one for one in known if text(one.value) == best]
    level = [one is not None and any(_overlap(one, leader) for leader in leading) for one in figures]
    word: Mark = "tie" if sum(level) > 1 else "best"
    return [word if equal else None for equal in level]


def _overlap(one: Figure, other: Figure) -> bool:
    if one.error is not None and other.error is not None:
        return abs(one.value - other.value) <= 2 * math.hypot(one.error, other.error)
    return one.low <= other.high and other.low <= one.high


# Templates: values are escaped, unless a template made them.


_ENVIRONMENT = Environment(
    loader=PackageLoader("trinity_sync.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "breaks": lambda text: Markup(re.sub("([.,=])", r"\1<wbr>", html.escape(str(text)))),
    "moment": units.moment,
    "page": lambda folder: f"{quote(os.fsencode(folder))}/report.html",  # without a ":", so the link is relative
    "number": lambda value: units.number(units.finite(value)),
    "px": "{:.1f}".format,
    "quoted": lambda text: Markup(html.escape(str(text))),  # names quotes, where markupsafe numbers them
    "seconds": lambda value: units.seconds(units.finite(value)),
    "size": lambda value: units.size(units.finite(value)),
}


def render(template: str, **values: object) -> Markup:
    """Render a file of `templates/`."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


# Thinning: fewer points than a screen has pixels, without losing peaks.


Points = Sequence[tuple[float, float | None]]


def thin(points: Points, most: int) -> Points:
    """Keep at most `most` (4 or more) points: the lowest and the highest of each share of neighbours, and both ends.

    A share without a value keeps one point without a value, so a gap stays a gap.
    """
    if len(points) <= most:
        return points
    share = math.ceil(len(points) / ((most - 2) // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), share):
        values = [(y, at) for at, (_, y) in enumerate(points[start : start + share], start) if y is not None]
        kept |= {min(values)[1], max(values)[1]} if values else {start}
    return [points[at] for at in sorted(kept)]
