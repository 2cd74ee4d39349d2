from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.report import run_charts
from trinity_sync.report.figures import figures
from trinity_sync.report.run_data import Run, Sweep
from trinity_sync.report.sweep_page import compare

CURVES = st.lists(
    st.dictionaries(st.integers(0, 40).map(float), st.floats(-10, 10), max_size=20).map(lambda ys: sorted(ys.items())),
    max_size=5,
)


def job(name: int, *overrides: str, seed: int | None = 0, status: str = "completed", blocked: float = 1.0) -> Run:
    run = Run(
        path=Path(f"/sweep/{name}"),
        record={"seed": seed},
        status=status,
        config_text="",
        config={"seed": seed},
        overrides=[*overrides, "trainer.steps=9"],
        events=[synthetic.event("publish", version=1, blocked_s=blocked)],
    )
    run.summary["steps"] = 9
    return run


def sweep(*runs: Run) -> Sweep:
    return Sweep(path=Path("/sweep"), runs=[*runs])


def test_jobs_that_differ_by_their_seed_are_one_row() -> None:
    runs = [
        job(n, f"sync={mode}", f"seed={seed}", seed=seed, blocked=n + 1.0)
        for n, (mode, seed) in enumerate((mode, seed) for mode in ("memory", "nccl") for seed in (3, 4))
    ]
    comparison = compare(sweep(*runs))
    first, second = comparison.rows
    assert (first.settings, first.jobs, first.seeds, first.size) == (("sync=memory",), ["0", "1"], [3, 4], "2 seeds")
    assert (first.figures["blocked_s"].value, second.figures["blocked_s"].low) == (1.5, 3.0)
    assert (first.marks["blocked_s"], "blocked_s" in second.marks) == ("best", False)
    assert [row.jobs for row in comparison.jobs] == [["0"], ["1"], ["2"], ["3"]]
    assert not any(row.marks for row in comparison.jobs)
    assert (first.label, first.status, first.steps) == ("sync=memory (2 seeds)", "completed", "9")


@pytest.mark.parametrize("seed", ["seed=1", "+seed=1", "++seed=1"])
def test_a_sweep_of_seeds_alone_is_one_row(seed: str) -> None:
    comparison = compare(sweep(job(0, "seed=0"), job(1, seed, seed=1)))
    (row,) = comparison.rows
    assert (row.settings, row.size, row.label) == ((), "2 seeds", "all jobs (2 seeds)")
    assert comparison.folded


def test_what_only_ends_in_seed_is_no_seed() -> None:
    assert not compare(sweep(job(0, "task.seed=0"), job(1, "task.seed=1"))).folded


def test_the_same_seed_twice_is_no_second_seed() -> None:
    (row,) = compare(sweep(job(0), job(1))).rows
    assert row.size == "2 jobs, 1 seed"


def test_jobs_whose_settings_are_not_known_stay_by_themselves() -> None:
    runs = [job(0), job(1)]
    for run in runs:
        run.config_text = None
    assert not compare(sweep(*runs)).folded


def test_a_job_that_did_not_complete_does_not_compete() -> None:
    quick = job(0, "a=0", status="failed", blocked=0.1)
    rows = compare(sweep(quick, job(1, "a=1", blocked=1.0), job(2, "a=2", blocked=2.0))).rows
    assert [row.marks.get("blocked_s") for row in rows] == [None, "best", None]


def test_a_row_of_which_a_job_lacks_a_figure_does_not_compete_for_it() -> None:
    never = job(1, "a=0", "seed=1", seed=1)
    never.events = []
    rows = compare(sweep(job(0, "a=0", "seed=0", blocked=0.1), never, job(2, "a=1"), job(3, "a=2", blocked=2.0))).rows
    assert [row.marks.get("blocked_s") for row in rows] == [None, "best", None]
    assert rows[0].status == "completed"


def test_jobs_of_one_row_may_stand_differently() -> None:
    stopped = job(1, "seed=1", seed=1, status="failed")
    stopped.summary["steps"] = 4
    (row,) = compare(sweep(job(0, "seed=0"), stopped)).rows
    assert (row.status, row.steps) == ("1 completed, 1 failed", "4 to 9")


@given(found=CURVES)
def test_a_folded_curve_has_every_place_with_the_mean_inside_its_band(found: list) -> None:
    points = run_charts.fold(found)
    assert [point.x for point in points] == sorted({x for curve in found for x, _ in curve})
    for point in points:
        values = [y for curve in found for x, y in curve if x == point.x]
        assert (point.low, point.high) == (min(values), max(values))
        assert point.low <= point.mean <= point.high
        assert point.mean == pytest.approx(sum(values) / len(values), abs=1e-9)


@given(found=CURVES, places=st.lists(st.floats(-5, 45), max_size=20).map(sorted))
def test_a_curve_is_read_off_between_its_points_and_nowhere_else(found: list, places: list[float]) -> None:
    for curve in filter(None, found):
        assert run_charts.read_off(curve, [x for x, _ in curve]) == [(x, pytest.approx(y, abs=1e-9)) for x, y in curve]
        for x, y in run_charts.read_off(curve, places):
            assert curve[0][0] <= x <= curve[-1][0]
            near = [value for at, value in curve if abs(at - x) <= 40]
            assert min(near) - 1e-9 <= y <= max(near) + 1e-9
    assert run_charts.read_off([(0.0, 0.0), (10.0, 5.0)], [-1.0, 4.0, 10.0, 11.0]) == [(4.0, 2.0), (10.0, 5.0)]


def trained(seed: int, pace: float, *, attempts: list | None = None) -> Run:
    steps = [
        {"step": n, "attempt": 0, "time": 100 + n * pace, "timing/step": pace, "reward/mean": seed + n * 0.1}
        for n in range(1, 11)
    ]
    record = {"attempt": 0, "started": 90.0, "ended": 100 + 10 * pace, "attempts": attempts}
    return Run(path=Path(f"/sweep/{seed}"), record=record, metrics=steps)


def test_rewards_of_several_seeds_lie_over_each_other_by_step_and_by_wall_time() -> None:
    runs = [trained(0, 2.0), trained(1, 4.0)]
    by_step = run_charts.by_step(runs)
    assert [point.x for point in by_step] == list(range(1, 11))
    assert (by_step[0].low, by_step[0].high) == (0.1, 1.1)
    by_wall = {point.x: point for point in run_charts.by_wall(runs)}
    assert by_wall[20.0].low < by_wall[20.0].high
    assert max(by_wall) == 40.0
    assert by_wall[40.0].low == by_wall[40.0].high  # the quicker one had ended


def test_starts_and_the_time_between_two_attempts_are_no_wall_time() -> None:
    run = trained(0, 2.0)
    run.record["attempts"] = [
        {"attempt": 0, "started": 60.0, "ended": 120.0},
        {"attempt": 1, "started": 900.0, "ended": 1010.0},
        {"attempt": 2, "started": 2000.0, "ended": 2001.0},
    ]
    run.metrics = [
        *run.metrics,
        {"step": 11, "attempt": 1, "time": 1004.0, "timing/step": 4.0, "reward/mean": 1.0},
        {"step": 12, "attempt": 1, "time": 1007.0, "timing/step": 3.0, "reward/mean": 1.0},
    ]
    assert [point.x for point in run_charts.by_wall([run])][-3:] == [20.0, 24.0, 27.0]
    wall = figures(run)["wall_s"]
    assert wall is not None
    assert wall.value == 30.0
