"""Packages that the installation leaves out, for one test of `make test-all` each."""

import subprocess
import sys
from pathlib import Path

import pytest


def fetch(folder: Path, *packages: str) -> None:
    """Install packages alone into a folder; skip the test where they cannot be fetched."""
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", sys.executable]
    command = [*uv, "--no-deps", "--target", str(folder), *packages]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if asked.returncode:
        pytest.skip(f"{' and '.join(packages)} cannot be fetched: {asked.stderr.strip()[-200:]}")
