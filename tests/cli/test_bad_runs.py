"""Runs and sweeps that are not as they were left: each command says what is wrong and where, and changes nothing.

Bundles, and settings of somebody else, are in `test_runs.py` and `test_reproduce.py`. The runs are stand-ins.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cli.stand_in import Computing, standing_in
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.cli import main as cli
from trinity_sync.tracking.run_record import run_id

Capture = pytest.CaptureFixture[str]
RESUME, REPRODUCE, BUNDLE = ["resume"], ["reproduce"], ["reproduce", "--bundle"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose task is a file that a relative path names."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, standing_in(Computing(), folder, patch):
        Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        assert cli.main(["run", "hydra.run.dir=run", "trainer.steps=5", "task=jsonl", "task.path=rows.jsonl"]) == 0
    return folder / "run"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with standing_in(Computing(), tmp_path, monkeypatch) as launcher:
        yield launcher


@pytest.fixture
def run(launcher: Computing, finished: Path, tmp_path: Path) -> Path:
    """A copy of it, in the working directory."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def half(name: str) -> Callable[[Path], None]:
    def cut(run: Path) -> None:
        text = (run / name).read_text()
        (run / name).write_text(text[: len(text) // 2])

    return cut


def without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def saying(name: str, text: str) -> Callable[[Path], None]:
    """One more line at the end of a file."""
    return lambda run: (run / name).write_text((run / name).read_text() + text + "\n")


def recording(**values: object) -> Callable[[Path], None]:
    """Other values in run.json."""
    return lambda run: (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | values))


def setting(key: str, value: object) -> Callable[[Path], None]:
    """Another value in the settings."""

    def change(run: Path) -> None:
        settings = OmegaConf.load(run / ".hydra" / "config.yaml")
        OmegaConf.update(settings, key, value, force_add=True)
        OmegaConf.save(settings, run / ".hydra" / "config.yaml")

    return change


EVIL = "evil: !!python/object/apply:os.mkdir [evil]"
WRONG = {
    "no run": (shutil.rmtree, "{run}"),
    "no record": (without("run.json"), "{run} is not the folder of a run: {run}/run.json is missing"),
    "no settings": (
        without(".hydra/overrides.yaml"),
        "{run} is not the folder of a run: {run}/.hydra/overrides.yaml is",
    ),
    "record cut off": (half("run.json"), "{run}/run.json cannot be read as the record of a run: "),
    "settings cut off": (half(".hydra/hydra.yaml"), "{run}/.hydra/hydra.yaml cannot be read: "),
    "settings garbled": (saying(".hydra/config.yaml", "]"), "{run}/.hydra/config.yaml cannot be read: "),
    "hostile settings": (saying(".hydra/config.yaml", EVIL), "{run}/.hydra/config.yaml cannot be read: "),
    "a version that is none": (
        recording(last_version={"step": "3"}),
        "{run}/run.json is not the record of a run: last_v",
    ),
    "a commit that is none": (recording(git={}), "{run}/run.json is not the record of a run: git is {{}}"),
    "a time that is none": (recording(started="now"), "{run}/run.json is not the record of a run: started is 'now'"),
    "no attempts": (recording(attempts=[{}]), "{run}/run.json is not the record of a run: attempts is [{{}}]"),
    "newer": (recording(format=2), "{run}/run.json has format 2, written by a newer version; this one reads up to 1"),
}


@pytest.mark.parametrize("command", [RESUME, REPRODUCE, BUNDLE], ids=" ".join)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.few(12)
def test_what_cannot_be_read_is_refused_by_name(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture, wrong: str, command: list[str]
) -> None:
    change, told = WRONG[wrong]
    change(run)
    before = contents(tmp_path)
    assert cli.main([*command, str(run)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {told.format(run=run)}")
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert contents(tmp_path) == before
    assert not launcher.calls
    assert not Path("evil").exists()


@pytest.mark.parametrize("command", [RESUME, REPRODUCE], ids=" ".join)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- trainer.warp=9", "trainer.warp is not a setting; trainer has steps, "),
        ("- sync=pigeon", "sync=pigeon is not an option; sync has checkpoint, memory, nccl"),
        ("- model.architecture=null\n- model.architecture.x=1", "model.architecture.x cannot be set: model."),
        ("- trainer.steps=[1", "trainer.steps=[1 cannot be read as its end is missing"),
    ],
)
def test_saved_settings_that_are_none_here_are_told_as_those_of_the_run(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture, text: str, told: str, command: list[str]
) -> None:
    saying(".hydra/overrides.yaml", text)(run)
    before = contents(tmp_path)
    assert cli.main([*command, str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the saved settings of {run} do not fit this version: {told}")
    assert "install the version that the run was made with" in said
    assert contents(tmp_path) == before
    assert not launcher.calls


def test_settings_that_are_given_and_wrong_are_not_those_of_the_run(
    launcher: Computing, run: Path, capsys: Capture
) -> None:
    saying(".hydra/overrides.yaml", "- sync=pigeon")(run)
    assert cli.main(["resume", str(run), "sync=nccl", "task.path=../rows.jsonl"]) == 2, "it is not there"
    assert "saved settings" not in capsys.readouterr().err
    assert cli.main(["resume", str(run), "sync=memory", "trainer.stepz=7"]) == 2
    assert "error: the saved settings" in capsys.readouterr().err, "these are wrong, too"


@pytest.mark.parametrize("command", [REPRODUCE, BUNDLE], ids=" ".join)
def test_settings_other_than_those_of_the_record_are_neither_repeated_nor_sent(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    setting("seed", 8)(run)
    before = contents(tmp_path)
    assert cli.main([*command, str(run)]) == 2
    assert f"the settings of {run} are not those of its record" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_resume_says_what_is_other_than_the_saved_settings(launcher: Computing, run: Path, capsys: Capture) -> None:
    setting("seed", 8)(run)
    assert cli.main(["resume", str(run)]) == 0
    assert "changed: seed: 8 -> 0\n" in capsys.readouterr().err


def test_a_run_with_nothing_to_compare_is_not_sent(launcher: Computing, run: Path, capsys: Capture) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (run / name).write_text("")
    recording(last_version=None, status="failed")(run)
    assert cli.main([*BUNDLE, str(run)]) == 2
    assert f"{run} has nothing to compare: it ended before its first version" in capsys.readouterr().err
    assert not [*Path().glob("*.bundle.json")]


def test_the_last_version_of_a_run_whose_logs_were_cut_is_compared_as_well(
    launcher: Computing, run: Path, capsys: Capture
) -> None:
    half("events.jsonl")(run)
    half("metrics.jsonl")(run)
    launcher.spoilt = 5
    assert cli.main(["reproduce", str(run)]) == 1
    assert capsys.readouterr().out.startswith("differs: version 5 is ")
    assert launcher.calls[-1].until == 5


# moved and copied


def test_a_moved_run_goes_on_and_is_repeated_with_the_files_that_it_named(
    launcher: Computing, run: Path, finished: Path, capsys: Capture
) -> None:
    assert cli.main(["resume", str(run)]) == 0
    assert cli.main(["reproduce", str(run)]) == 0
    assert [call.cfg.task.path for call in launcher.calls] == [str(finished.parent / "rows.jsonl")] * 2
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["list", str(run)]) == 0


@pytest.mark.parametrize(
    ("command", "told"),
    [(RESUME, "task.path is /gone/rows.jsonl"), (REPRODUCE, "rows.jsonl, which does not exist here: give")],
)
def test_a_file_that_was_not_moved_along_is_named(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture, command: list[str], told: str
) -> None:
    settings = OmegaConf.load(run / ".hydra" / "hydra.yaml")
    settings.hydra.runtime.cwd = "/gone"
    OmegaConf.save(settings, run / ".hydra" / "hydra.yaml")
    before = contents(tmp_path)
    assert cli.main([*command, str(run)]) == 2
    assert told in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert not launcher.calls


def test_a_copy_of_a_run_goes_on_beside_it(launcher: Computing, run: Path, tmp_path: Path, capsys: Capture) -> None:
    write_mark(run / "checkpoints", Owner.new(run_id(run / "run.json"), run))
    copy = shutil.copytree(run, tmp_path / "copy")
    assert cli.main(["resume", str(copy)]) == 0
    write_mark(run / "checkpoints", Owner.new(run_id(run / "run.json"), copy))
    assert cli.main(["resume", str(run)]) == 2, "the copy has taken it over"
    assert f" in {copy} on {socket.gethostname()}, and {run} may be a copy of it; give" in capsys.readouterr().err
    assert cli.main(["resume", str(run), f"checkpoint.dir={run}/checkpoints"]) == 0


# still running


@pytest.mark.parametrize("command", [RESUME, REPRODUCE, BUNDLE], ids=" ".join)
def test_a_run_that_goes_on_is_refused(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = contents(tmp_path)
        assert cli.main([*command, str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {run} is in use by another process")
        assert contents(tmp_path) == before
        assert cli.main(["list", str(run)]) == 0
        assert cli.main(["report", str(run)]) == 0


# reports


def test_a_report_over_runs_that_failed_at_once_says_why(
    launcher: Computing, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    for job in ("0", "1"):
        shutil.copytree(run / ".hydra", tmp_path / "sweep" / job / ".hydra")
    record = {"attempt": 0, "status": "failed", "error": "Ray could not start: no space"}
    (tmp_path / "sweep" / "0" / "run.json").write_text(json.dumps(record))
    assert cli.main(["report", "sweep"]) == 0
    said = capsys.readouterr().out
    assert "0: failed: Ray could not start: no space\n" in said
    assert "1: There is no run.json: the run did not start.\n" in said
    assert "Ray could not start: no space" in (tmp_path / "sweep" / "report.html").read_text()
    assert cli.main(["report", "sweep", "--json"]) == 0
    assert [job["error"] for job in json.loads(capsys.readouterr().out)["jobs"]] == [record["error"], None]
    for job, told in (("0", "cannot be read"), ("1", "run.json is missing")):
        assert cli.main(["reproduce", f"sweep/{job}"]) == 2, told


@pytest.mark.parametrize("wrong", ["record cut off", "newer"])
def test_a_report_shows_what_can_be_read_and_names_what_cannot(
    launcher: Computing, run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    WRONG[wrong][0](run)
    assert cli.main(["report", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "5 of 5 steps" in said
    assert f"run.json could not be read and is left out: {WRONG[wrong][1].format(run=run)}" in said
    assert cli.main(["list", str(run)]) == 0
    listed = capsys.readouterr()
    assert "unreadable" in listed.out
    assert listed.err.startswith(f"note: {WRONG[wrong][1].format(run=run)}")


def test_commands_that_only_read_make_nothing_of_hostile_settings(launcher: Computing, run: Path) -> None:
    saying(".hydra/config.yaml", EVIL)(run)
    (run / "checkpoints").mkdir(exist_ok=True)
    codes = [cli.main([*command, str(run)]) for command in (["report"], ["list"], ["ckpt", "prune", "--dry-run"])]
    assert codes == [0, 0, 2]
    assert not Path("evil").exists()


@pytest.mark.parametrize("command", [["report"], ["list"], ["ckpt", "list"], ["ckpt", "verify"]], ids=" ".join)
@pytest.mark.parametrize("place", ["nothing", "file"])
def test_what_is_no_folder_is_refused(
    launcher: Computing, tmp_path: Path, capsys: Capture, command: list[str], place: str
) -> None:
    Path("file").touch()
    before = contents(tmp_path)
    assert cli.main([*command, place]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {place} is no")
    assert contents(tmp_path) == before
