from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_sync.report.run_data import Run
from trinity_sync.report.sweep_page import agreement

DIGESTS = {"0": "aa", "1": "bb", "2": "cc"}


def job(
    number: int, /, digests: dict[str, str] = DIGESTS, *, record: dict[str, Any] | None = None, **config: Any
) -> Run:
    run = Run(
        path=Path(f"/sweep/{number}"),
        record={"seed": 0, "reproducible": True, "threads": 1, **(record or {})},
        config={"seed": 0, "sync": {"mode": "memory", "interval": 1}, "trainer": {"lr": 1}, **config},
    )
    run.summary["digests"] = digests
    return run


@pytest.mark.parametrize(
    "config",
    [
        {"sync": {"mode": "nccl", "interval": 1, "slots": 3}},
        {"sync": {"mode": "memory", "interval": 1, "encoding": "delta"}},
        {"retention": {"policies": {}}},
        {"checkpoint": {"interval": 5, "dir": "/there"}},
        {"name": "b", "live": "off", "tracker": {}, "cluster": {"num_cpus": 1}},
    ],
)
def test_jobs_that_differ_by_what_moves_and_keeps_weights_are_compared(config: dict[str, Any]) -> None:
    found = agreement([job(0), job(1, **config), job(2, {"2": "cc", "9": "zz"})])
    assert found.agree is True
    assert found.text == "digests agree: 3 jobs, 3 versions"
    differs = agreement([job(0), job(1, {**DIGESTS, "1": "no"}, **config)])
    assert differs.agree is False
    assert differs.text == "digests differ: version 1 is bb in job 0, no in job 1"


@pytest.mark.parametrize(
    "other",
    [
        {"sync": {"mode": "memory", "interval": 2}},
        {"sync": {"mode": "memory", "interval": 1, "wire_dtype": "fp32"}},
        {"checkpoint": {"resume_from": "/there"}},
        {"trainer": {"lr": 2}},
        {"record": {"seed": 1}},
        {"record": {"threads": 2}},
        {"record": {"packages": {"torch": "2"}}},
        {"record": {"reproducible": False}},
    ],
)
def test_jobs_that_may_compute_something_else_are_not_compared(other: dict[str, Any]) -> None:
    found = agreement([job(0), job(1, {"1": "other"}, **other)])
    assert (found.agree, found.jobs) == (None, 0)
    assert found.text.startswith("digests not compared")


def test_the_first_version_that_differs_is_told_of_all_sets() -> None:
    late, early = {**DIGESTS, "2": "x"}, {**DIGESTS, "1": "y"}
    other_seed = {"record": {"seed": 1}}
    found = agreement([job(0), job(1, late), job(2, **other_seed), job(3, early, **other_seed)])
    assert (found.jobs, found.sets, found.versions) == (4, 2, 6)
    assert found.differs == (1, "2", "bb", "3", "y")


def test_jobs_without_a_version_in_common_say_nothing() -> None:
    assert agreement([job(0, {"1": "bb"}), job(1, {"2": "cc"}), job(2, {})]).agree is None


def test_several_sets_are_counted() -> None:
    found = agreement([job(0), job(1), job(2, record={"seed": 1}), job(3, record={"seed": 1})])
    assert found.text == "digests agree: 4 jobs in 2 sets, 6 versions"
