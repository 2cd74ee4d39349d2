"""The data of a supervised run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.explorer.helpers import ARCHITECTURE
from trinity_sync.models.factory import make_model
from trinity_sync.tasks.pairs import PairsTask
from trinity_sync.trainer.sft import PairsData

PAIRS, BATCH = 10, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 0, tmp_path_factory.mktemp("models") / "model")


def data(folder: Path, model: Path) -> PairsData:
    """As a run makes it when it starts, whether or not it is resumed."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{10 + n}=", "response": f"{10 + n}"}) + "\n" for n in range(PAIRS)))
    task = PairsTask(path, "prompt", "response", 0)
    return PairsData(task, str(model), batch_size=BATCH, max_length=32, trust_remote_code=False)


def prompts(source: PairsData, steps: range) -> list[tuple[int, ...]]:
    batches = [source.batch(step) for step in steps]
    return [tuple(batch.prompt_ids(row).tolist()) for batch in batches for row in range(BATCH)]


def test_a_resumed_run_goes_on_with_the_pairs_that_come_next(tmp_path: Path, model: Path) -> None:
    """In the middle of an epoch, and after its end: nothing is lost and nothing seen twice."""
    whole = prompts(data(tmp_path, model), range(1, 11))
    for resumed_after in (1, 2, 3, 5):
        before = prompts(data(tmp_path, model), range(1, resumed_after + 1))
        assert before + prompts(data(tmp_path, model), range(resumed_after + 1, 11)) == whole
    for epoch in range(4):
        assert len(set(whole[epoch * PAIRS : (epoch + 1) * PAIRS])) == PAIRS
