"""When a validation takes place, and what explorers are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.samples.helpers import sample
from trinity_sync.errors import RunError
from trinity_sync.explorer.validation import Validation, ValidationSettings
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.metrics import ValidationTimes
from trinity_sync.samples.record import Drawing, Prompt, Purpose

PROMPTS = [Prompt(index=index, text=str(index)) for index in range(5)]


class Pool:
    """Explorers that hold the version of a step."""

    def __init__(self, held: int) -> None:
        self.held = held
        self.asked: list[tuple[list[int], int, Drawing]] = []

    def generate(
        self, step: int, prompts: Sequence[Prompt], samples_per_prompt: int, deliver: object, drawing: Drawing
    ) -> SampleBatch:
        self.asked.append(([prompt.index for prompt in prompts], samples_per_prompt, drawing))
        return SampleBatch.of(
            sample(step, prompt.index, number, version=(0, self.held), reward=float(prompt.index))
            for prompt in prompts
            for number in range(samples_per_prompt)
        )


class Mode:
    deliver = None


def validation(pool: Pool, **changes: Any) -> Validation:
    times = ValidationTimes(**{"interval": 4, "last": 10, "at_start": True} | changes)
    settings = ValidationSettings(times=times, samples_per_prompt=2, temperature=0.5, at_a_time=5)
    return Validation(PROMPTS, pool, Mode(), settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("interval", "steps"), [(4, [4, 8, 10]), (5, [5, 10]), (0, [10]), (20, [10])])
def test_every_so_many_steps_and_the_last_are_validated(interval: int, steps: list[int]) -> None:
    found = validation(Pool(0), interval=interval)
    assert [step for step in range(1, 11) if found.due(step)] == steps


def test_all_prompts_are_asked_a_few_at_a_time_with_random_numbers_of_their_own() -> None:
    pool = Pool(held=8)
    metrics = validation(pool).run(8)
    drawing = Drawing(purpose=Purpose.VALIDATION, temperature=0.5)
    assert pool.asked == [([0, 1], 2, drawing), ([2, 3], 2, drawing), ([4], 2, drawing)]
    assert (metrics["val/samples"], metrics["val/reward/mean"]) == (10.0, 2.0)


def test_samples_of_its_first_prompts_are_written_out_with_a_mark() -> None:
    done = validation(Pool(held=8))
    done.run(8)
    lines = done.excerpt(2)
    assert [(line["prompt"], line["sample"], line["text"]) for line in lines] == [
        (prompt, number, str(prompt)) for prompt in (0, 1) for number in (0, 1)
    ]
    assert all((line["validation"], line["version"], line["advantage"]) == (True, 8, None) for line in lines)


def test_samples_of_another_version_are_no_validation() -> None:
    with pytest.raises(RunError, match="version 7 made samples for the validation of version 8"):
        validation(Pool(held=7)).run(8)
