"""The oldest packages that pyproject.toml allows are enough, on each backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_dockerfile import wheels
from trinity_sync import config

ROOT = config.conf_dir().parent


def lowest(name: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["megatron"]]
    (bound,) = (found[1] for one in wanted if (found := re.match(rf"{name}[>=]=([\d.]+)", one)))
    return bound


def test_packages_whose_versions_matter_have_ranges() -> None:
    """A lowest version and one that is too new; no library user is forced to one version."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("torch", "verl", "ray", "transformers", "hydra-core", "omegaconf"):
        (found,) = (one for one in wanted if re.match(rf"{name}[<>=]", one))
        assert re.fullmatch(rf"{name}>=[\d.]+,<[\d.]+", found), found


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with them: gigabytes of torch where there is no build of it for CPUs."""
    folder = tmp_path_factory.mktemp("oldest")
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    options = [] if os.environ.get("UV_FIND_LINKS") or wheels() else ["--torch-backend", "cpu"]
    command = [uv, "pip", "install", "--python", python, "--resolution", "lowest-direct", *options]
    done = subprocess.run([*command, f"{ROOT}[megatron]"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_a_run_with_the_oldest_packages_learns_sends_and_saves(oldest: Path, backend: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = oldest / backend
    few = [f"backend={backend}", "trainer.steps=3", "checkpoint.interval=2", f"hydra.run.dir={run}"]
    done = subprocess.run(
        [oldest / "venv" / "bin" / "trinity-sync", "run", *few], cwd=oldest, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    packages = json.loads((run / "run.json").read_text())["packages"]
    for name in ("torch", "verl", "ray", "transformers", "hydra-core", "omegaconf"):
        assert packages[name].partition("+")[0].startswith(lowest(name)), packages
    checkpoint = [oldest / "venv" / "bin" / "trinity-sync", "ckpt", "verify", str(run)]
    assert subprocess.run(checkpoint, cwd=oldest, env=env).returncode == 0
