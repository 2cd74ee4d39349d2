"""Spans of tokens by version: as tables of many samples they are what they are one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples.helpers import sample
from trinity_sync.samples.batch import SampleBatch, Span, VersionSpans


@st.composite
def spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """The spans of a sample, end to end."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    ends = np.cumsum(lengths).tolist()
    steps = draw(st.lists(st.integers(0, 9), min_size=len(ends), max_size=len(ends)))
    return tuple(zip([0, *ends[:-1]], ends, steps, strict=True))


ALL = st.lists(spans(), max_size=6)


@given(ALL)
def test_each_sample_has_its_own_and_is_as_old_as_its_oldest(made: list[tuple[Span, ...]]) -> None:
    table = VersionSpans.of(made)
    assert [table.of_sample(index) for index in range(len(table))] == made
    assert table.oldest.tolist() == [min(step for _, _, step in one) for one in made]
    assert table.mixed.tolist() == [len(one) > 1 for one in made]


@given(st.lists(ALL, min_size=1, max_size=3), st.randoms())
def test_parts_are_put_together_and_samples_picked_out(parts: list[list[tuple[Span, ...]]], random: object) -> None:
    together = VersionSpans.concatenate([VersionSpans.of(part) for part in parts])
    flat = [one for part in parts for one in part]
    assert [together.of_sample(index) for index in range(len(together))] == flat
    rows = np.array([row for row in range(len(flat)) if random.random() < 0.5][::-1], np.int64)  # type: ignore[attr-defined]
    picked = together.take(rows)
    assert [picked.of_sample(index) for index in range(len(picked))] == [flat[row] for row in rows]


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 9))
def test_of_one_version_each_sample_is_one_span(lengths: list[int], step: int) -> None:
    whole = VersionSpans.whole(np.array(lengths, np.int64), step)
    assert [whole.of_sample(index) for index in range(len(whole))] == [((0, length, step),) for length in lengths]


@given(spans())
def test_a_batch_keeps_them_and_takes_the_oldest_for_the_samples_version(made: tuple[Span, ...]) -> None:
    from dataclasses import replace

    length = made[-1][1]
    one = sample(number=1, response_ids=tuple(range(length)), version=(2, min(step for _, _, step in made)))
    mixed = replace(one, spans=made)
    plain = sample(version=(2, 4))
    batch = SampleBatch.of([mixed, plain])
    assert list(SampleBatch.concatenate([batch, batch]).take(np.array([2, 1]))) == [mixed, plain]
    assert batch.version_steps.tolist() == [mixed.version[1], 4]
    assert plain.spans == ((0, 2, 4),)


def test_of_no_samples_there_is_nothing() -> None:
    none = VersionSpans.of([])
    assert (len(none), none.oldest.tolist(), none.mixed.tolist()) == (0, [], [])
    with pytest.raises(IndexError):
        none.of_sample(0)
