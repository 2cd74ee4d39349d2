"""Charts as inline SVG: lines over steps, and stacked bars, for the report pages.

Colours come from the page's style, so one chart fits light and dark. Long runs are thinned to what a
page can show; values are on hover through SVG titles, without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trinity_sync.report.html import Html, join, tag

COLOURS = 8
_MOST_POINTS = 600
_MOST_HOVERS = 240
_MOST_BARS = 60
_BROAD = 800
_DASHES = ("", "7 3", "2 3", "9 3 2 3")

Points = Sequence[tuple[float, float | None]]
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend.
        points: (x, y) by x; a None breaks the line.
        colour: 0 to `COLOURS` - 1.
        style: ``line``, ``faint`` (behind another), ``steps`` (holds until the next point) or ``dots``.
        dash: index of a dash pattern, 0 for a full line.
    """

    name: str
    points: Points
    colour: int = 0
    style: Literal["line", "faint", "steps", "dots"] = "line"
    dash: int = 0


@dataclass(frozen=True)
class _Plot:
    """The inside of the axes in pixels, and the ranges that it shows."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool
    left: int = 58
    right: int = 14
    top: int = 12
    bottom: int = 38

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str = "step",
    y_format: Format,
    width: int = 560,
    height: int = 250,
    y_bounds: tuple[float | None, float | None] = (None, None),
    log: bool = False,
    marks: Mapping[float, str] | None = None,
    empty: str = "Nothing recorded yet.",
) -> Html:
    """Curves over one axis of numbers.

    Args:
        series: the curves; those without a value are left out.
        label: what the chart shows, for those who do not see it.
        x_label: what runs to the right.
        y_format: gives the text of a value.
        width, height: in pixels before scaling.
        y_bounds: values that the axis shall reach at least, where not None.
        log: whether the vertical axis counts in powers of ten; values of zero or less are left out then.
        marks: vertical lines by x, with their text.
        empty: said where there is nothing to show.
    """
    shown = [(item, _thin(_drawable(item.points, log), worst=item.style == "dots")) for item in series]
    shown = [(item, points) for item, points in shown if any(value is not None for _, value in points)]
    if not shown:
        return tag("p", empty, class_="quiet")
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points if y is not None] + [
        bound for bound in y_bounds if bound is not None
    ]
    x_range = _widen(min(xs), max(xs), 0.5)
    y_ticks, y_range = log_ticks(min(ys), max(ys)) if log else ticks(min(ys), max(ys))
    plot = _Plot(width, height, x_range, y_range, log)
    lines = [_axes(plot, y_ticks, y_format, x_label), _marks(plot, marks or {})]
    lines += [_curve(plot, item, points) for item, points in shown]
    hovers = sum(len(points) for _, points in shown)
    if hovers <= _MOST_HOVERS:
        lines += [_hovers(plot, item, points, x_label, y_format) for item, points in shown if item.style != "faint"]
    broad = "broad" if width > _BROAD else None
    drawing = tag("svg", *lines, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_=broad)
    return tag("figure", legend([item for item, _ in shown]) if len(shown) > 1 else None, drawing)


def bar_chart(
    xs: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    label: str,
    x_label: str = "step",
    y_format: Format,
    width: int = 560,
    height: int = 250,
    empty: str = "Nothing recorded yet.",
) -> Html:
    """Stacked bars: one bar per x, or per few of them (their means) in a long run.

    Args:
        xs: where the bars stand, rising.
        parts: heights by name, one per x, the lowest part first.
        label, x_label, y_format, width, height, empty: as for `line_chart`.
    """
    if not xs or not parts:
        return tag("p", empty, class_="quiet")
    share = math.ceil(len(xs) / _MOST_BARS)
    bins = [range(start, min(start + share, len(xs))) for start in range(0, len(xs), share)]
    heights = {name: [sum(values[i] for i in bin_) / len(bin_) for bin_ in bins] for name, values in parts.items()}
    tops = [sum(values[index] for values in heights.values()) for index in range(len(bins))]
    gap = (xs[-1] - xs[0]) / (len(xs) - 1) if len(xs) > 1 else 1.0
    y_ticks, y_range = ticks(0.0, max(tops))
    plot = _Plot(width, height, (xs[0] - gap / 2, xs[-1] + gap / 2), y_range, log=False)
    bars = []
    for index, bin_ in enumerate(bins):
        begin, end = plot.x(xs[bin_[0]] - gap / 2), plot.x(xs[bin_[-1]] + gap / 2)
        space = min(2.0, (end - begin) * 0.2)
        where = f"{x_label} {xs[bin_[0]]:g}" + (f" to {xs[bin_[-1]]:g}" if len(bin_) > 1 else "")
        below = 0.0
        for colour, (name, values) in enumerate(heights.items()):
            top, bottom = plot.y(below + values[index]), plot.y(below)
            below += values[index]
            bars.append(
                tag(
                    "rect",
                    tag("title", f"{where}: {name} {y_format(values[index])}"),
                    x=f"{begin + space / 2:.1f}",
                    y=f"{top:.1f}",
                    width=f"{max(end - begin - space, 0.5):.1f}",
                    height=f"{max(bottom - top, 0):.1f}",
                    fill=f"var(--s{colour % COLOURS})",
                )
            )
    drawing = tag(
        "svg",
        _axes(plot, y_ticks, y_format, x_label),
        *bars,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
    )
    total = sum(tops) or 1.0
    names = [
        (colour, f"{name} {y_format(sum(values) / len(values))} ({sum(values) / total:.0%})")
        for colour, (name, values) in enumerate(heights.items())
    ]
    swatch = [tag("li", _box(colour), text) for colour, text in names]
    return tag("figure", tag("ul", *swatch, class_="legend"), drawing)


def ticks(low: float, high: float, count: int = 5) -> tuple[list[float], tuple[float, float]]:
    """Round values that hold [low, high], about `count` of them, and the range from the first to the last."""
    low, high = _widen(low, high, abs(low) * 0.1 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [round(index * step, 12) for index in range(first, last + 1)]
    return values, (values[0], values[-1])


def log_ticks(low: float, high: float) -> tuple[list[float], tuple[float, float]]:
    """Powers of ten that hold [low, high], at most seven of them, and the range from the first to the last."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    last = first + every * math.ceil((last - first) / every)
    return [10.0**power for power in range(first, last + 1, every)], (10.0**first, 10.0**last)


