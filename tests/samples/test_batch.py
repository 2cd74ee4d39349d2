from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given

from tests.samples.helpers import sample, samples
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.record import Sample


@given(items=samples())
def test_a_batch_holds_what_it_was_made_of(items: list[Sample]) -> None:
    assert list(SampleBatch.of(items)) == items


@given(items=samples())
def test_a_batch_survives_pickling(items: list[Sample]) -> None:
    assert list(pickle.loads(pickle.dumps(SampleBatch.of(items)))) == items


@given(first=samples(), second=samples())
def test_concatenation_keeps_all_samples_in_order(first: list[Sample], second: list[Sample]) -> None:
    joined = SampleBatch.concatenate([SampleBatch.of(first), SampleBatch.of(second)])
    assert list(joined) == first + second


def test_concatenation_of_nothing_is_a_batch_without_samples() -> None:
    assert len(SampleBatch.concatenate([]).sorted()) == 0


@given(items=samples())
def test_sorting_is_by_step_prompt_and_sample(items: list[Sample]) -> None:
    assert list(SampleBatch.of(items).sorted()) == sorted(items, key=lambda item: item.order)


@given(items=samples())
def test_order_of_arrival_does_not_matter_once_sorted(items: list[Sample]) -> None:
    backwards = SampleBatch.concatenate([SampleBatch.of([item]) for item in reversed(items)])
    assert list(backwards.sorted()) == list(SampleBatch.of(items).sorted())


def test_samples_of_one_prompt_share_its_tokens() -> None:
    items = [sample(prompt=prompt, number=number, prompt_ids=(1, prompt)) for prompt in (4, 5) for number in range(8)]
    assert len(SampleBatch.of(items).prompt_rows) == 2


def test_taking_samples_leaves_other_prompts_behind() -> None:
    batch = SampleBatch.of([sample(prompt=prompt, prompt_ids=(1, prompt)) for prompt in range(4)])
    taken = batch.take(np.array([3, 1]))
    assert [item.prompt_ids for item in taken] == [(1, 3), (1, 1)]
    assert len(taken.prompt_rows) == 2


def test_a_task_that_does_not_say_what_is_exact_gives_nan() -> None:
    assert np.isnan(SampleBatch.of([sample(exact=None), sample(exact=1.0)]).exact).tolist() == [True, False]


def test_lengths_and_tokens_are_counted() -> None:
    batch = SampleBatch.of([sample(response_ids=(7, 8, 2)), sample(number=1, response_ids=(2,))])
    assert batch.response_lengths.tolist() == [3, 1]
    assert batch.token_count == 4


@pytest.mark.parametrize("accessor", ["prompt_ids", "response_ids", "log_probs_of"])
def test_sequences_of_a_read_only_batch_may_be_written_to(accessor: str) -> None:
    batch = SampleBatch.of([sample()])
    for column in (batch.prompt_rows.ids, batch.responses.ids, batch.log_probs):
        column.flags.writeable = False
    row = getattr(batch, accessor)(0)
    row[0] = 3
    assert getattr(batch, accessor)(0)[0] != 3


def test_pairs_hold_what_they_were_made_of() -> None:
    batch = PairBatch.of([[1, 7], [1]], [[7, 2], [8, 8, 2]])
    assert [batch.prompt_ids(row).tolist() for row in range(len(batch))] == [[1, 7], [1]]
    assert [batch.response_ids(row).tolist() for row in range(len(batch))] == [[7, 2], [8, 8, 2]]
    assert batch.token_count == 5


def test_a_prompt_without_a_response_is_no_pair() -> None:
    with pytest.raises(ValueError, match="2 prompts do not pair with 1 responses"):
        PairBatch.of([[1], [1]], [[2]])
