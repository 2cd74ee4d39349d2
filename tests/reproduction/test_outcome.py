"""Two outcomes are equal when all that the old one has is there, bit for bit, and there is something to compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.reproduction.outcome import DIGEST, Outcome, ValueDifference, compare, computed, read_outcome

digests = st.dictionaries(st.integers(0, 6), st.sampled_from("abc"))
numbers = st.none() | st.integers(-3, 3) | st.sampled_from([0.1, 0.1 + 1e-17, 0.30000000000000004, 0.3])
metrics = st.dictionaries(st.integers(1, 6), st.dictionaries(st.sampled_from(["loss", "reward/mean"]), numbers))
outcomes = st.builds(Outcome, digests=digests, metrics=metrics)


@given(outcomes)
def test_an_outcome_equals_itself_where_it_has_anything(outcome: Outcome) -> None:
    comparison = compare(outcome, outcome)
    anything = bool(outcome.digests) or any(outcome.metrics.values())
    assert comparison.equal == anything
    assert comparison.unequal == comparison.absent == ()


@given(outcomes, outcomes)
def test_two_are_equal_exactly_where_the_new_one_has_all_of_the_old_one(old: Outcome, new: Outcome) -> None:
    newest = max(new.digests or new.metrics, default=-1)
    same = all(
        new.digests.get(step, digest if step <= newest else None) == digest for step, digest in old.digests.items()
    ) and all(new.metrics.get(step) == values for step, values in old.metrics.items())
    anything = bool({*old.digests} & {*new.digests}) or any(old.metrics.values())
    assert compare(old, new).equal == (same and anything)


@given(outcomes, outcomes, st.integers(0, 6))
def test_what_comes_after_a_step_does_not_count_up_to_it(old: Outcome, new: Outcome, step: int) -> None:
    whole, part = compare(old, new), compare(old.up_to(step), new)
    assert part.unequal == tuple(one for one in whole.unequal if one.step <= step)
    assert part.absent == tuple(at for at in whole.absent if at <= step)


def test_a_version_that_a_stop_has_saved_is_passed_over_where_a_later_one_follows() -> None:
    stopped = Outcome(digests={0: "a", 3: "b", 4: "c"})
    assert compare(stopped, Outcome(digests={0: "a", 4: "c"})).equal
    assert compare(stopped, Outcome(digests={0: "a"})).absent == (3, 4)
    assert not compare(Outcome(digests={3: "b"}), Outcome(digests={4: "c"})).equal


def test_a_run_whose_versions_nobody_loaded_is_repeated_without_versions() -> None:
    old = Outcome(digests={0: "a", 1: "b", 2: "c"}, metrics={1: {"loss": 1.0}, 2: {"loss": 2.0}})
    assert compare(old, Outcome(metrics=old.metrics)).equal
    assert compare(old, Outcome(metrics={1: {"loss": 1.0}})).absent == (2,)
    assert compare(Outcome(digests=old.digests), Outcome()).absent == (0, 1, 2)


def test_the_first_version_and_the_first_metrics_that_differ_are_told() -> None:
    old = Outcome(digests={0: "a", 1: "b", 2: "c"}, metrics={1: {"loss": 1.0, "reward/mean": 0.5}, 2: {"loss": 2.0}})
    new = Outcome(digests={0: "a", 1: "x", 2: "y"}, metrics={1: {"loss": 1.5, "reward/mean": 0.5}, 2: {"loss": 9.0}})
    comparison = compare(old, new)
    assert comparison.first_version == ValueDifference(1, DIGEST, "b", "x")
    assert comparison.first_metrics == [ValueDifference(1, "loss", 1.0, 1.5)]
    assert (comparison.versions, comparison.values) == (3, 3)


def test_a_metric_that_only_one_of_them_has_differs() -> None:
    old, new = Outcome(metrics={1: {"loss": 1.0}}), Outcome(metrics={1: {"loss": 1.0, "entropy": None}})
    assert compare(old, new).first_metrics == [ValueDifference(1, "entropy", None, None)]
    assert compare(new, old).first_metrics == [ValueDifference(1, "entropy", None, None)]


def test_versions_that_only_the_new_one_published_say_nothing() -> None:
    assert compare(Outcome(digests={0: "a"}), Outcome(digests={0: "a", 3: "b"})).equal


def test_what_is_measured_is_not_what_is_computed() -> None:
    line = {
        "attempt": 0, "step": 3, "time": 17.0, "loss": 0.5, "reward/mean": None, "staleness/max": 0,
        "timing/step": 1.5, "samples/waited_s": 0.1, "samples/ready": 2.0, "perf/cpu_memory_used_gb": 0.3,
        "mfu": 0.1, "note": "text",
    }  # fmt: skip
    assert computed(line) == {"loss": 0.5, "reward/mean": None, "staleness/max": 0}


def test_a_folder_has_what_its_logs_have(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.jsonl", {"step": 1, "attempt": 0, "time": 1.0, "loss": 0.25})
    _write(
        tmp_path / "events.jsonl",
        {"event": "publish", "version": 0, "mode": "memory", "encoding": "full", "digest": "a"},
        {"event": "commit", "step": 1, "kind": "full", "digest": "b"},
    )
    outcome = read_outcome(tmp_path, {"last_version": {"step": 1, "digest": "other"}})
    assert outcome == Outcome(digests={0: "a", 1: "b"}, metrics={1: {"loss": 0.25}})
    assert outcome.steps == 1


def test_without_logs_the_record_has_the_last_version(tmp_path: Path) -> None:
    assert read_outcome(tmp_path, {"last_version": {"step": 7, "digest": "d"}}) == Outcome(digests={7: "d"})
    assert read_outcome(tmp_path, {}).steps == 0


def test_a_damaged_log_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("no json\n{}\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 1"):
        read_outcome(tmp_path, {})


def _write(path: Path, *lines: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
