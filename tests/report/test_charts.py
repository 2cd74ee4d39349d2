from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trinity_sync.report import charts
from trinity_sync.report.charts import Series

NUMBERS = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)
POINTS = st.lists(st.tuples(st.integers(0, 5000), st.one_of(st.none(), NUMBERS)), max_size=60).map(
    lambda points: sorted((float(x), y) for x, y in dict(points).items())
)


def text(value: float) -> str:
    return f"{value:.4g}"


def positions(drawing: str) -> list[tuple[float, float]]:
    lines = [pair.split(",") for found in re.findall(r'polyline points="([^"]*)"', drawing) for pair in found.split()]
    spots = re.findall(r'circle cx="([^"]*)" cy="([^"]*)"', drawing)
    spots += re.findall(r"M([\d.-]+),([\d.-]+)h0", drawing)
    return [(float(x), float(y)) for x, y in [*lines, *spots]]


@given(low=NUMBERS, high=NUMBERS)
@example(low=0.0, high=1.2e-38)
@example(low=0.0, high=5e-324)
def test_ticks_are_few_rising_and_hold_the_values(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    values, (first, last) = charts.ticks(low, high)
    assert values == sorted(set(values))
    assert 2 <= len(values) <= 9
    slack = (last - first) * 1e-6
    assert first - slack <= low <= high <= last + slack


@given(low=st.floats(1e-9, 1e6), ratio=st.floats(1, 1e9))
def test_log_ticks_are_powers_of_ten_and_hold_the_values(low: float, ratio: float) -> None:
    values, (first, last) = charts.log_ticks(low, low * ratio)
    assert 2 <= len(values) <= 8
    assert first <= low * (1 + 1e-6)
    assert low * ratio <= last * (1 + 1e-6)


@given(points=POINTS, style=st.sampled_from(["line", "faint", "steps", "dots"]), log=st.booleans())
def test_every_point_lies_within_the_picture(points: list, style: str, log: bool) -> None:
    drawing = charts.line_chart([Series(name="a", points=points, style=style)], label="a", y_format=text, log=log)
    for x, y in positions(drawing):
        assert 0 <= x <= charts._WIDTH
        assert 0 <= y <= charts._HEIGHT


def test_a_missing_value_breaks_the_line() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 1.0), (5.0, 2.0)]
    drawing = charts.line_chart([Series(name="a", points=points)], label="a", y_format=text)
    assert drawing.count("<polyline") == 2


def test_values_are_on_hover() -> None:
    drawing = charts.line_chart([Series(name="reward", points=[(3.0, 0.5)])], label="a", y_format=text)
    assert "<title>step 3: reward 0.5</title>" in drawing


@pytest.mark.parametrize("style", ["line", "faint", "steps", "dots"])
def test_each_point_that_is_drawn_has_its_value_for_the_script(style: str) -> None:
    points = [(1.0, 0.5), (2.0, None), (3.0, 0.75), (4.0, 0.25), (4.0, 1.5)]
    drawing = charts.line_chart([Series(name='"a"', points=points, style=style)], label="a", y_format=text)
    assert 'data-name="&quot;a&quot;"' in drawing
    assert 'data-values="1 0.5|3 0.75|4 0.25|4 1.5"' in drawing


def test_the_texts_of_ticks_are_not_cut() -> None:
    points = [(1.0, 90.0), (2.0, 250.0)]
    drawing = charts.line_chart(
        [Series(name="a", points=points)], label="a", y_format=lambda value: f"{value:.0f} long seconds"
    )
    room, longest = float(re.search(r'<line x1="(\d+)"', drawing)[1]), len("250 long seconds")
    assert room > longest * 8


def test_many_curves_have_fewer_points_each() -> None:
    curves = [Series(name=str(n), points=[(float(x), x % 7 + n) for x in range(1000)]) for n in range(50)]
    assert len(charts.line_chart(curves, label="a", y_format=text)) < 300_000


def test_a_long_run_is_thinned() -> None:
    points = [(float(step), float(step % 7)) for step in range(100_000)]
    drawing = charts.line_chart([Series(name="a", points=points)], label="a", y_format=text)
    assert len(drawing) < 50_000


def test_thinned_dots_keep_the_slowest() -> None:
    points = [(float(step), 9.0 if step == 5000 else 1.0) for step in range(10_000)]
    drawing = charts.line_chart([Series(name="a", points=points, style="dots")], label="a", y_format=text)
    heights = [y for _, y in positions(drawing)]
    assert min(heights) < max(heights) - 100


