"""The tests in parts that take about equally long: `make test-all PART=2/4` runs the second of four.

A part is made of whole files, since the tests of a file share Ray and worker processes. Files are divided by the
seconds that they take, as `durations.json` has them; one that is not in it counts as the median. To write that file
anew, from reports that together are of all tests (where two have the same test, the later counts)::

    PYTEST_ADDOPTS=--junitxml=report.xml make test-all
    python -m tests.parts record report.xml

The options for pytest are in `conftest.py`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
_UNKNOWN_S = 1.0
"""What a file counts where none was measured."""


class Part(NamedTuple):
    """One of so many parts, from 1."""

    number: int
    of: int


def parse(text: str) -> Part:
    """The part that a text such as ``2/4`` names.

    Raises:
        ValueError: it names none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"PART={text} names no part; write one such as 2/4, the second of four")
    return Part(int(match[1]), int(match[2]))


def divide(files: Collection[str], seconds: Mapping[str, float], parts: int) -> list[list[str]]:
    """Divide files into parts: the longest first, each to the part that has least to do so far.

    Args:
        files: paths from the repository's root.
        seconds: path -> how long the tests of the file take; others count as the median.
        parts: how many, at least 1.

    Returns:
        The files of each part, the longest first, so that none is left for the end when the others are done. They
        depend on the arguments alone and not on the order of `files`.
    """
    unknown = statistics.median(seconds.values()) if seconds else _UNKNOWN_S
    divided: list[list[str]] = [[] for _ in range(parts)]
    load = [0.0] * parts
    for file in sorted(files, key=lambda file: (-seconds.get(file, unknown), file)):
        least = load.index(min(load))
        divided[least].append(file)
        load[least] += seconds.get(file, unknown)
    return divided


def measured(reports: Sequence[Path], root: Path = ROOT) -> dict[str, float]:
    """Path of each test file -> seconds that its tests took together, set-up and clearing up included.

    Args:
        reports: written by pytest's ``--junitxml``.
        root: of the repository.

    Raises:
        ValueError: a report has a test of a file that is not there.
    """
    times: dict[tuple[str, str], float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.get("classname"):  # without: a file that could not be imported
                times[case.get("classname", ""), case.get("name", "")] = float(case.get("time", 0))
    files: dict[str, float] = {}
    for (name, _), took in times.items():
        file = _file_of(name, root)
        files[file] = files.get(file, 0.0) + took
    return {file: round(files[file], 1) for file in sorted(files)}


def _file_of(name: str, root: Path) -> str:
    """The file of a test's module or class, such as ``tests.e2e.test_faults``."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        path = "/".join(words[:length]) + ".py"
        if (root / path).is_file():
            return path
    raise ValueError(f"{name} is in no file of {root}")


def main(arguments: Sequence[str]) -> int:
    """``check PART`` says what is wrong with a part's name; ``record REPORT...`` writes `durations.json`."""
    match list(arguments):
        case ["check", text]:
            try:
                parse(text)
            except ValueError as error:
                print(error)
                return 2
        case ["record", *reports] if reports:
            DURATIONS.write_text(json.dumps(measured([Path(report) for report in reports]), indent=2) + "\n")
        case _:
            print("usage: python -m tests.parts check PART | record REPORT.xml ...", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
