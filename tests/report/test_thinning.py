from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.report.charts import thin

VALUES = st.one_of(st.none(), st.floats(-1e9, 1e9))


@given(values=st.lists(VALUES, max_size=80), most=st.integers(4, 30))
def test_few_points_of_the_curve_itself_with_its_ends_and_extremes(values: list[float | None], most: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    thinned = thin(points, most)
    assert len(thinned) <= most
    assert sorted(set(thinned) & set(points), key=lambda point: point[0]) == list(thinned)
    assert thinned[:1] == points[:1]
    assert thinned[-1:] == points[-1:]
    for extreme in (min, max):
        assert extreme((y for _, y in thinned if y is not None), default=None) == extreme(
            (y for y in values if y is not None), default=None
        )


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=50, max_size=80), at=st.integers(1, 48))
def test_a_spike_stays_wherever_it_is(values: list[float], at: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    points[at] = (float(at), 1e10)
    assert points[at] in thin(points, 12)


def test_a_long_gap_stays_one() -> None:
    points = [(float(x), None if 200 <= x < 600 else 1.0) for x in range(1000)]
    thinned = thin(points, 50)
    assert [y for x, y in thinned if 250 <= x < 550] == [None] * sum(250 <= x < 550 for x, _ in thinned) != []


def test_what_fits_stays_as_it_is() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0)]
    assert thin(points, 4) is points