def legend(series: Sequence[Series]) -> Html:
    """Names of the curves, each with a piece of its line."""
    return tag("ul", *(tag("li", _swatch(item), item.name) for item in series), class_="legend")


def _axes(plot: _Plot, y_ticks: Sequence[float], y_format: Format, x_label: str) -> Html:
    left, right, floor = plot.left, plot.width - plot.right, plot.height - plot.bottom
    parts = []
    for value in y_ticks:
        y = f"{plot.y(value):.1f}"
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", y_format(value), x=left - 8, y=y, dy="0.32em", text_anchor="end"))
    low, high = plot.x_range
    x_ticks = [value for value in ticks(low, high, 6)[0] if low <= value <= high and value == int(value)]
    for value in x_ticks:
        x = f"{plot.x(value):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=floor, y2=floor + 4, class_="axis"))
        parts.append(tag("text", f"{value:g}", x=x, y=floor + 18, text_anchor="middle"))
    parts.append(tag("line", x1=left, x2=right, y1=floor, y2=floor, class_="axis"))
    parts.append(tag("text", x_label, x=right, y=floor + 33, text_anchor="end"))
    return join(*parts)


def _marks(plot: _Plot, marks: Mapping[float, str]) -> Html:
    parts = []
    for value, text in marks.items():
        if plot.x_range[0] <= value <= plot.x_range[1]:
            x = f"{plot.x(value):.1f}"
            parts.append(tag("line", x1=x, x2=x, y1=plot.top, y2=plot.height - plot.bottom, class_="mark"))
            parts.append(tag("text", text, x=f"{plot.x(value) + 4:.1f}", y=plot.top + 10))
    return join(*parts)


