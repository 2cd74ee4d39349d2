"""The data of a supervised run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.explorer.helpers import ARCHITECTURE
from trinity_sync.models.architecture import make_model
from trinity_sync.samples.position import Position
from trinity_sync.tasks.encoding import PairEncoder
from trinity_sync.tasks.pairs import PairsTask
from trinity_sync.trainer.loop import PairsData

PAIRS, BATCH = 10, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 0, tmp_path_factory.mktemp("models") / "model")


def data(folder: Path, model: Path, position: Mapping[str, Any] | None = None, batch: int = BATCH) -> PairsData:
    """As a run makes it when it starts, whether or not it is resumed."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{10 + n}=", "response": f"{10 + n}"}) + "\n" for n in range(PAIRS)))
    task = PairsTask(path, "prompt", "response", 0)
    encoder = PairEncoder(AutoTokenizer.from_pretrained(model), max_length=32)
    if position is None:
        return PairsData(task, encoder, Position.at(1, batch).numbering)
    found, missed, twice = Position.of_json(position).in_step(position["next"][0], batch)
    assert (missed, twice) == (0, 0)
    return PairsData(task, encoder, found.numbering)


def prompts(source: PairsData, steps: range) -> list[tuple[int, ...]]:
    batches = [source.batch(step) for step in steps]
    return [tuple(batch.prompt_ids(row).tolist()) for batch in batches for row in range(len(batch))]


def test_a_resumed_run_goes_on_with_the_pairs_that_come_next(tmp_path: Path, model: Path) -> None:
    """In the middle of an epoch, and after its end: nothing is lost and nothing seen twice."""
    whole = prompts(data(tmp_path, model), range(1, 11))
    for resumed_after in (1, 2, 3, 5):
        before = prompts(data(tmp_path, model), range(1, resumed_after + 1))
        assert before + prompts(data(tmp_path, model), range(resumed_after + 1, 11)) == whole
    for epoch in range(4):
        assert len(set(whole[epoch * PAIRS : (epoch + 1) * PAIRS])) == PAIRS


def test_a_run_that_goes_on_in_other_batches_meets_the_same_pairs(tmp_path: Path, model: Path) -> None:
    """Twice over: what was counted before the last change still counts."""
    whole = prompts(data(tmp_path, model), range(1, 11))
    first = data(tmp_path, model)
    second = data(tmp_path, model, first.position(2), batch=3)
    third = data(tmp_path, model, second.position(5), batch=7)
    seen = prompts(first, range(1, 3)) + prompts(second, range(3, 6)) + prompts(third, range(6, 9))
    assert seen == whole[: len(seen)]
    assert len(seen) == 2 * BATCH + 3 * 3 + 3 * 7
