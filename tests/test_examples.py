"""The examples do what they say: the reward, the experiment, the program on the library, and the notebook."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.pages import ROOT
from trinity_sync import config
from trinity_sync.samples.record import Prompt

EXAMPLES = ROOT / "examples"
LIMIT_S = 900


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, which is the working directory and on the path, as its page says."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def run(*command: str, folder: Path) -> str:
    """Run a command there, on this checkout, and return what it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_experiment_composes_and_its_reward_judges(here: Path) -> None:
    cfg = config.compose(["experiment=reverse"], config_dir=here / "conf")
    config.check(cfg)
    config.check_inputs(cfg)
    task = config.build_task(cfg.task, cfg.seed)
    prompt = task.prompts(1, 1)[0]
    assert prompt.answer == prompt.text.removesuffix("=")[::-1]
    reward = importlib.import_module("my_reward").digits_right
    asked = Prompt(index=0, text="12=", answer="21")
    assert reward(asked, "21", finished=True) == 2.0
    assert reward(asked, "21", finished=False) == 1.0
    assert reward(asked, "20", finished=True) == 0.5
    assert reward(asked, "", finished=True, whole=5.0) == 0.0


def test_the_program_shows_a_checkpoint_and_how_far_it_moved(here: Path) -> None:
    for name, value in (("before", 0.0), ("after", 0.5)):
        (here / name).mkdir()
        save_file({"layer.weight": torch.full((2, 3), value)}, here / name / "model.safetensors")
        (here / name / "config.json").write_text("{}")
    said = run(sys.executable, "weights.py", "after", "before", folder=here)
    assert re.search(r"layer\.weight +F32 +2x3  mean 5\.00e-01  most 5\.00e-01", said)
    assert re.search(r"1 tensors, Hugging Face; digest in bf16: [0-9a-f]{32}", said)


def test_the_page_of_the_examples_names_all_of_them() -> None:
    there = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if "__pycache__" not in path.parts}
    assert set(re.findall(r"^\| `(.+?)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == there - {"README.md"}


def cells() -> list[str]:
    """The cells of code of the notebook, with its lines for the shell as Python."""
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in found if cell["outputs"] or cell["execution_count"]], "save it without outputs"
    shell = re.compile(r"^!(.+)$", re.MULTILINE)

    def run_by_shell(line: re.Match[str]) -> str:
        return f"subprocess.run({line[1]!r}, shell=True, check=True)"

    return [shell.sub(run_by_shell, "".join(cell["source"])) for cell in found]


def test_the_notebook_has_cells_that_can_run() -> None:
    assert len([ast.parse(cell) for cell in cells()]) > 5


@pytest.mark.all
def test_the_notebook_runs_from_its_first_cell_to_its_last(here: Path) -> None:
    (here / "notebook.py").write_text("\n".join(["import subprocess", *cells()]))
    said = run(sys.executable, "-u", "notebook.py", folder=here)
    assert "completed: 20 of 20 steps" in said
    assert "25 tensors, the same digest" in said
    assert re.search(r"\['12=\d*', '47=\d*', '93=\d*'\]", said), said


@pytest.mark.all
def test_the_commands_of_the_page_run(here: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (here / "README.md").read_text(), re.DOTALL)
    trained, moved = block.strip().splitlines()
    assert "completed: 60 of 60 steps" in run("bash", "-c", trained, folder=here)
    assert "25 tensors" in run("bash", "-c", moved, folder=here)
