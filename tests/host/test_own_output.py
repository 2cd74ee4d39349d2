"""The last error that this process or one that it started has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from trinity_sync.host.logs import OwnOutput
print("OldError: of before", file=sys.stderr, flush=True)
said = OwnOutput()
subprocess.run([sys.executable, "-c", {child!r}])
print(said.last_error(but="nothing to see"))
"""


def last_error(child: str, stderr: Path | None) -> str:
    """What a process finds whose child runs `child`."""
    command = [sys.executable, "-c", SCRIPT.format(child=child)]
    if stderr is None:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    with stderr.open("w") as file:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("child", "found"),
    [
        ("raise ValueError('the heads')", "ValueError: the heads"),
        ("import sys; print('(Core pid=7) ERROR [core.py:1] a.b.SizeError: 24', file=sys.stderr)", "a.b.SizeError: 24"),
        ("raise RuntimeError('nothing to see here')", "None"),
        ("pass", "None"),
    ],
)
def test_the_last_line_that_names_an_exception_is_found(tmp_path: Path, child: str, found: str) -> None:
    assert last_error(child, tmp_path / "log") == found


def test_where_errors_do_not_go_to_a_file_none_is_found() -> None:
    assert last_error("raise ValueError('the heads')", None) == "None"
