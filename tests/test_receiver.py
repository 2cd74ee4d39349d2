"""The receiving side has a wheel of its own, which works where Ray, verl, Hydra and all else of ours is not installed.
vLLM is a stand-in here; tests/e2e/test_other_vllm.py has the real one.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import hatch_build
import trinity_sync
from tests.test_wheel import ROOT, build, names, needs_a_compiler
from trinity_sync.config.schema import DeltaConfig
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.vllm import own
from trinity_sync.integrations.vllm.own import EngineWeights
from trinity_sync.integrations.vllm.target import WorkerTarget
from trinity_sync.integrations.vllm.worker_link import WorkerAddress
from trinity_sync.sync.base import ExplorerSide
from trinity_sync.sync.pieces import PieceServer
from trinity_sync.weights.tensors import state_digest

LIMIT = 300.0  # two cores may be busy
LATER = {
    "weights/cuda_digests.py",
    "weights/native/native.so",
    *(f"weights/native/{one}" for one in ("native.c", "digests.h", "gaps.h")),
}
"""Files that are not imported, or only where there is a GPU."""

WORKER = """
import importlib.machinery, sys, types
import numpy, torch, xxhash

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if top != "trinity_sync" and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass

class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Base,), {})

class Base:
    def __init__(self, *given):
        *_, self.device, self.model = given
        self.parallel_config = types.SimpleNamespace(rank=0, world_size=1)
        self.model_config = types.SimpleNamespace(dtype=torch.bfloat16)

    def __class_getitem__(cls, of):
        return cls

for name in {name.partition(".")[0] for name in sys.modules} - {"numpy", "torch", "xxhash", "__main__"}:
    if name not in sys.stdlib_module_names:
        sys.modules[name] = None  # torch has loaded it, but we are not to
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])

from trinity_sync.integrations.vllm import register
from trinity_sync.integrations.vllm.transfer import InitInfo, TrinityTransfer

transfer = TrinityTransfer(None, None, torch.device("cpu"), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
path, key, host, port = sys.argv[2:]
transfer.init_transfer_engine(InitInfo(path, key, host, int(port)))
sys.stdin.read()
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("trinity_sync")), sep="\\n")
"""


class Worker:
    """A process with the receiver alone, as the `EngineControl` of the engine whose only worker it is.

    Attributes:
        path: of the explorer's socket, as it sees it; None: as it is.
    """

    path: str | None = None

    def __init__(self, installed: Path) -> None:
        self._installed = installed

    def connect(self, address: WorkerAddress) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(self._installed), self.path or address.path, *map(str, address[1:])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def modules(self) -> set[str]:
        """End it; return the files of its modules, below the package."""
        said = self.end()
        assert self._process.returncode == 0
        return {str(Path(line).relative_to(self._installed / "trinity_sync")) for line in said.splitlines()}

    def end(self) -> str:
        return "" if self._process.returncode is not None else self._process.communicate(timeout=LIMIT)[0]

    def __getattr__(self, name: str) -> object:
        return lambda *given: None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT / "receiver", tmp_path_factory.mktemp("receiver"))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


@pytest.fixture
def worker(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(installed)
    monkeypatch.setattr(own, "AsyncControl", lambda *given: made)
    yield made
    made.end()


@pytest.fixture
def weights(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineWeights]:
    monkeypatch.setattr(own, "WorkerTarget", partial(WorkerTarget, host="127.0.0.1"))
    monkeypatch.setattr(own, "ExplorerSide", partial(ExplorerSide, settings={"delta": DeltaConfig(codec="auto")}))
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)))
    with closing(EngineWeights(engine, cast("object", None), timeout_s=LIMIT)) as made:  # type: ignore[arg-type]
        yield made


def test_versions_arrive_where_nothing_else_is_installed_by_all_of_the_wheel(
    wheel: Path, worker: Worker, weights: EngineWeights
) -> None:
    for step in range(2):
        tensors = {"embed": torch.randn(64, 8).bfloat16(), "norm": torch.randn(8).bfloat16()}
        assert weights.take(tensors, step) == weights.take(dict(reversed(tensors.items())), step)
    held = {name.removeprefix("trinity_sync/") for name in names(wheel)}
    assert worker.modules() == held - LATER


def test_versions_arrive_over_tcp_where_no_memory_is_shared(
    worker: Worker, weights: EngineWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.path = "/nowhere/workers"
    served, hold = list[str](), PieceServer.hold
    monkeypatch.setattr(PieceServer, "hold", lambda *given: (served.append(str(given[3].version)), hold(*given)))
    for step in range(2):
        tensors = {"embed": torch.randn(1 << 11, 1 << 11).bfloat16(), "norm": torch.randn(8).bfloat16()}
        assert weights.take(tensors, step) == state_digest(tensors, None)
    assert served == ["0", "1"]


def test_a_receiver_of_other_sources_is_refused_and_the_module_is_named(
    installed: Path, worker: Worker, weights: EngineWeights
) -> None:
    with (installed / "trinity_sync/weights/layout.py").open("a") as other:
        other.write("# of another release\n")
    with pytest.raises(ConfigError, match=r"another release .*\(differing: trinity_sync.weights.layout\); install"):
        weights.take({"norm": torch.zeros(8)}, 0)


def test_the_receiver_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "receiver/pyproject.toml").read_text())["project"]
    assert project["version"] == trinity_sync.__version__


@needs_a_compiler
def test_the_receiver_has_the_native_library(wheel: Path) -> None:
    assert hatch_build.LIBRARY in names(wheel)
    assert wheel.name.endswith(f"-{hatch_build.platform_tag()}.whl")


def test_a_receiver_without_a_compiler_is_pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_PURE", "1")
    pure = build("wheel", ROOT / "receiver", tmp_path)
    assert pure.name.endswith("-py3-none-any.whl")
    assert hatch_build.LIBRARY not in names(pure)
