from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.tasks.pairs import PairsTask


def task_of(folder: Path, rows: list[dict[str, Any]], seed: int = 0) -> PairsTask:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairsTask(path, "prompt", "response", seed)


def test_a_pair_knows_its_place_in_the_file(tmp_path: Path) -> None:
    (pair,) = task_of(tmp_path, [{"prompt": "61=", "response": "61"}]).pairs(1, 1)
    assert pair == ("61=", "61", f"{tmp_path}/pairs.jsonl:1")


def test_a_prompt_may_be_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "61"}]
    assert task_of(tmp_path, [{"prompt": chat, "response": "61"}]).pairs(1, 1)[0].prompt == chat


def test_steps_go_through_the_file_in_an_order_of_seed_and_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "response": "x"} for number in range(40)]
    task = task_of(tmp_path, rows)
    epochs = [[pair.prompt for step in steps for pair in task.pairs(step, 20)] for steps in ((1, 2), (3, 4))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(number) for number in range(40))
    assert epochs[0] != epochs[1]
    assert task_of(tmp_path, rows).pairs(4, 20) == task.pairs(4, 20)
    assert task_of(tmp_path, rows, seed=1).pairs(4, 20) != task.pairs(4, 20)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "61="},
        {"prompt": "61=", "response": 61},
        {"prompt": "61=", "response": ""},
        {"prompt": 61, "response": "61"},
    ],
)
def test_a_row_that_is_no_pair_is_refused_at_once(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:2[: ]"):
        task_of(tmp_path, [{"prompt": "61=", "response": "61"}, row])
