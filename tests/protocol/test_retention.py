"""Retention: what stays and why, as a pure function."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.protocol.retention import (
    CheckpointFacts,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepVersions,
    KeepWithinBudget,
    Policy,
    decide,
    make_policies,
)

NOW = 10_000.0


def full(step: int, **facts: object) -> CheckpointFacts:
    return CheckpointFacts(**{"step": step, "kind": FULL, "created": NOW, "bytes": 10, **facts})  # type: ignore[arg-type]


def weights(step: int, **facts: object) -> CheckpointFacts:
    return full(step, **{"kind": STATE_DICT, **facts})


def kept(checkpoints: list[CheckpointFacts], *policies: Policy, **options: int) -> list[int]:
    return [decision.step for decision in decide(checkpoints, policies, NOW, **options) if decision.keep]


def test_keep_last_keeps_the_newest_whatever_order_they_are_given_in() -> None:
    assert kept([full(30), full(10), full(20)], KeepLast(2)) == [20, 30]


def test_keep_every_keeps_multiples_and_the_newest() -> None:
    assert kept([full(step) for step in (5, 10, 15, 20, 25)], KeepEvery(10)) == [10, 20, 25]


def test_keep_best_prefers_the_newer_of_equals() -> None:
    rewards = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1}
    checkpoints = [full(step, metrics={"reward/mean": reward}) for step, reward in rewards.items()]
    assert kept(checkpoints, KeepBest("reward/mean", 1, "max")) == [3, 4]


def test_keep_best_can_look_for_the_least() -> None:
    checkpoints = [full(step, metrics={"loss": loss}) for step, loss in {1: 0.5, 2: 0.1, 3: 0.9}.items()]
    assert kept(checkpoints, KeepBest("loss", 1, "min")) == [2, 3]


@pytest.mark.parametrize("metrics", [{}, {"reward/mean": None}, {"reward/mean": math.nan}, {"reward/mean": math.inf}])
def test_keep_best_keeps_what_it_cannot_rate_and_counts_it_not(metrics: dict) -> None:
    checkpoints = [
        full(1, metrics=metrics),
        full(2, metrics={"reward/mean": 0.1}),
        full(3, metrics={"reward/mean": 0.2}),
        full(4, metrics={"reward/mean": 0.0}),
    ]
    assert kept(checkpoints, KeepBest("reward/mean", 1)) == [1, 3, 4]
    assert kept(checkpoints, KeepBest("reward/mean", 1), KeepLast(2)) == [1, 3, 4]
    assert kept(checkpoints, KeepBest("reward/mean", 1), KeepWithinBudget(20)) == [3, 4]


def warned(checkpoints: list[CheckpointFacts], *policies: Policy) -> list[str]:
    return [text for decision in decide(checkpoints, policies, NOW) for text in decision.warnings]


def test_a_metric_that_no_checkpoint_has_is_warned_of_with_the_first_one() -> None:
    (text,) = warned([full(1, metrics={"loss": 1.0, "reward/mean": 0.5})], KeepLast(1), KeepBest("eval/reward"))
    assert "retention.policies.keep_best.metric" in text
    assert "eval/reward" in text
    assert "loss, reward/mean" in text
    # The same words for each later one, so that it is told once.
    more = [full(step, metrics={"reward/mean": 0.5, "loss": 1.0}) for step in (1, 2)]
    assert warned(more, KeepLast(1), KeepBest("eval/reward")) == [text]


def test_a_metric_that_is_no_number_is_warned_of() -> None:
    (text,) = warned(
        [full(1, metrics={"loss": 1.0}), full(2, metrics={"loss": math.nan})], KeepBest("loss", mode="min")
    )
    assert "retention.policies.keep_best.metric" in text
    assert "not a number" in text


def test_a_metric_that_all_checkpoints_have_is_not_warned_of() -> None:
    checkpoints = [full(1, metrics={"loss": 1.0}), weights(2), full(3, metrics={"loss": 2.0})]
    assert warned(checkpoints, KeepBest("loss")) == []


def test_keep_for_looks_at_the_age() -> None:
    checkpoints = [full(1, created=NOW - 100), full(2, created=NOW - 10), full(3)]
    assert kept(checkpoints, KeepFor(50.0)) == [2, 3]


def test_one_policy_that_keeps_is_enough() -> None:
    assert kept([full(step) for step in (5, 10, 15, 20)], KeepLast(1), KeepEvery(10)) == [10, 20]


def test_no_policy_at_all_keeps_everything() -> None:
    assert kept([full(1), full(2)]) == [1, 2]


def test_a_limit_of_one_keeps_the_newest() -> None:
    assert kept([full(1), full(2)], KeepLast(1)) == [2]


@pytest.mark.parametrize("flag", ["pinned", "leased", "saving"])
def test_what_is_in_use_stays(flag: str) -> None:
    assert kept([full(1, **{flag: True}), full(2), full(3)], KeepLast(1)) == [1, 3]


def test_state_dicts_are_not_counted_by_keep_last() -> None:
    checkpoints = [full(10), weights(11), weights(12), full(20), weights(21), weights(22), weights(23)]
    assert kept(checkpoints, KeepLast(2)) == [10, 20, 22, 23]


def test_how_many_state_dicts_stay_can_be_chosen() -> None:
    assert kept([weights(step) for step in (1, 2, 3, 4)], KeepLast(1), keep_state_dicts=3) == [2, 3, 4]


def test_the_newest_weights_stay_even_if_none_are_asked_for() -> None:
    assert kept([full(1), weights(2), weights(3)], KeepLast(1), keep_state_dicts=0) == [1, 3]


def test_keep_all_keeps_state_dicts_too() -> None:
    assert kept([weights(1), weights(2), weights(3)], KeepAll()) == [1, 2, 3]


def test_the_budget_takes_the_oldest_that_only_one_policy_keeps_first() -> None:
    checkpoints = [full(10), full(20), full(30), full(40)]
    # 10 and 20 are kept by one policy, 30 by two, 40 is the newest.
    policies = (KeepEvery(10), KeepLast(2))
    assert kept(checkpoints, *policies, KeepWithinBudget(30)) == [20, 30, 40]
    assert kept(checkpoints, *policies, KeepWithinBudget(20)) == [30, 40]
    assert kept(checkpoints, *policies, KeepWithinBudget(10)) == [40]


def test_a_budget_alone_keeps_the_newest_that_fit() -> None:
    assert kept([full(1), full(2), full(3)], KeepWithinBudget(20)) == [2, 3]


def test_a_policy_that_keeps_versions_neither_keeps_nor_deletes_checkpoints() -> None:
    checkpoints = [full(1), full(2), full(3)]
    assert kept(checkpoints, KeepVersions()) == [1, 2, 3]
    assert kept(checkpoints, KeepVersions(), KeepLast(1)) == [3]


def test_the_bytes_of_a_history_count_for_a_budget() -> None:
    checkpoints = [full(1), full(2), full(3)]
    [*_, newest] = decide(checkpoints, (KeepVersions(), KeepWithinBudget(30)), NOW, history=15)
    assert [one.keep for one in decide(checkpoints, (KeepWithinBudget(35),), NOW, history=15)] == [False, True, True]
    assert [one.keep for one in decide(checkpoints, (KeepWithinBudget(20),), NOW, history=15)] == [False, False, True]
    assert newest.warnings == ()
    [*_, newest] = decide(checkpoints, (KeepWithinBudget(20),), NOW, history=15)
    assert "and the history of versions (15 bytes), take 25 bytes" in newest.warnings[0]


def test_a_history_over_the_budget_costs_no_checkpoint() -> None:
    decisions = decide([full(1), full(2)], (KeepWithinBudget(30),), NOW, history=31)
    assert [one.keep for one in decisions] == [True, True]
    assert "and the history of versions (31 bytes), take 51 bytes" in decisions[-1].warnings[0]


def test_a_budget_that_cannot_be_met_is_a_warning_not_a_deletion() -> None:
    decisions = decide([full(1, pinned=True), full(2)], (KeepWithinBudget(5),), NOW)
    assert all(decision.keep for decision in decisions)
    assert decisions[-1].warnings != ()
    assert "20 bytes" in decisions[-1].warnings[0]


def test_a_budget_that_is_met_warns_of_nothing() -> None:
    assert decide([full(1)], (KeepWithinBudget(10),), NOW)[0].warnings == ()


facts = st.builds(
    CheckpointFacts,
    step=st.integers(1, 60),
    kind=st.sampled_from([FULL, STATE_DICT]),
    created=st.floats(0, NOW),
    bytes=st.integers(0, 100),
    metrics=st.dictionaries(st.just("m"), st.none() | st.floats(allow_nan=True)),
    pinned=st.booleans(),
    leased=st.booleans(),
    saving=st.booleans(),
)
folders = st.lists(facts, max_size=12, unique_by=lambda checkpoint: checkpoint.step)
rules = st.lists(
    st.builds(KeepLast, st.integers(1, 4))
    | st.builds(KeepEvery, st.integers(1, 9))
    | st.builds(KeepBest, st.just("m"), st.integers(1, 3), st.sampled_from(["max", "min"]))
    | st.builds(KeepFor, st.floats(1, NOW))
    | st.builds(KeepWithinBudget, st.integers(1, 500))
    | st.just(KeepAll()),
    max_size=4,
)


@given(folders, rules, st.integers(0, 3))
def test_what_must_not_go_never_goes(checkpoints: list[CheckpointFacts], policies: list, state_dicts: int) -> None:
    decisions = decide(checkpoints, policies, NOW, keep_state_dicts=state_dicts)
    gone = {decision.step for decision in decisions if not decision.keep}
    assert [decision.step for decision in decisions] == sorted(checkpoint.step for checkpoint in checkpoints)
    assert all(decision.reasons for decision in decisions)
    assert not gone & {c.step for c in checkpoints if c.pinned or c.leased or c.saving}
    assert not gone & {max((c.step for c in checkpoints), default=0)}
    assert not gone & {max((c.step for c in checkpoints if c.kind == FULL), default=0)}


@given(folders, rules)
def test_deciding_again_about_what_stayed_deletes_nothing_more(
    checkpoints: list[CheckpointFacts], policies: list
) -> None:
    stays = {decision.step for decision in decide(checkpoints, policies, NOW) if decision.keep}
    left = [checkpoint for checkpoint in checkpoints if checkpoint.step in stays]
    again = {decision.step for decision in decide(left, policies, NOW) if decision.keep}
    if not any(isinstance(policy, KeepWithinBudget) for policy in policies):
        assert again == stays


@given(folders, rules, st.integers(1, 500))
def test_a_budget_is_met_or_warned_of(checkpoints: list[CheckpointFacts], policies: list, budget: int) -> None:
    decisions = decide(checkpoints, [*policies, KeepWithinBudget(budget)], NOW)
    size = {checkpoint.step: checkpoint.bytes for checkpoint in checkpoints}
    staying = sum(size[decision.step] for decision in decisions if decision.keep)
    assert staying <= budget or decisions[-1].warnings


def test_policies_are_made_from_the_configuration() -> None:
    made = make_policies({"keep_last": {"n": 3}, "keep_all": None, "keep_best": {"metric": "m", "n": 2, "mode": "min"}})
    assert made == (KeepLast(3), KeepAll(), KeepBest("m", 2, "min"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"keep_newest": {}}, "keep_newest"),
        ({"keep_last": {"n": 0}}, "keep_last.n"),
        ({"keep_last": {"count": 3}}, "keep_last"),
        ({"keep_best": {"metric": "m", "mode": "most"}}, "keep_best.mode"),
        ({"keep_for": {"seconds": -1}}, "keep_for.seconds"),
        ({"keep_within_budget": {"bytes": 0}}, "keep_within_budget.bytes"),
    ],
)
def test_a_wrong_policy_is_a_configuration_error_that_names_the_key(config: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=f"retention.policies.{named}"):
        make_policies(config)
