from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.tracking import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0, "0 s"),
        (2e-5, "20 us"),
        (0.00125, "1.25 ms"),
        (0.9999, "1 s"),
        (34.04, "34 s"),
        (59.6, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (-2, "-2 s"),
    ],
)
def test_durations(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1240, "1.24 kB"), (999_600, "1 MB"), (16_400_000_000, "16.4 GB")],
)
def test_sizes(value: float | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1.0, "1"), (0.1234, "0.123"), (0.00012, "1.20e-04"), (float("inf"), "-")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert units.number(value) == text


@given(st.floats(min_value=0, max_value=1e9))
def test_no_duration_and_no_size_is_shown_with_an_exponent_or_a_rounded_up_unit(value: float) -> None:
    assert "e+" not in units.seconds(value)
    assert not units.seconds(value).startswith("1000 ")
    assert not units.size(value).startswith("1000 ")
    assert "e+" not in units.size(value)
