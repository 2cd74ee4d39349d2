"""The Dockerfile: what it copies is there, its stages are known, and the commands of its CPU image do what they say.

There is no container here: its commands are run in a folder that holds what the Dockerfile copies, and nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync import config

ROOT = config.conf_dir().parent
CHAIN = ("sources", "cpu-packages")
"""The stages in which the CPU image's packages are installed."""


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions and their arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.rpartition(" AS ")[2]
            found[name] = []
        if word:
            found[name].append((word, rest))
    return found


def copied() -> list[str]:
    """What is copied of the checkout."""
    arguments = [shlex.split(rest) for stage in stages().values() for word, rest in stage if word == "COPY"]
    return [source for sources in arguments if not sources[0].startswith("--from") for source in sources[:-1]]


def environment(names: tuple[str, ...]) -> dict[str, str]:
    """What `ENV` sets in the stages of these names."""
    pairs = [shlex.split(rest) for name in names for word, rest in stages()[name] if word == "ENV"]
    return dict(pair.split("=", 1) for line in pairs for pair in line)


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sorted(copied()) == sorted(kept)
    assert all((ROOT / source).exists() for source in copied())


def test_the_images_are_made_of_stages_that_are_there() -> None:
    assert {"cpu", "cuda"} <= set(stages())
    for stage in stages().values():
        for word, rest in stage:
            if word == "COPY" and rest.startswith("--from="):
                assert rest.split()[0].removeprefix("--from=") in stages()


@pytest.mark.all
@pytest.mark.timeout(1200)
def test_the_commands_of_the_cpu_image_install_it_and_it_runs(tmp_path: Path) -> None:
    """Packages come from where this machine's pip takes them, as in `make install`."""
    place = tmp_path / "checkout"
    for source in copied():
        (place / source).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, place / source)
    venv = tmp_path / "venv"
    path = f"{venv}/bin:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {**environment(CHAIN), "VIRTUAL_ENV": str(venv), "PATH": path}
    if links := env.get("UV_FIND_LINKS") or wheels():
        del env["UV_TORCH_BACKEND"]
        env["UV_FIND_LINKS"] = links
    env = {name: value for name, value in env.items() if name != "UV_NO_CACHE"}
    for word, command in (line for name in CHAIN for line in stages()[name]):
        if word == "RUN":
            done = subprocess.run(["bash", "-ec", command], cwd=place, env=env, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr[-3000:])
    shutil.rmtree(place)
    few = ["experiment=quick", "trainer.steps=2", "backend.ranks=1", "hydra.run.dir=run"]
    done = subprocess.run(["trinity-sync", "run", *few], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "summary.json").exists()


def wheels() -> str:
    """Where this machine's pip finds wheels besides its index."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
