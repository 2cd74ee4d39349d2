"""The division of the tests into parts (`make test-all PART=2/4`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import parts
from tests.conftest import _leave_to_all, _room

NAMES = st.sampled_from([f"tests/test_{number}.py" for number in range(40)])
SECONDS = st.floats(min_value=0, max_value=2000)


class Case:
    """A case of a test, as pytest collects it."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks = f"tests/test_a.py::{name}", [*marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def test_of_cases_of_one_kind_the_first_few_are_left_that_are_not_left_to_test_all_anyway() -> None:
    few, everything = pytest.mark.few(2).mark, pytest.mark.all.mark
    first = [Case("test_one[a]", few, everything), *(Case(f"test_one[{name}]", few) for name in "bcd")]
    cases = [*first, Case("test_two[a]", few), Case("test_three")]
    _leave_to_all(cases)  # type: ignore[arg-type]
    left = [case.nodeid for case in cases if case.get_closest_marker("all") is None]
    assert left == [f"tests/test_a.py::{name}" for name in ("test_one[b]", "test_one[c]", "test_two[a]", "test_three")]


@given(files=st.sets(NAMES), seconds=st.dictionaries(NAMES, SECONDS), count=st.integers(1, 12), data=st.data())
def test_every_file_is_in_exactly_one_part_whatever_order_they_come_in(
    files: set[str], seconds: dict[str, float], count: int, data: st.DataObject
) -> None:
    divided = parts.divide(files, seconds, count)
    assert len(divided) == count
    assert sorted(file for part in divided for file in part) == sorted(files)
    assert parts.divide(data.draw(st.permutations(sorted(files))), seconds, count) == divided


@given(seconds=st.dictionaries(NAMES, SECONDS, min_size=1), count=st.integers(1, 12))
def test_no_part_takes_longer_than_an_equal_share_and_one_file(seconds: dict[str, float], count: int) -> None:
    loads = [sum(seconds[file] for file in part) for part in parts.divide(seconds, seconds, count)]
    assert max(loads) <= sum(seconds.values()) / count + max(seconds.values()) + 1e-6


def test_a_file_that_was_not_measured_counts_as_the_median() -> None:
    seconds = {"a": 1.0, "b": 10.0, "c": 100.0}
    assert parts.divide({"a", "b", "c", "new"}, seconds, 2) == [["c"], ["b", "new", "a"]]
    assert parts.divide({"new", "newer"}, {}, 2) == [["new"], ["newer"]]


@pytest.mark.parametrize("text", ["5/4", "0/4", "x", "", "2", "2/", "-1/4", "2/4/5", " 2/4", "1/0", "٢/٤"])
def test_what_names_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no part"):
        parts.parse(text)


def test_a_part_by_its_name() -> None:
    assert parts.parse("2/4") == (2, 4)


def test_seconds_come_from_reports_and_the_later_of_a_test_counts(tmp_path: Path) -> None:
    for file in ("tests/e2e/test_a.py", "tests/test_b.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()

    def report(name: str, *cases: tuple[str, str, str]) -> Path:
        lines = "".join(f'<testcase classname="{c}" name="{n}" time="{t}" />' for c, n, t in cases)
        (tmp_path / name).write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>")
        return tmp_path / name

    first = report("1.xml", ("tests.e2e.test_a", "test_x", "3"), ("tests.e2e.test_a.TestC", "test_x", "0.25"))
    second = report("2.xml", ("tests.e2e.test_a", "test_x", "2"), ("tests.test_b", "test_x", "0"), ("", "broken", "1"))
    assert parts.measured([first, second], tmp_path) == {"tests/e2e/test_a.py": 2.2, "tests/test_b.py": 0.0}
    with pytest.raises(ValueError, match=r"tests\.gone is in no file"):
        parts.measured([report("3.xml", ("tests.gone", "test_x", "1"))], tmp_path)


def test_what_was_measured_is_of_files_that_are_there() -> None:
    gone = [file for file in json.loads(parts.DURATIONS.read_text()) if not (parts.ROOT / file).is_file()]
    assert not gone, f"renamed or removed: follow in {parts.DURATIONS}"


@pytest.mark.parametrize(
    ("room", "files"),
    [
        ("Ray", ["actors/test_deaths.py", "checkpoint/test_monitor.py", "sync/test_kills.py", "vllm/test_server.py"]),
        ("ranks", ["backends/test_fsdp.py", "backends/test_megatron.py"]),
        ("tests/test_parts.py", ["test_parts.py"]),
    ],
)
def test_files_that_share_processes_are_for_one_worker(room: str, files: list[str]) -> None:
    assert {_room(f"tests/{file}") for file in files} == {room}


COLLECTING = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    code = pytest.main(["-p", "no:xdist", "--collect-only", *arguments, "tests/protocol"])
    print(f"ended with {int(code)}", flush=True)
"""


@pytest.fixture(scope="module")
def collected() -> tuple[list[list[str]], str]:
    """What pytest prints for no part, for both of two and for one that is none; and what it says of errors."""
    chosen = [[], ["--part", "1/2"], ["--part", "2/2"], ["--part", "5/4"]]
    command = [sys.executable, "-c", COLLECTING, json.dumps(chosen)]
    done = subprocess.run(command, cwd=parts.ROOT, capture_output=True, text=True)
    printed = re.split(r"(?<=^ended with \d\n)", done.stdout, flags=re.MULTILINE)
    return [text.splitlines() for text in printed if text], done.stderr


@pytest.mark.all
def test_pytest_collects_every_test_in_one_part(collected: tuple[list[list[str]], str]) -> None:
    every, first, second = ([line for line in lines if "::" in line] for lines in collected[0][:3])
    assert every
    assert first
    assert second
    assert sorted(first + second) == sorted(every)


@pytest.mark.all
def test_pytest_refuses_what_names_no_part(collected: tuple[list[list[str]], str]) -> None:
    printed, errors = collected
    assert printed[-1][-1] == f"ended with {int(pytest.ExitCode.USAGE_ERROR)}"
    assert "PART=5/4 names no part" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("text", ["5/4", "x"])
def test_make_refuses_it_at_once_in_one_line(text: str) -> None:
    command = ["make", "test-all", f"PART={text}", f"PYTHON={sys.executable}", "VENV=nowhere"]
    # as from a shell, though these tests may be run by make themselves
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PART"))}
    done = subprocess.run(command, cwd=parts.ROOT, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"PART={text} names no part; write one such as 2/4" in line