def _curve(plot: _Plot, series: Series, points: Points) -> Html:
    colour = f"var(--s{series.colour % COLOURS})"
    if series.style == "dots":
        spots = [
            tag("circle", cx=f"{plot.x(x):.1f}", cy=f"{plot.y(y):.1f}", r="2.4", fill=colour, fill_opacity="0.75")
            for x, y in points
            if y is not None
        ]
        return join(*spots)
    faint = series.style == "faint"
    parts = []
    for piece in _pieces(points):
        if len(piece) == 1:
            (x, y), radius = piece[0], "1.6" if faint else "2.4"
            parts.append(tag("circle", cx=f"{plot.x(x):.1f}", cy=f"{plot.y(y):.1f}", r=radius, fill=colour))
            continue
        path = [f"{plot.x(piece[0][0]):.1f},{plot.y(piece[0][1]):.1f}"]
        for (_, before), (x, y) in pairwise(piece):
            if series.style == "steps":
                path.append(f"{plot.x(x):.1f},{plot.y(before):.1f}")
            path.append(f"{plot.x(x):.1f},{plot.y(y):.1f}")
        parts.append(
            tag(
                "polyline",
                points=" ".join(path),
                fill="none",
                stroke=colour,
                stroke_width="1" if faint else "2",
                stroke_opacity="0.6" if faint else None,
                stroke_linejoin="round",
                stroke_dasharray=_DASHES[series.dash % len(_DASHES)] or None,
            )
        )
    return join(*parts)


def _hovers(plot: _Plot, series: Series, points: Points, x_label: str, y_format: Format) -> Html:
    return join(
        *(
            tag(
                "circle",
                tag("title", f"{x_label} {x:g}: {series.name} {y_format(y)}"),
                cx=f"{plot.x(x):.1f}",
                cy=f"{plot.y(y):.1f}",
                r="6",
                class_="hover",
            )
            for x, y in points
            if y is not None
        )
    )


def _swatch(series: Series) -> Html:
    colour = f"var(--s{series.colour % COLOURS})"
    if series.style == "dots":
        mark = tag("circle", cx="11", cy="5", r="4", fill=colour)
    else:
        mark = tag(
            "line",
            x1="0",
            x2="22",
            y1="5",
            y2="5",
            stroke=colour,
            stroke_width="1.5" if series.style == "faint" else "3",
            stroke_opacity="0.6" if series.style == "faint" else None,
            stroke_dasharray=_DASHES[series.dash % len(_DASHES)] or None,
        )
    return tag("svg", mark, viewBox="0 0 22 10", aria_hidden="true")


def _box(colour: int) -> Html:
    box = tag("rect", x="6", y="0", width="12", height="10", rx="2", fill=f"var(--s{colour % COLOURS})")
    return tag("svg", box, viewBox="0 0 22 10", aria_hidden="true")


def _pieces(points: Points) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def _drawable(points: Points, log: bool) -> Points:
    return [(x, y if y is None or not log or y > 0 else None) for x, y in points]


def _thin(points: Points, worst: bool) -> Points:
    """At most `_MOST_POINTS` points, each the mean or the highest of its share; an empty share stays a gap."""
    if len(points) <= _MOST_POINTS:
        return points
    share = math.ceil(len(points) / _MOST_POINTS)
    thinned: list[tuple[float, float | None]] = []
    for start in range(0, len(points), share):
        chunk = points[start : start + share]
        values = [y for _, y in chunk if y is not None]
        value = None if not values else max(values) if worst else sum(values) / len(values)
        thinned.append((chunk[len(chunk) // 2][0], value))
    return thinned


def _widen(low: float, high: float, by: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - by, high + by)
