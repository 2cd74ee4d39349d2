"""The data of a run in lockstep that leaves groups out: which prompts are answered for a step, and where a resume goes
on.

The explorers are made up; real ones are asked in tests/e2e.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.samples.helpers import sample
from trinity_sync.actors.explorer_client import LoadReport
from trinity_sync.errors import RunError
from trinity_sync.explorer.pool import ExplorerPool
from trinity_sync.explorer.rollout import RolloutData
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.advantages import GroupFilter, group_advantages
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.journal import Journal, StepJournal
from trinity_sync.samples.position import Numbering, Position
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Publisher
from trinity_sync.tasks.base import Task

PROMPTS = 4


class Rows:
    """Prompt number n is ``n``; its samples are worth the same unless n is in `differing`."""

    def prompts_from(self, first: int, count: int) -> list[Prompt]:
        return [Prompt(index=index, text=str(first + index)) for index in range(count)]


class ByStep:
    def __init__(self, *, stable: bool) -> None:
        self._stable = stable

    def prompts(self, step: int, count: int) -> list[Prompt]:
        of = "" if self._stable else f" of {count}"
        return [Prompt(index=index, text=f"{step}:{index}{of}") for index in range(count)]


class Pretend:
    """Explorers whose samples differ for every prompt whose text `differs`."""

    def __init__(self, differs: Any) -> None:
        self._differs = differs
        self.asked: list[list[str]] = []

    def generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        deliver: object,
        journal: StepJournal | None = None,
    ) -> SampleBatch:
        self.asked.append([prompt.text for prompt in prompts])
        return SampleBatch.of(
            sample(step=step, prompt=prompt.index, number=number, reward=float(number and self._differs(prompt.text)))
            for prompt in prompts
            for number in range(samples_per_prompt)
        )


class Mode:
    deliver = None


def third(text: str) -> bool:
    return int(text) % 3 == 0


class Loaded(Pretend):
    """Explorers that hold a version with a digest, and use the journal for the prompts of a call."""

    def __init__(self, *digests: str | None) -> None:
        super().__init__(third)
        self._digests = digests

    def load(self, version: Version, deliver: object) -> list[LoadReport]:
        return [
            LoadReport(
                explorer="a", version=version, digest=digest, bytes_moved=1, total_s=0.0, paused_s=0.0, peak_rss=1
            )
            for digest in self._digests
        ]

    def generate(self, *args: Any, journal: StepJournal | None = None, **_: Any) -> SampleBatch:
        made = None if journal is None else journal.find([prompt.index for prompt in args[1]])
        if made is None:
            made = super().generate(*args)
            if journal is not None:
                journal.append(made)
        return made


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        (["one"], ["one"], False),
        (["one", "one"], ["one", "one"], False),
        (["one"], ["other"], True),
        (["one", "other"], ["one", "other"], True),  # not one version
        ([None], [None], True),  # sync.verify is not full
    ],
)
def test_a_step_is_answered_again_only_with_other_weights(
    tmp_path: Path, before: list[str | None], after: list[str | None], again: bool
) -> None:
    asked, trained = [], []
    for attempt, digests in enumerate((before, after)):
        pool = Loaded(*digests)
        journal = Journal(tmp_path, run="run", made_with="", attempt=attempt, most_bytes=1 << 20, fault=lambda *_: None)
        made = data(pool, Rows(), numbering=Numbering(1, 0, PROMPTS), journal=journal)
        made.load(Version(attempt, 0))
        trained.append(texts(made, made.batch(1)))
        asked.append(len(pool.asked))
        journal.close()
    assert trained[0] == trained[1]
    assert asked == [3, 3 if again else 0]


def data(
    pool: Pretend, task: object, *, numbering: Numbering, batches: int = 5, journal: Journal | None = None
) -> RolloutData:
    return RolloutData(
        cast(Task, task),
        cast(ExplorerPool, pool),
        cast(Publisher, Mode()),
        numbering=numbering,
        samples_per_prompt=2,
        judge=group_advantages,
        group_filter=GroupFilter(wanted=PROMPTS, metric="reward", batches=batches, fill=True) if batches else None,
        journal=journal,
    )


def texts(made: RolloutData, batch: SampleBatch) -> list[str]:
    return [str(line["text"]) for line in made.excerpt(batch, None, 100)][::2]


def test_every_prompt_that_differs_is_trained_on_once_and_in_order() -> None:
    made = data(Pretend(third), Rows(), numbering=Numbering(1, 0, PROMPTS))
    trained = [texts(made, made.batch(step)) for step in range(1, 8)]
    assert [text for step in trained for text in step] == [str(3 * number) for number in range(7 * PROMPTS)]


def test_prompts_are_answered_in_batches_and_those_that_were_not_needed_come_again() -> None:
    pool = Pretend(third)
    made = data(pool, Rows(), numbering=Numbering(1, 0, PROMPTS))
    made.batch(1)
    assert pool.asked == [[str(number) for number in range(first, first + PROMPTS)] for first in (0, 4, 8)]
    drawn = made.drawn()
    assert drawn is not None
    assert (drawn.groups, drawn.flat, drawn.filled, drawn.surplus) == (12, 8, 0, 0)
    made.batch(2)
    assert pool.asked[3][0] == "10"


def test_a_resume_answers_the_same_prompts_and_so_does_a_step_that_is_asked_for_again() -> None:
    whole = data(Pretend(third), Rows(), numbering=Numbering(1, 0, PROMPTS))
    expected = {step: texts(whole, whole.batch(step)) for step in (1, 2, 3, 4)}
    assert texts(whole, whole.batch(4)) == expected[4]

    begun = data(Pretend(third), Rows(), numbering=Numbering(1, 0, PROMPTS))
    for step in (1, 2):
        begun.batch(step)
    position = Position.of_json(json.loads(json.dumps(begun.position(2))))
    going_on, missed, twice = position.in_step(3, PROMPTS)
    assert (missed, twice) == (0, 0)
    again = data(Pretend(third), Rows(), numbering=going_on.numbering)
    assert [texts(again, again.batch(step)) for step in (3, 4)] == [expected[3], expected[4]]
    assert again.position(4) == (whole.position(4))


def test_a_step_at_the_bound_has_as_many_groups_and_is_done_with_all_it_has_asked() -> None:
    pool = Pretend(lambda text: text == "5")
    made = data(pool, Rows(), numbering=Numbering(1, 0, PROMPTS), batches=2)
    assert texts(made, made.batch(1)) == ["0", "1", "2", "5"]
    drawn = made.drawn()
    assert drawn is not None
    assert (drawn.groups, drawn.filled) == (8, 3)
    made.batch(2)
    assert pool.asked[2][0] == "8"


def test_without_a_filter_every_step_has_its_prompts_and_nothing_else_is_drawn() -> None:
    pool = Pretend(third)
    made = data(pool, Rows(), numbering=Numbering(1, 0, PROMPTS), batches=0)
    assert [texts(made, made.batch(step)) for step in (1, 2)] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert made.drawn() is None
    assert made.position(2) == Position.at(3, PROMPTS).to_json()


def test_a_task_that_gives_prompts_by_step_is_asked_for_more_of_the_step() -> None:
    made = data(
        Pretend(lambda text: text in ("1:2", "1:5", "1:7", "1:8")), ByStep(stable=True), numbering=Numbering(1, 0, 4)
    )
    assert texts(made, made.batch(1)) == ["1:2", "1:5", "1:7", "1:8"]


def test_a_task_whose_prompts_hang_on_how_many_are_asked_for_is_refused() -> None:
    made = data(Pretend(lambda text: False), ByStep(stable=False), numbering=Numbering(1, 0, 4))
    with pytest.raises(
        RunError, match=r"first ones of ByStep.prompts\(1, 8\) are others than those of prompts\(1, 4\)"
    ):
        made.batch(1)
