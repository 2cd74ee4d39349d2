from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.helpers import cut_versions
from trinity_sync.weights.shards import (
    CoverageError,
    Rect,
    Shard,
    check_complete,
    check_cover,
    flat_range,
    row_slice,
    whole,
)


def cells(shards: list[Shard]) -> Counter[tuple[int, int]]:
    """How often each element of the matrix view is held."""
    return Counter(
        (row, col)
        for shard in shards
        for r in shard.rects
        for row in range(r.row, r.row + r.rows)
        for col in range(r.col, r.col + r.cols)
    )


def test_the_matrix_view_has_dim_0_as_rows_and_one_row_below_two_dimensions() -> None:
    views = {shape: whole("w", "BF16", shape).matrix for shape in [(2, 3, 4), (5, 6), (7,), (), (3, 0)]}
    assert views == {(2, 3, 4): (2, 12), (5, 6): (5, 6), (7,): (1, 7), (): (1, 1), (3, 0): (3, 0)}


def test_a_whole_shard_counts_its_bytes() -> None:
    shard = whole("w", "F32", (4, 6))
    assert (shard.rects, shard.numel_local, shard.nbytes) == ((Rect(0, 0, 0, 4, 6),), 24, 96)


def test_a_row_slice_of_a_vector_is_a_range_of_its_one_row() -> None:
    assert row_slice("b", "BF16", (10,), 3, 7).rects == (Rect(0, 0, 3, 1, 4),)


def test_a_flat_range_is_the_end_of_a_row_whole_rows_and_the_beginning_of_one() -> None:
    assert flat_range("w", "BF16", (5, 4), 3, 18).rects == (
        Rect(0, 0, 3, 1, 1),
        Rect(2, 1, 0, 3, 4),
        Rect(26, 4, 0, 1, 2),
    )


def test_a_flat_range_inside_a_row_is_one_rectangle() -> None:
    assert flat_range("w", "BF16", (5, 4), 5, 7).rects == (Rect(0, 1, 1, 1, 2),)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_flat_range_holds_exactly_its_elements_in_order(rows: int, cols: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows * cols))
    stop = data.draw(st.integers(start, rows * cols))
    shard = flat_range("w", "U8", (rows, cols), start, stop)
    elements = [
        row * cols + col
        for r in shard.rects
        for row in range(r.row, r.row + r.rows)
        for col in range(r.col, r.col + r.cols)
    ]
    assert elements == list(range(start, stop))
    assert len(shard.rects) <= 3


