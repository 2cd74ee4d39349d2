"""verl's own CPU tests, first without the plug-in and then with it: what passes without passes with it.

    python -m tests.verl_programs.own_tests FOLDER [FILE ...]

FOLDER is `tests` of verl's source distribution or of a checkout, of the version that is installed. They run against the
installed verl, from a copy, since the sources beside them would come first. Nothing is fetched: tests that want a model
of the Hub fail both times. FILE: some of them only, relative to FOLDER. Exit code 1: some pass without the plug-in
alone; they are named.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.verl_programs.programs import PLUGIN, WITHOUT_US

LIMIT_S = 900.0
"""Limit of one file, seconds. What has not ended then has not passed."""

_ROOT = Path(__file__).parents[2]
_ON_CPU = {
    **{"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_PLUGINS": "none"},
    **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(_ROOT)},
}


def files(folder: Path) -> list[str]:
    """Return the tests that verl calls those for CPUs, relative to the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("test_*_on_cpu.py"))


def lost(folder: Path, names: Sequence[str]) -> list[str]:
    """Run tests of verl's twice, and return those that pass without the plug-in alone.

    Args:
        folder: verl's `tests`.
        names: of files in it.
    """
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, Path(place) / "tests")
        found = []
        for name in names:
            without, with_us = (_passed(Path(place), name, way) for way in (WITHOUT_US, PLUGIN))
            print(f"{name}: {len(without)} pass without, {len(with_us)} with the plug-in", flush=True)
            found += [f"{name}::{test}" for test in sorted(without - with_us)]
    return found


def _passed(place: Path, name: str, environment: dict[str, str]) -> set[str]:
    """Names of the tests of a file that pass."""
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"tests/{name}", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    inherited = {key: value for key, value in os.environ.items() if key not in {*PLUGIN, "PYTEST_ADDOPTS"}}
    try:
        subprocess.run(
            command, cwd=place, env={**inherited, **_ON_CPU, **environment}, capture_output=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return set()
    if not report.exists():  # the interpreter has ended
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


def main(arguments: Sequence[str]) -> int:
    """Run them and print which are lost."""
    folder = Path(arguments[0])
    gone = lost(folder, list(arguments[1:]) or files(folder))
    for name in gone:
        print(f"passes without the plug-in alone: {name}")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
