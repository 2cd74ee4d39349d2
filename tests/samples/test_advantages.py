from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.samples.helpers import sample
from trinity_sync.samples.advantages import group_advantages
from trinity_sync.samples.batch import SampleBatch

REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=5)


def batch_of(groups: list[list[float]] | list[list[float | None]]) -> SampleBatch:
    return SampleBatch.of(
        sample(prompt=prompt, number=number, reward=reward)
        for prompt, rewards in enumerate(groups)
        for number, reward in enumerate(rewards)
    )


@given(groups=REWARDS)
def test_advantages_are_those_of_the_formula_in_torch(groups: list[list[float]]) -> None:
    expected = []
    for rewards in groups:
        group = torch.tensor(rewards, dtype=torch.float64)
        expected += ((group - group.mean()) / (group.std() + 1e-4)).tolist()
    assert group_advantages(batch_of(groups)) == pytest.approx(expected, abs=1e-9)


@given(groups=REWARDS)
def test_without_normalisation_the_mean_is_taken_off(groups: list[list[float]]) -> None:
    expected = [reward - np.mean(rewards) for rewards in groups for reward in rewards]
    assert group_advantages(batch_of(groups), normalise=False) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("normalise", [True, False])
@given(reward=st.floats(-1e3, 1e3), size=st.integers(1, 16))
def test_equal_rewards_teach_exactly_nothing(normalise: bool, reward: float, size: int) -> None:
    assert not group_advantages(batch_of([[reward] * size]), normalise=normalise).any()


def test_a_group_is_found_wherever_its_samples_are() -> None:
    batch = batch_of([[0.0, 1.0, 1.0], [5.0, 2.0, 3.0]])
    order = np.array([4, 0, 3, 2, 5, 1])
    assert group_advantages(batch.take(order)) == pytest.approx(group_advantages(batch)[order])


def test_the_same_prompt_number_of_two_steps_is_two_groups() -> None:
    batch = SampleBatch.of(sample(step=step, number=number, reward=float(step)) for step in (1, 2) for number in (0, 1))
    assert group_advantages(batch).tolist() == [0.0] * 4


def test_a_batch_without_samples_has_no_advantages() -> None:
    assert group_advantages(SampleBatch.of([])).shape == (0,)


@pytest.mark.parametrize("normalise", [True, False])
@given(groups=REWARDS, data=st.data())
def test_a_sample_without_a_reward_teaches_nothing_and_the_others_as_if_it_were_not_there(
    normalise: bool, groups: list[list[float]], data: st.DataObject
) -> None:
    some = [[data.draw(st.sampled_from([reward, None])) for reward in rewards] for rewards in groups]
    judged = np.array([reward is not None for rewards in some for reward in rewards])
    left = [[reward for reward in rewards if reward is not None] for rewards in some]
    found = group_advantages(batch_of(some), normalise=normalise)
    assert not found[~judged].any()
    assert found[judged] == pytest.approx(group_advantages(batch_of(left), normalise=normalise), abs=1e-12)
