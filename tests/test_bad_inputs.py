"""The table of inputs that a run has to refuse, see `tests.bad_inputs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_inputs import JSONL, REWARD, ROW, TABLE, WITH_RAY, Bad, make_files, model, reward, tried

ROOT = Path(__file__).parents[1]
LIMIT_S = 240


def check_said(bad: Bad, code: int, said: str, folder: Path) -> None:
    assert code == bad.code, said
    last = said[-3000:]
    assert "error: " in last
    assert [words for words in bad.says if words not in last] == [], last
    assert "Traceback" not in said


LENGTHS = ("task.prompt_length=", "task.response_length=")
COUNTED = [bad for bad in TABLE if bad.given[:2] == JSONL and any(word.startswith(LENGTHS) for word in bad.given)]
"""Cases whose rows are put into tokens, by processes of their own."""


@pytest.mark.parametrize(
    "bad", [pytest.param(bad, id=str(bad), marks=pytest.mark.all if bad in COUNTED[3:] else ()) for bad in TABLE]
)
def test_is_refused_before_ray(bad: Bad, tmp_path: Path) -> None:
    outcome = tried(bad, tmp_path)
    check_said(bad, outcome.code, outcome.said, tmp_path)


def run(bad: Bad, folder: Path) -> subprocess.CompletedProcess[str]:
    make_files(folder, bad.files)
    return subprocess.run(
        [sys.executable, ROOT / "launch.py", "hydra.run.dir=run", *bad.given],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


PROGRAMS = [
    Bad(given=["backend.ranks=0"], says=["backend.ranks is 0"]),
    Bad(given=["model.path=m"], files=model(weights={}), says=["model.path is", "no weights"]),
    Bad(given=[*JSONL, "cluster.num_cpus=1"], files=ROW, says=["cluster.num_cpus is 1"]),
    Bad(given=REWARD, files=reward("async def f(p, r): return 1\n"), says=["rw.f", "asynchronous"]),
]


@pytest.mark.parametrize("bad", PROGRAMS, ids=str)
def test_the_program_itself_refuses(bad: Bad, tmp_path: Path) -> None:
    done = run(bad, tmp_path)
    check_said(bad, done.returncode, done.stderr, tmp_path)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.all
@pytest.mark.parametrize("bad", WITH_RAY, ids=str)
def test_is_refused_with_ray(bad: Bad, tmp_path: Path) -> None:
    done = run(bad, tmp_path)
    check_said(bad, done.returncode, done.stderr, tmp_path)


@pytest.mark.all
def test_a_hundred_thousand_rows_are_looked_through(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(100_000)]
    rows[-1] = json.dumps({"prompt": "1" * 100, "answer": "1"})
    given = [*JSONL, "task.response_length=8", "task.prompt_length=32"]
    bad = Bad(given=given, files={"d.jsonl": "\n".join(rows)}, says=["d.jsonl:100000 has 101 tokens"], when="data")
    outcome = tried(bad, tmp_path)
    check_said(bad, outcome.code, outcome.said, tmp_path)


def test_the_table_is_long_enough_and_has_no_input_twice() -> None:
    inputs = [(*bad.given, json.dumps({name: str(text)[:999] for name, text in bad.files.items()})) for bad in TABLE]
    assert len(inputs) >= 120
    assert len(set(inputs)) == len(inputs)
