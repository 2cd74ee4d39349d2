from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracking import synthetic
from trinity_sync.report import run_charts
from trinity_sync.report.figures import figures
from trinity_sync.report.run_data import Run, Sweep
from trinity_sync.report.sweep_page import best, compare

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
        events=[synthetic.event("publish", version=version, blocked_s=blocked) for version in (1, 2)],
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
    assert [(row.jobs, row.marks.get("blocked_s")) for row in rows] == [(["1"], "best"), (["2"], None), (["0"], None)]


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
    assert (min(by_wall), max(by_wall)) == (4.0, 40.0)
    assert (by_wall[40.0].low, by_wall[40.0].high) == (by_wall[20.0].low, by_step[-1].high)  # the quicker one stays


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


def learnt(number: int, rate: str, seed: int, last: list[float], **other: float) -> Run:
    """A completed job with these rewards; `other`: metrics of its last step."""
    run = job(number, f"trainer.lr={rate}", f"seed={seed}", seed=seed)
    values = [{"step": step, "reward/mean": reward} for step, reward in enumerate(last, 1)]
    run.metrics = [*values[:-1], {**values[-1], **other}]
    return run


STEADY, NOISY = [0.5, 0.51] * 10, [0.1, 0.95] * 10


def test_rows_are_ranked_by_the_mean_of_their_last_ten_steps_and_completed_ones_come_first() -> None:
    runs = [learnt(0, "1", 0, [0.9] * 20), learnt(1, "2", 0, [0.99] * 10 + [0.4] * 10), learnt(2, "3", 0, STEADY)]
    runs[0].status = "failed"
    assert [row.jobs for row in compare(sweep(*runs)).rows] == [["2"], ["1"], ["0"]]


@pytest.mark.parametrize(
    ("other", "marks"),
    [([0.3, 0.31] * 10, ["best", None]), (NOISY, ["tie", "tie"])],
)
def test_a_star_needs_a_difference_above_the_noise_of_the_last_steps(other: list[float], marks: list) -> None:
    rows = compare(sweep(learnt(0, "1", 0, STEADY), learnt(1, "2", 0, other))).rows
    assert [row.marks.get("reward") for row in rows] == marks


def test_a_star_needs_a_difference_above_the_noise_of_the_seeds() -> None:
    seeds = [
        learnt(n, "1" if n < 3 else "2", n % 3, [level] * 20) for n, level in enumerate((0.5, 0.7, 0.9, 0.4, 0.6, 0.8))
    ]
    rows = compare(sweep(*seeds)).rows
    assert [row.marks["reward"] for row in rows] == ["tie", "tie"]
    assert rows[0].figures["reward"].error == pytest.approx(0.2 / 3**0.5)


def test_a_single_measurement_gets_no_star() -> None:
    runs = [learnt(n, f"{n}", 0, STEADY, **{"val/loss": 0.1 * n}) for n in (1, 2)]
    rows = compare(sweep(*runs)).rows
    assert all("validation_loss" in row.figures and "validation_loss" not in row.marks for row in rows)


@pytest.mark.parametrize(("samples", "marks"), [(20, ["tie", "tie"]), (2000, [None, "best"])])
def test_a_validation_has_the_noise_of_its_samples(samples: int, marks: list) -> None:
    runs = [
        learnt(n, f"{n}", 0, STEADY, **{"val/reward/mean": mean, "val/reward/std": 0.5, "val/samples": samples})
        for n, mean in enumerate((0.5, 0.6))
    ]
    assert [row.marks.get("validation") for row in compare(sweep(*runs)).rows] == marks


def test_the_best_is_reproduced_by_a_command_and_doubt_is_said() -> None:
    sure = compare(sweep(learnt(0, "1", 0, [0.3] * 20), learnt(1, "2", 0, STEADY)))
    assert best(sure, str) == ("Reproduce the best, 1: trainer.lr=2", "trinity-sync reproduce /sweep/1")
    doubt = compare(sweep(learnt(0, "1", 0, STEADY), learnt(1, "2", 0, NOISY)))
    text, _ = best(doubt, str) or ("", "")
    assert text.startswith("No job is distinguishable as the best; reproduce the one in the lead, ")
    assert best(compare(sweep(learnt(0, "1", 0, STEADY))), str) is None
    unfinished = learnt(0, "1", 0, STEADY)
    unfinished.status = "running"
    assert best(compare(sweep(unfinished, job(1, "trainer.lr=2", status="failed"))), str) is None
