"""Every command of the documentation is run as it is written, in a folder where what it names is there.

All of it is real but for the run itself: the launcher is a stand-in that computes from the settings, commands that read
weights end when their arguments are parsed, and `make` says what it would do. `tests/e2e/test_tour.py` has no stand-in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

import launch
from tests.checkpoint.helpers import commit
from tests.cli.stand_in import Computing, standing_in
from tests.model_folders import bare_model
from tests.pages import OWN_MODEL, PAGES, ROOT, Command, commands, missing, saved_commands, write_examples
from tests.verl_rows import write_problems
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.launch import app

UNTRIED = {
    r"\. \.venv/bin/activate": "is the shell's, and makes the commands after it be found",
    r"ray start ": "starts processes that outlive the command; tests/nodes has Ray's own cluster for tests",
    r"docker ": "needs Docker; tests/test_dockerfile.py runs the commands of the image without",
    r"git clone ": "fetches the repository, whose address only the reader knows",
    r"pip install \./": "fetches what the package needs from an index; tests/test_wheel.py installs a wheel",
    r"export VERL_": "is the shell's, and has a program begin with our plug-in; tests/verl_programs has such programs",
    r"unset VERL_": "is the shell's; tests/verl_programs/test_sft.py has verl go on from our folders",
    r"export TRINITY_SYNC_MEMORY_INTERVAL=": "is the shell's, too; integrations/verl/test_memory_saves.py sets it",
    r"export TRINITY_SYNC_RETENTION=": "is the shell's, too; integrations/verl/test_retention.py reads such words",
    r"trinity-sync doctor --gpu": "needs a GPU; tests/cli/test_gpu_checks.py runs its parts on the CPU",
    r"trinity-sync verl doctor": "looks at what was exported before; tests/cli/test_verl_doctor.py does so, too",
    r"python .*--experimental-rerun": "reads what the command before it wrote, as tests/cli/test_hydras_tools.py",
    r"\.venv/bin/python -m tests\.house": "prints figures; tests/test_house.py measures them",
    r"VLLM_SERVER_DEV_MODE=1 vllm serve": "runs until it is ended; tests/vllm/servers.py starts servers so",
}
"""Commands that nothing here can try, as patterns, and why."""

# Names that the pages use for what a reader has.
RUNS = ("RUN", "OTHER_RUN", "outputs/copy-digits/2026-11-21_12-00-00", "outputs/first", "outputs/sft")
SWEEPS = ("multirun/NAME/DATE_TIME", "multirun/copy-digits/2026-11-21_12-00-00", "multirun/modes", "multirun/rates")
BUNDLE = "NAME-DATE_TIME.bundle.json"
MODELS = ("models/Qwen3-0.6B", "Qwen3-0.6B", "sft-model")
SHAPES = "models/mine/config.json"
ROWS = ("prompts.jsonl", "pairs.jsonl", "train.jsonl", "test.jsonl")
ELSEWHERE = ("/models", "/data", "/mnt")
"""Folders that no test may write into; below them the pages mean folders of the reader's."""

LACKING = "is not installed; install it with: pip install 'trinity-sync["
"""What a command says whose extra is none of those that the tests need. All else of it has been checked then."""

INTERRUPTED = 130


class FirstJob(Computing):
    """A launcher that ends a sweep at its first job: all jobs have been composed and checked before."""

    def run(self, cfg: Any, run_dir: Path, **given: Any) -> int:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise KeyboardInterrupt
        return super().run(cfg, run_dir, **given)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch, standing_in(Computing(), folder, patch):
        patch.setenv("OMP_NUM_THREADS", "1")
        assert cli.main(["run", "hydra.run.dir=RUN", "trainer.steps=30"]) == 0
        assert cli.main(["run", "-m", f"hydra.sweep.dir={SWEEPS[0]}", "trainer.steps=2,3"]) == 0
        for step in (20, 30):
            commit(folder / "RUN" / "checkpoints", step)
            commit(folder / "ROOT", step)
        assert cli.main(["reproduce", "RUN", "--bundle", f"--output={BUNDLE}"]) == 0
    for kind in (RUNS, SWEEPS):
        for name in kind[1:]:
            shutil.copytree(folder / kind[0], folder / name)
    for name in MODELS:
        bare_model(folder / name)
    (folder / SHAPES).parent.mkdir()
    shutil.copy(ROOT / "trinity_sync" / "models" / "published" / "qwen3-8b.json", folder / SHAPES)
    for name in ROWS:
        (folder / name).write_text(
            '{"prompt": "a", "question": "a", "answer": "b", "response": "b", '
            '"data_source": "a", "reward_model": {"ground_truth": "b"}}\n'
        )
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        write_problems(folder / "gsm8k" / f"{split}.parquet", 2, split)
    (folder / "data" / "runs").mkdir(parents=True)
    (folder / "speeds.json").write_text('{"copy": 1e10}')  # of `doctor --measure`
    write_examples(folder, *sorted(ROOT.glob("docs/extending*.md")), OWN_MODEL)
    return folder


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, which is the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    with standing_in(FirstJob(), folder, monkeypatch):
        yield folder
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def once(found: Iterator[Command]) -> list[Command]:
    return list({tuple(command.words): command for command in found}.values())


