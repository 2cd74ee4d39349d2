"""Finds trinity-rft, or fetches it, and runs its program."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.6.0"
FETCH_S = 120
RUN_S = 1500
ROOT = Path(__file__).parents[2]

SCENARIOS = [f"{mode}-{style}" for mode in ("memory", "checkpoint", "nccl") for style in ("fixed", "explorer_driven")]


def _run(command: list[str], log: Path, timeout_s: float, **env: str) -> str | None:
    """Run a command; return the end of what it said where it failed or took too long, and None else."""
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **env}, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return f"not done within {timeout_s:g} s"
    return None if done.returncode == 0 else "\n".join(log.read_text(errors="replace").splitlines()[-40:])


@pytest.fixture(scope="package")
def trinity_rft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that trinity-rft is in: what `TRINITY_RFT` names, what is installed, or a copy from the index without
    its dependencies, of which its loops need those that verl has.
    """
    if named := os.environ.get("TRINITY_RFT"):
        return Path(named)
    try:
        found = importlib.metadata.distribution("trinity-rft")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is not None and found.version == VERSION:
        return Path(str(found.locate_file("")))
    folder = tmp_path_factory.mktemp("trinity-rft")
    fetch = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder / "it"), f"trinity-rft=={VERSION}"]
    failed = _run([sys.executable, "-m", *fetch], folder / "pip.log", FETCH_S)
    if failed is not None:
        pytest.skip(f"trinity-rft {VERSION} cannot be had: {failed}")
    return folder / "it"


@pytest.fixture(scope="package")
def runs(trinity_rft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What trainer and explorer did, by (whose classes, scenario)."""
    found = {}
    for classes in ("ours", "trinity"):
        folder = tmp_path_factory.mktemp(classes)
        failed = _run(
            [sys.executable, "-m", "tests.trinity.program", str(folder), *SCENARIOS],
            folder / "program.log",
            RUN_S,
            TRINITY_TEST_CLASSES=classes,
            PYTHONPATH=os.pathsep.join([str(trinity_rft), str(ROOT)]),
        )
        assert failed is None, failed
        for scenario in SCENARIOS:
            found[classes, scenario] = json.loads((folder / f"{scenario}.json").read_text())
    return found
