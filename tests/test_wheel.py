"""What is built from the sources runs where the sources are not: the wheel, and the one made of the sdist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from trinity_sync import config

ROOT = config.conf_dir().parent
needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build the ``wheel`` or the ``sdist`` of a source tree."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone in a folder; what it depends on is that of this environment."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-index", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True
    )
    return target


def trinity_sync(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(installed / "bin" / "trinity-sync"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_option_inside_the_package(wheel: Path) -> None:
    options = {path.relative_to(ROOT).as_posix() for path in config.conf_dir().rglob("*.yaml")}
    found = names(wheel)
    assert {f"trinity_sync/{option}" for option in options} <= found
    assert {name.partition("/")[0] for name in found} == {"trinity_sync"}


def test_the_wheel_holds_the_templates_of_the_report(wheel: Path) -> None:
    templates = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("trinity_sync/report/templates/*")}
    assert "trinity_sync/report/templates/run.html" in templates
    assert templates <= names(wheel)


@needs_a_compiler
def test_the_wheel_holds_the_native_library_and_names_its_platform(wheel: Path) -> None:
    assert hatch_build.LIBRARY in names(wheel)
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")


def test_a_wheel_without_a_compiler_is_pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_PURE", "1")
    pure = build("wheel", ROOT, tmp_path)
    assert pure.name.endswith("-py3-none-any.whl")
    assert hatch_build.LIBRARY not in names(pure)


@pytest.mark.all
def test_a_wheel_that_is_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("trinity_sync-*")
    assert names(build("wheel", unpacked, tmp_path / "wheel")) == names(wheel)


@pytest.mark.all
def test_an_editable_install_brings_no_copy_of_the_options(tmp_path: Path) -> None:
    build = "from hatchling.build import build_editable; import sys; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (editable,) = tmp_path.iterdir()
    assert all(name.endswith(".pth") for name in names(editable))


def test_the_installed_command_composes_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = trinity_sync(installed, tmp_path, "run", "--cfg", "job", "sync=nccl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "mode: nccl" in done.stdout


@pytest.mark.all
def test_the_installed_command_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = trinity_sync(
        installed, tmp_path, "run", "experiment=quick", "trainer.steps=4", "backend.ranks=1", "hydra.run.dir=run"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