@pytest.mark.parametrize("make", [row_slice, flat_range])
def test_ranges_outside_the_tensor_are_refused(make: object) -> None:
    for start, stop in [(-1, 2), (3, 2), (0, 100)]:
        with pytest.raises(ValueError, match=f"^w: .*{start}:{stop} do not lie in"):
            make("w", "BF16", (4, 3), start, stop)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rects", "message"),
    [
        ((Rect(0, 0, 0, 0, 3),), "is empty"),
        ((Rect(0, 3, 0, 2, 3),), "leaves the tensor, whose matrix view is 4 x 3"),
        ((Rect(0, 0, 2, 1, 2),), "leaves the tensor"),
        ((Rect(0, -1, 0, 1, 3),), "leaves the tensor"),
        ((Rect(0, 0, 0, 1, 3), Rect(8, 1, 0, 1, 3)), "must start at byte 6"),
    ],
)
def test_rectangles_that_cannot_be_are_refused(rects: tuple[Rect, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shard("w", "BF16", (4, 3), rects)


@given(cut_versions(), st.randoms())
@settings(deadline=None, max_examples=60)
def test_cover_is_judged_as_by_counting_every_element(version: object, rng: random.Random) -> None:
    parts = [list(layout.shards) for layout in version.layouts]  # type: ignore[attr-defined]
    change = rng.choice(["none", "drop", "repeat"])
    part = rng.choice(parts)
    if part and change == "drop":
        part.pop(rng.randrange(len(part)))
    if part and change == "repeat":
        rng.choice(parts).append(rng.choice(part))
    everything = [shard for part in parts for shard in part]
    wrong = set()
    for shard in everything:
        same = [other for other in everything if other.name == shard.name]
        rows, cols = shard.matrix
        if cells(same) != Counter({(row, col): 1 for row in range(rows) for col in range(cols)}):
            wrong.add(shard.name)
    if not wrong:
        check_cover(parts)
        return
    with pytest.raises(CoverageError) as caught:
        check_cover(parts)
    assert {shard.name for shard in everything if f"{shard.name} (" in str(caught.value)} == wrong


def test_the_message_says_what_is_missing_and_what_is_held_twice() -> None:
    first = [row_slice("a", "BF16", (4, 3), 0, 2), whole("b", "BF16", (2, 2))]
    second = [row_slice("a", "BF16", (4, 3), 3, 4), row_slice("b", "BF16", (2, 2), 1, 2)]
    with pytest.raises(CoverageError, match=r"a \(3 of 12 elements are held by no part\), b \(row 1 is held twice\)"):
        check_cover([first, second])


@pytest.mark.parametrize("spans", [[(0, 3), (2, 4)], [(2, 4), (0, 3)], [(0, 4), (1, 2)], [(1, 2), (0, 4)]])
def test_an_overlap_is_found_where_the_counts_add_up(spans: list[tuple[int, int]]) -> None:
    parts = [[Shard("w", "U8", (2, 4), (Rect(0, 0, start, 1, stop - start),))] for start, stop in spans]
    parts.append([Shard("w", "U8", (2, 4), (Rect(0, 1, 0, 1, 3),))])
    assert sum(shard.numel_local for part in parts for shard in part) == 8
    with pytest.raises(CoverageError, match=r"w \(row 0 is held twice\)"):
        check_cover(parts)


def test_parts_must_agree_on_dtype_and_shape() -> None:
    with pytest.raises(CoverageError, match=r"w \(BF16 2x2 in one part, F32 2x2 in another\)"):
        check_cover([[whole("w", "BF16", (2, 2))], [Shard("w", "F32", (2, 2), ())]])


def test_a_long_list_of_faults_is_cut_and_counted() -> None:
    with pytest.raises(CoverageError, match="and 5 more") as caught:
        check_cover([[Shard(f"w{i:02d}", "BF16", (2, 2), ()) for i in range(25)]])
    assert "w19" in str(caught.value)
    assert "w20" not in str(caught.value)


def test_tensors_without_elements_are_covered_by_nothing() -> None:
    check_cover([[whole("e", "BF16", (0, 4))], [whole("z", "BF16", (3, 0))]])


SAVED = {"a": ("BF16", (4, 3)), "b": ("BF16", (2,)), "n": ("I64", ())}
PARTS = [
    [row_slice("a", "BF16", (4, 3), 0, 2), whole("b", "BF16", (2,))],
    [row_slice("a", "BF16", (4, 3), 2, 4), whole("n", "I64", ())],
]


@pytest.mark.parametrize(
    ("part", "shard", "told"),
    [
        (0, None, None),
        (0, 1, "of 3 tensors 1 missing: b"),
        (1, 0, r"a \(6 of 12 elements are held by no part\)"),
        (1, whole("c", "BF16", (2,)), "of 3 tensors 1 missing: n; 1 not among them: c"),
        (1, whole("n", "I64", (2,)), r"of 3 tensors 1 different: n \(I64 2 instead of I64 scalar\)"),
        (1, whole("n", "F32", ()), r"of 3 tensors 1 different: n \(F32 scalar instead of I64 scalar\)"),
    ],
)
def test_what_is_held_has_to_be_all_that_is_saved(part: int, shard: Shard | int | None, told: str | None) -> None:
    parts = [list(shards) for shards in PARTS]
    if isinstance(shard, int):
        del parts[part][shard]
    elif shard is not None:
        parts[part][-1] = shard
    if told is None:
        check_complete(parts, SAVED)
        return
    with pytest.raises(CoverageError, match=told):
        check_complete(parts, SAVED)


def test_of_many_that_are_missing_a_few_are_named() -> None:
    with pytest.raises(CoverageError, match=r"of 9 tensors 9 missing: t0, t1, t2, t3 and 5 more$"):
        check_complete([], {f"t{number}": ("BF16", (2,)) for number in range(9)})
