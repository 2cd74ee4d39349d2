"""`docs/tour.md` and `docs/own-model.md` as a newcomer follows them: their commands in order, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.chat_models import make_chat_model
from tests.pages import OWN_MODEL, ROOT, Command, blocks, missing, sessions, write_examples

TOUR = [
    session
    for session in sessions(ROOT / "docs" / "tour.md")
    if session[0].words[0] != "make"  # it has been made: by whoever runs the tests
]
LIMIT_S = 600


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has that the tour needs, in a folder of its own, and the command as the package declares it."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("launch.py", "conf"):
        (folder / name).symlink_to(ROOT / name)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["trinity-sync"]
    module, _, function = declared.partition(":")
    programs = {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "trinity-sync": f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n",
    }
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def run(command: Command, folder: Path) -> str:
    """Run it as a shell does, hold its exit code against what the page shows, and return what it prints."""
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # a report's table has as many columns as fit; those of the page need 84
    columns = "90" if "trinity-sync report" in command.text else "100"
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "COLUMNS": columns},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == (2 if command.refused else 0), f"{command}\n{done.stdout}"
    return done.stdout


@pytest.mark.all
@pytest.mark.timeout(2400)
def test_the_tour_goes_as_it_is_written(checkout: Path) -> None:
    for session in TOUR:
        output = "".join(run(command, checkout) for command in session)
        assert (lacking := missing(session[0].output, output)) is None, f"{session[0]}: {lacking}"
    first = checkout / "outputs" / "first"
    attempts = json.loads((first / "run.json").read_text())["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["completed", "completed"]
    assert json.loads((first / "summary.json").read_text())["reward_last"] > 0.9


@pytest.mark.all
@pytest.mark.timeout(2400)
def test_a_model_of_ones_own_goes_as_it_is_written(checkout: Path) -> None:
    write_examples(checkout, OWN_MODEL)
    make_chat_model(checkout / "Qwen3-0.6B")
    output = "".join(run(command, checkout) for session in sessions(OWN_MODEL) for command in session)
    assert "equal: 21 versions" in output
    loaded = next(block.text for block in blocks(OWN_MODEL) if "from_pretrained" in block.text)
    assert not subprocess.run([sys.executable, "-c", loaded], cwd=checkout, timeout=LIMIT_S).returncode
    (best,) = (checkout / "multirun" / "rates").glob("1")
    assert json.loads((best / "summary.json").read_text())["validation"]
