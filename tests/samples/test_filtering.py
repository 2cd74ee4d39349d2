"""Dynamic sampling: which groups are left out, when more are drawn, and what becomes of a step that finds too few."""

from __future__ import annotations

from typing import Any

import pytest

from tests.samples.helpers import sample
from trinity_sync.errors import RunError
from trinity_sync.samples.advantages import GroupChoice, GroupFilter, LengthPenalty
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import drawn_metrics


def group_filter(**changes: Any) -> GroupFilter:
    return GroupFilter(**({"wanted": 2, "metric": "reward", "batches": 2, "fill": True} | changes))


def groups(*rewards: tuple[float | None, ...]) -> SampleBatch:
    return SampleBatch.of(
        sample(prompt=prompt, number=number, reward=reward, error="" if reward is not None else "it raised")
        for prompt, of_prompt in enumerate(rewards)
        for number, reward in enumerate(of_prompt)
    )


def prompts_of(chosen: GroupChoice | None) -> list[int]:
    assert chosen is not None
    return sorted({*chosen.batch.prompts.tolist()})


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        ((1.0, 1.0), False),
        ((0.1, 0.1, 0.1), False),
        ((0.0, 0.0, 1.0), True),
        ((1.0, None, 1.0), False),
        ((1.0, None, 0.0), True),
        ((1.0, None), False),
        ((None, None), False),
    ],
)
def test_a_group_differs_where_two_of_its_judged_samples_do(rewards: tuple[float | None, ...], differs: bool) -> None:
    assert group_filter().differing(groups(rewards)).tolist() == [differs]


def test_the_first_groups_that_differ_are_trained_on_and_those_after_them_are_not_done_with() -> None:
    drawn = groups((1, 1), (0, 1), (0, 0), (1, 0), (0, 1), (1, 1))
    chosen = group_filter(batches=3).choose(1, drawn)
    assert prompts_of(chosen) == [1, 3]
    assert chosen is not None
    assert chosen.used == 4
    assert (chosen.drawn.groups, chosen.drawn.flat, chosen.drawn.filled, chosen.drawn.surplus) == (6, 3, 0, 1)
    assert [item.order for item in chosen.batch] == [(1, prompt, number) for prompt in (1, 3) for number in (0, 1)]


def test_more_are_drawn_until_the_bound_and_then_the_first_of_the_others_are_taken() -> None:
    drawn = groups((1, 1), (0, 0), (1, 1), (0, 1))
    assert group_filter(batches=3).choose(1, drawn) is None
    chosen = group_filter(batches=2).choose(1, drawn)
    assert prompts_of(chosen) == [0, 3]
    assert chosen is not None
    assert (chosen.used, chosen.drawn.flat, chosen.drawn.filled) == (4, 3, 1)
    nothing = group_filter(batches=1).choose(1, groups((1, 1), (1, 1)))
    assert prompts_of(nothing) == [0, 1]


def test_a_step_without_enough_groups_ends_the_run_where_it_is_to_and_names_the_keys() -> None:
    with pytest.raises(RunError) as told:
        group_filter(fill=False).choose(7, groups((1, 1), (0, 0), (1, 1), (0, 1)))
    assert str(told.value).startswith(
        "of the 4 prompts that were answered for step 7, 1 have samples whose reward differs, and a step needs 2"
    )
    assert "algorithm.filter_groups.max_num_gen_batches (2)" in str(told.value)
    assert "algorithm.filter_groups.on_shortage=fill" in str(told.value)


def test_what_has_to_differ_is_the_reward_with_its_penalty_the_score_or_whether_it_is_right() -> None:
    batch = SampleBatch.of(
        [
            sample(prompt=0, number=0, reward=1.0, exact=1.0, response_ids=(7, 2)),
            sample(prompt=0, number=1, reward=1.0, exact=1.0, response_ids=(7, 7, 7, 2)),
            sample(prompt=1, number=0, reward=0.2, exact=0.0),
            sample(prompt=1, number=1, reward=0.4, exact=0.0),
            sample(prompt=2, number=0, reward=0.5, exact=0.0),
            sample(prompt=2, number=1, reward=0.5, exact=1.0),
        ]
    )
    overlong = LengthPenalty(longest=4, buffer=2, penalty=1.0)
    found = {
        metric: group_filter(metric=metric, overlong=overlong).differing(batch).tolist()
        for metric in ("reward", "score", "acc")
    }
    assert found == {"reward": [True, True, False], "score": [False, True, False], "acc": [False, False, True]}


def test_a_task_that_does_not_say_what_is_right_cannot_be_filtered_by_it() -> None:
    with pytest.raises(RunError, match="metric is acc, but the task does not say"):
        group_filter(metric="acc").differing(SampleBatch.of([sample(exact=None), sample(number=1, exact=None)]))
    failed = SampleBatch.of([sample(exact=None, reward=0.0, error="it raised"), sample(number=1), sample(number=2)])
    assert group_filter(metric="acc").differing(failed).tolist() == [False]


def test_rewards_are_measured_over_all_that_was_drawn() -> None:
    chosen = group_filter(batches=3).choose(1, groups((1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (1, 1)))
    assert chosen is not None
    found = drawn_metrics(chosen.drawn)
    assert found["reward/mean"] == pytest.approx(10 / 12)
    assert found["reward/flat_groups"] == pytest.approx(4 / 6)
    counts = {name.removeprefix("filter_groups/"): value for name, value in found.items() if "groups/" in name[:14]}
    assert counts == {"drawn": 6, "flat": 4, "filled": 0, "surplus": 0}
    assert not [name for name in found if name.startswith("batch/")]