OF_PAGES = once(command for page in PAGES for command in commands(page))
OF_EXPERIMENTS = once(saved_commands())

_FIRST = {command.page: command for command in reversed(OF_PAGES)}
TRIED_OFTEN = [
    command
    for command in OF_PAGES
    # "seed=0,1,2": of nine jobs and more, each of which is composed
    if (command.page in ("README.md", "tour.md") or command is _FIRST[command.page])
    and "seed=0,1,2" not in command.words
]
"""What `make test` tries: the pages that a newcomer reads, and one command of each other page."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=str(command), marks=() if command in TRIED_OFTEN else pytest.mark.all)
        for command in OF_PAGES
    ],
)
def test_a_command_of_a_page_does_what_it_says(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    run(command, here, monkeypatch, capsys)


@pytest.mark.all  # sweeps of many jobs, each of which is composed
@pytest.mark.parametrize("command", OF_EXPERIMENTS, ids=str)
def test_a_command_of_a_saved_experiment_does_what_it_says(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    run(command, here, monkeypatch, capsys)


def test_no_pattern_is_left_over() -> None:
    assert all(any(re.match(pattern, command.text) for command in OF_PAGES) for pattern in UNTRIED)


def run(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if any(re.match(pattern, command.text) for pattern in UNTRIED):
        return
    words = [_moved(word, here) for word in command.words]
    while found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0]):
        monkeypatch.setenv(*found.groups())
        if found[1] == "PYTHONPATH":
            monkeypatch.syspath_prepend(Path(found[2]).absolute())
        words = words[1:]
    for word in words:  # where a command makes a folder, there is none
        if found := re.match(r"hydra\.(?:run|sweep)\.dir=(.*)", word):
            shutil.rmtree(found[1], ignore_errors=True)
    code = _call(Path(words[0]).name, words[1:])
    said = capsys.readouterr()
    if code == INTERRUPTED:
        assert "Launching" in said.out, said.err
    elif command.refused:
        assert (code, missing(command.output, said.err)) == (2, None)
    elif code == 2:
        assert LACKING in said.err, said.err
    else:
        assert code == 0, said.err


def _moved(word: str, here: Path) -> str:
    return re.sub(rf"(^|=)(?=(?:{'|'.join(ELSEWHERE)})/)", rf"\g<1>{here}", word)


def _call(program: str, words: list[str]) -> int:
    elsewhere = [word for word in words if word.startswith(("hydra/launcher=", "hydra.launcher."))]
    if elsewhere:  # where jobs would be real: its settings are composed, and the jobs begin here
        config.compose(elsewhere, hydra=True)
        words = [word for word in words if word not in elsewhere]
    if program == "trinity-sync" and (
        words[0] in ("weights", "follow") or words[:2] in (["ckpt", "export"], ["ckpt", "diff"])
    ):
        options = vars(cli._parse(words))
        assert all(
            path.exists() for name, path in options.items() if isinstance(path, Path) and name not in ("output", "into")
        )
        return 0
    if program == "trinity-sync":
        return cli.main(words)
    if program == "python" and words[0] == "launch.py":
        return app.run_main(launch.main, words[1:])
    if program == "python" and words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[2]).exists()
        return 0
    if program == "make":
        return _make(words)
    raise AssertionError(f"nothing here can try {program}; write how, or name the command in UNTRIED and say why")


def _make(words: list[str]) -> int:
    for word in words:
        name, given, _ = word.partition("=")
        assert not given or re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE), word
    done = subprocess.run(
        ["make", "-n", f"PYTHON={sys.executable}", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return 0