def test_zero_has_no_place_on_a_logarithmic_axis_but_the_rest_is_shown() -> None:
    points = [(1.0, 0.0), (2.0, 0.5)]
    drawing = charts.line_chart([Series(name="a", points=points, style="dots")], label="a", y_format=text, log=True)
    assert drawing.count("h0") == 1


@pytest.mark.parametrize("points", [[], [(1.0, None)]])
def test_a_chart_of_nothing_says_so(points: list) -> None:
    drawing = charts.line_chart([Series(name="a", points=points)], label="a", y_format=text, empty="No reward yet.")
    assert "No reward yet." in drawing
    assert "<svg" not in drawing


def test_curves_that_never_move_are_a_line_of_text() -> None:
    flat = [Series(name=name, points=[(1.0, 0.5), (2.0, None), (3.0, 0.5)]) for name in "ab"]
    drawing = charts.line_chart(flat, label="Mean <reward>", y_format=text)
    assert drawing == '<p class="quiet">Mean &lt;reward&gt;: 0.5 throughout, from step 1 to 3.</p>'
    moving = Series(name="c", points=[(1.0, 0.5), (3.0, 0.6)])
    assert "<svg" in charts.line_chart([*flat, moving], label="a", y_format=text)
    edges = {"low": [(1.0, 0.4), (3.0, 0.4)], "high": [(1.0, 0.6), (3.0, 0.6)]}
    assert "<svg" in charts.line_chart([Series(name="d", points=flat[0].points, **edges)], label="a", y_format=text)


@pytest.mark.parametrize(("at", "ends"), [(1.0, False), (9.0, True)])
def test_the_text_of_a_mark_stays_within_the_picture(at: float, ends: bool) -> None:
    curve = Series(name="a", points=[(0.0, 0.5), (9.0, 0.6)])
    drawing = charts.line_chart([curve], label="a", y_format=text, marks={at: "resumed"})
    (found,) = re.findall(r"<text ([^>]*)>resumed</text>", drawing)
    assert ('text-anchor="end"' in found) == ends


@given(points=POINTS, by=st.floats(0, 1e6))
def test_a_band_lies_within_the_picture_around_its_curve(points: list, by: float) -> None:
    known = [(x, y) for x, y in points if y is not None]
    low, high = [(x, y - by) for x, y in known], [(x, y + by) for x, y in known]
    drawing = charts.line_chart([Series(name="a", points=points, low=low, high=high)], label="a", y_format=text)
    corners = [pair.split(",") for found in re.findall(r'<polygon points="([^"]*)"', drawing) for pair in found.split()]
    assert len(corners) == (2 * len(known) if "<svg" in drawing else 0)
    for x, y in corners:
        assert 0 <= float(x) <= charts._WIDTH
        assert 0 <= float(y) <= charts._HEIGHT


def test_a_thinned_curve_keeps_its_extremes() -> None:
    points = [(float(step), {5000: 9.0, 7000: -9.0}.get(step, float(step % 2))) for step in range(10_000)]
    drawing = charts.line_chart([Series(name="a", points=points)], label="a", y_format=text)
    heights = [y for _, y in positions(drawing)]
    assert max(heights) - min(heights) > 150


def test_stacked_bars_are_as_high_as_their_sum() -> None:
    drawing = charts.bar_chart([1.0, 2.0], {"a": [1.0, 1.0], "b": [1.0, 3.0]}, label="a", y_format=text)
    bars = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', drawing.split('role="img"')[1]
    )
    heights: dict[str, float] = {}
    for x, _, height in bars:
        heights[x] = heights.get(x, 0) + float(height)
    first, second = heights.values()
    assert second == pytest.approx(2 * first, abs=0.3)


def test_bars_of_a_long_run_are_means_of_neighbouring_steps() -> None:
    xs = [float(step) for step in range(1, 1001)]
    drawing = charts.bar_chart(xs, {"a": [2.0] * 1000}, label="a", y_format=text)
    assert drawing.count("<title>") <= 60
    assert "step 1 to 17: a 2" in drawing


def test_names_are_escaped() -> None:
    drawing = charts.line_chart(
        [Series(name=f"<b>{index}", points=[(1.0, 1.0)]) for index in range(2)], label='"x', y_format=text
    )
    assert "<b>" not in drawing
    assert "&lt;b&gt;0" in drawing
    assert 'aria-label="&quot;x"' in drawing
