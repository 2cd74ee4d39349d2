"""What the import of the plug-in does to verl, and what it leaves alone. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[3]
ON = {"VERL_USE_EXTERNAL_MODULES": "trinity_sync.integrations.verl.plugin", "VERL_ENGINE_VENDOR": "trinity"}
BY_ENTRY_POINT = {"VERL_ENGINE_VENDOR": "trinity"}

ENGINES = """
from verl.workers.engine import EngineRegistry
for strategy in "fsdp", "fsdp2":
    for kind in "language_model", "value_model":
        print(EngineRegistry.get_engine_cls(kind, strategy).__name__)
"""
RESUMES = """
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
print(find_latest_ckpt_path.__wrapped__.__module__)
"""
LIGHT = "import sys, verl; print([name for name in sys.modules if name.startswith('trinity_sync')])"


def on_cpus(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a program that uses verl on CPUs."""
    inherited = {name: value for name, value in os.environ.items() if name not in ON}
    of_cpu = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    return {**inherited, **of_cpu, "PYTHONPATH": str(ROOT), **environment}


def said(code: str, environment: dict[str, str], *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that uses verl, as a fork of a process that has imported torch, transformers and Ray."""
    return programs.run(code, on_cpus(environment), path)


@pytest.fixture(scope="module")
def switched_on() -> list[str]:
    """Of a process that imports all by itself."""
    code = f"import verl, ray; print(ray.init.__wrapped__.__module__){ENGINES}{RESUMES}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, env=on_cpus(ON), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_engines_of_every_kind_are_ours(switched_on: list[str]) -> None:
    assert switched_on[1:5] == ["TrinityFSDPEngineWithLMHead", "TrinityFSDPEngineWithValueHead"] * 2


def test_the_search_for_the_newest_checkpoint_is_ours(switched_on: list[str]) -> None:
    assert switched_on[5] == "verl.utils.checkpoint.checkpoint_manager"


def test_the_driver_of_a_program_under_ray_waits_for_its_workers(switched_on: list[str]) -> None:
    assert switched_on[0] == "ray._private.worker"


@pytest.mark.all
def test_a_program_that_imports_our_engines_first_has_all_that_is_changed() -> None:
    copies = "from verl.utils import hdfs_io; print(hdfs_io.copy.__wrapped__.__module__)"
    ended = said("from trinity_sync.integrations.verl import engine_registry\n" + ENGINES + RESUMES + copies, ON)
    assert ended.stdout.split()[:2] == ["TrinityFSDPEngineWithLMHead", "TrinityFSDPEngineWithValueHead"], ended.stderr
    assert ended.stdout.split()[4:] == ["verl.utils.checkpoint.checkpoint_manager", "verl.utils.hdfs_io"]
    assert "is not patched" not in ended.stderr


@pytest.mark.all
def test_a_program_that_imports_our_weight_sync_first_has_its_backend() -> None:
    ours = "from trinity_sync.integrations.verl.weight_sync import checkpoint_engine\n"
    code = "from verl.checkpoint_engine.base import CheckpointEngineRegistry as of; print(of.get('trinity').__name__)"
    ended = said(ours + code, ON)
    assert ended.stdout.split() == ["WeightSync"], ended.stderr
    assert "is not patched" not in ended.stderr


@pytest.mark.all
def test_trainers_of_every_kind_say_at_their_start_that_we_are_on() -> None:
    code = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
for method in CheckpointHandler.__init__, PPOTrainer._load_checkpoint, RayPPOTrainer._load_checkpoint:
    print(method.__wrapped__.__qualname__)
"""
    of_verl = ["CheckpointHandler.__init__", "PPOTrainer._load_checkpoint", "RayPPOTrainer._load_checkpoint"]
    ended = said(code, ON)
    assert ended.stdout.split() == of_verl, ended.stderr


@pytest.mark.all
def test_the_entry_point_of_an_installed_package_and_the_vendor_are_enough(tmp_path: Path) -> None:
    about = tmp_path / "of_ours-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of-ours\nVersion: 1\n")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    (about / "entry_points.txt").write_text(
        "[verl.plugins]\n" + "".join(f"{name} = {module}\n" for name, module in declared.items())
    )
    ended = said(ENGINES + RESUMES, {**BY_ENTRY_POINT, "VERL_USE_EXTERNAL_PLUGINS": "auto"}, tmp_path)
    assert ended.stdout.split() == [
        *("TrinityFSDPEngineWithLMHead", "TrinityFSDPEngineWithValueHead") * 2,
        "verl.utils.checkpoint.checkpoint_manager",
    ], ended.stderr


@pytest.mark.all
def test_without_the_vendor_verl_keeps_its_engines_and_the_backend_of_weight_sync_is_there() -> None:
    code = "from verl.checkpoint_engine.base import CheckpointEngineRegistry as of; print(of.get('trinity').__name__)"
    ended = said(ENGINES + code, {"VERL_USE_EXTERNAL_MODULES": ON["VERL_USE_EXTERNAL_MODULES"]})
    assert ended.stdout.split() == ["FSDPEngineWithLMHead", "FSDPEngineWithValueHead"] * 2 + ["WeightSync"], ended


@pytest.mark.all
def test_the_import_of_verl_brings_none_of_what_saves() -> None:
    """The import costs what a few small files cost: no monitor, no Ray, no second torch."""
    loaded = said(LIGHT, {**ON, "VERL_PLATFORM": "cuda"}).stdout
    assert "trinity_sync.integrations.verl.plugin" in loaded
    assert "trinity_sync.checkpoint" not in loaded
    assert "trinity_sync.actors" not in loaded


@pytest.mark.parametrize(
    "version", [pytest.param("0.8.0", marks=pytest.mark.all), "0.10.1", pytest.param("1.0", marks=pytest.mark.all)]
)
@pytest.mark.all
def test_another_version_of_verl_is_left_alone_and_that_is_said(tmp_path: Path, version: str) -> None:
    code = f"import verl.version; verl.version.__version__ = verl.__version__ = {version!r}\n"
    ended = said(
        code + "import importlib, trinity_sync.integrations.verl.plugin as of; importlib.reload(of)\n" + ENGINES,
        {"VERL_ENGINE_VENDOR": "trinity"},
    )
    assert f"verl {version} is not 0.9.x, which this is written for: OFF" in ended.stderr
    assert "Trinity" not in ended.stdout


def test_a_hook_that_fails_says_so_and_leaves_verl_as_it_is(tmp_path: Path) -> None:
    code = "import trinity_sync.integrations.verl.engine_registry as of; of.register = None\n"
    ended = said(code + RESUMES + "import verl.workers.engine.fsdp.transformer_impl\n", ON)
    assert ended.returncode == 0
    said_so = [line for line in ended.stderr.splitlines() if line.startswith("trinity-sync: verl.workers.engine.fsdp")]
    assert len(said_so) <= 1


def test_variables_that_name_what_is_not_installed_end_the_program_by_name() -> None:
    ended = said("import verl", {**ON, "VERL_USE_EXTERNAL_MODULES": "trinity_sync.no_such"})
    assert ended.returncode != 0
    assert "trinity_sync.no_such" in ended.stderr


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"trinity": "trinity_sync.integrations.verl.plugin"}
