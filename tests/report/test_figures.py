from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.report.charts import marks
from trinity_sync.report.figures import BY_KEY, COLUMNS, Figure, detail, figure, figures, fold
from trinity_sync.report.run_data import Run
from trinity_sync.tracking import units

NUMBERS = st.floats(1e-6, 1e6)
MEASURED = st.lists(NUMBERS, min_size=1, max_size=30)
BETTER = st.sampled_from(["lower", "higher"])
LOAD, REWARD = BY_KEY["load_s"], BY_KEY["reward"]


def band(low: float, value: float, high: float) -> Figure:
    return Figure(value=value, low=low, high=high, least=low, most=high, tail=None, count=3)


BANDS = st.lists(NUMBERS, min_size=3, max_size=3).map(lambda values: band(*sorted(values)))


@given(values=MEASURED, column=st.sampled_from(COLUMNS))
def test_a_figure_lies_within_its_band_and_that_within_what_was_measured(values: list[float], column: object) -> None:
    one = figure(column, values)
    assert one is not None
    assert one.least <= one.low <= one.value <= one.high <= one.most
    assert one.count == len(values)


@given(values=MEASURED)
def test_the_tail_is_on_the_bad_side(values: list[float]) -> None:
    slow, rare = figure(LOAD, values), figure(BY_KEY["samples_per_s"], values)
    assert slow.tail >= slow.value
    assert rare.tail <= rare.value


@given(values=st.lists(NUMBERS, min_size=2, max_size=9), data=st.data())
def test_folding_is_the_mean_and_all_of_the_range_in_any_order(values: list[float], data: st.DataObject) -> None:
    jobs = [figure(LOAD, [value]) for value in values]
    one, other = fold(jobs), fold(data.draw(st.permutations(jobs)))
    assert (one.low, one.high, one.least, one.most) == (min(values), max(values)) * 2
    assert one.value == pytest.approx(sum(values) / len(values))
    assert (other.value, other.low, other.high) == (pytest.approx(one.value), one.low, one.high)


def test_folding_one_job_leaves_its_figure_and_of_none_there_is_none() -> None:
    one = figure(LOAD, [1.0, 2.0, 9.0])
    assert fold([one]) is one
    assert fold([None, None]) is None


def test_a_fold_says_how_many_jobs_have_the_figure() -> None:
    one = fold([figure(BY_KEY["steps_to_target"], [step]) for step in (40.0, 50.0, None)])
    assert (one.count, detail(BY_KEY["steps_to_target"], one, 3)) == (2, "± 5, 2 of 3 jobs")


def test_the_spread_of_a_job_is_its_tail_or_its_range() -> None:
    assert detail(LOAD, figure(LOAD, [0.1] * 19 + [0.3]), 1) == "p95 110 ms"
    assert detail(REWARD, figure(REWARD, [0.5, 0.7]), 1) == "± 0.100"
    assert detail(REWARD, figure(REWARD, [0.5, 0.5]), 1) == ""


# marks


@given(rows=st.lists(st.one_of(st.none(), BANDS), max_size=8), better=BETTER, data=st.data())
def test_marks_do_not_depend_on_the_order(rows: list[Figure | None], better: str, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    straight = marks(rows, better, units.seconds)
    assert marks([rows[at] for at in order], better, units.seconds) == [straight[at] for at in order]


@given(rows=st.lists(BANDS, min_size=2, max_size=8), better=BETTER)
def test_the_best_is_marked_alone_or_with_all_that_are_a_tie_with_it(rows: list[Figure], better: str) -> None:
    found = marks(rows, better, repr)
    best = (min if better == "lower" else max)(one.value for one in rows)
    leading = [one for one in rows if one.value == best]
    if len({one.value for one in rows}) == 1:
        assert set(found) == {None}
        return
    level = [any(one.low <= lead.high and lead.low <= one.high for lead in leading) for one in rows]
    assert [mark is not None for mark in found] == level
    assert {mark for mark in found if mark} == {"tie" if sum(level) > 1 else "best"}


@given(rows=st.lists(BANDS, min_size=2, max_size=8))
def test_what_is_best_turns_around_with_the_sign(rows: list[Figure]) -> None:
    turned = [band(-one.high, -one.value, -one.low) for one in rows]
    assert marks(rows, "lower", repr) == marks(turned, "higher", repr)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([band(1, 1, 1)], [None]),
        ([None, band(1, 1, 1)], [None, None]),
        ([band(1, 1, 1), band(1, 1, 1)], [None, None]),
        ([band(1, 2, 3), band(4, 5, 6)], ["best", None]),
        ([band(1, 2, 3), band(3, 5, 6), band(7, 8, 9)], ["tie", "tie", None]),
        ([band(1, 1.0001, 1.0001), band(1.0002, 1.0002, 2), band(3, 3, 3)], ["tie", "tie", None]),
        ([], []),
    ],
)
def test_single_rows_and_columns_that_do_not_vary_mark_nothing_and_ties_are_told(rows: list, expected: list) -> None:
    assert marks(rows, "lower", units.seconds) == expected


# what is measured


def test_the_figures_of_a_run() -> None:
    run = Run(
        path=Path("x"),
        config={"algorithm": {"prompts_per_step": 4, "samples_per_prompt": 8}},
        metrics=[
            {"step": step, "reward/mean": step / 10, "timing/train": 1.0, "timing/step": 4.0} for step in range(1, 13)
        ],
        events=[
            synthetic.event("publish", version=1, blocked_s=0.1, total_s=0.2, bytes_moved=5),
            synthetic.event("load", version=1, paused_s=0.3, total_s=0.4),
            synthetic.event("commit", step=1, blocked_s=0.5, total_s=0.6),
            synthetic.event("commit", step=2, blocked_s=None, total_s="soon"),
        ],
    )
    values = {key: one and one.value for key, one in figures(run).items()}
    assert values == {
        "reward": pytest.approx(0.95),
        **{"loss": None, "validation": None, "validation_loss": None},
        "steps_to_target": None,
        "wall_s": None,
        "samples_per_s": 8.0,
        "not_training": 0.75,
        **{"blocked_s": 0.1, "publish_s": 0.2, "load_s": 0.4, "pause_s": 0.3, "save_blocked_s": 0.5, "save_s": 0.6},
        "bytes_moved": 5.0,
    }


@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [({"kind": "sft", "batch_size": 16}, 8.0), ({"kind": "own"}, None), ({"prompts_per_step": "many"}, None)],
)
def test_samples_are_counted_where_the_settings_say_how_many_a_step_has(algorithm: dict, rate: float | None) -> None:
    steps = [{"step": 1, "timing/step": 2.0}, {"step": 2, "timing/step": 0.0}, {"step": 3}]
    found = figures(Run(path=Path("x"), config={"algorithm": algorithm}, metrics=steps))["samples_per_s"]
    assert (found and found.value) == rate
