"""`trinity-sync ckpt`: what it prints, as text and as JSON, what it deletes, and its exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.checkpoint.helpers import newer, refuse, unreadable, verls
from tests.tracking import synthetic
from trinity_sync import config
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest, canonical_digest, step_dir, write_tracker
from trinity_sync.checkpoint.folder.owner import Owner, write_mark
from trinity_sync.cli import checkpoints
from trinity_sync.cli import main as cli
from trinity_sync.report.run_data import load_run
from trinity_sync.tracking.recorder import Recorder
from trinity_sync.tracking.run_record import RunFolder

Capture = pytest.CaptureFixture[str]


def commit(root: Path, step: int, **more: Any) -> Path:
    folder = prepare_staging(root, step, 0)
    (folder / "actor").mkdir()
    (folder / "actor" / "model.pt").write_bytes(bytes([step]) * 100)
    commit_folder(root, Manifest(**({"step": step, "attempt": 0, "kind": "full", "digest": f"{step:032x}"} | more)))
    return step_dir(root, step)


@pytest.fixture(scope="module")
def settings() -> str:
    return OmegaConf.to_yaml(config.compose())


@pytest.fixture
def run(tmp_path: Path, settings: str) -> Path:
    """A run that keeps its last two checkpoints and has three."""
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(settings)
    OmegaConf.save({"hydra": {"runtime": {"cwd": str(tmp_path)}}}, folder / ".hydra" / "hydra.yaml")
    for step in (10, 20, 30):
        commit(folder / "checkpoints", step, metrics={"reward/mean": -step})
    return folder


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in (run / "checkpoints").glob("global_step_*"))


def answer(capsys: Capture, *arguments: object) -> Any:
    code = cli.main(["ckpt", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# list and inspect


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_the_checkpoints_of_a_run_are_listed_oldest_first(run: Path, capsys: Capture, where: str) -> None:
    code, rows = answer(capsys, "list", run / where)
    assert code == 0
    assert [(row["step"], row["kind"], row["bytes"], row["digest"]) for row in rows] == [
        (step, "full", 100, f"{step:032x}") for step in (10, 20, 30)
    ]


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "pin", "unpin"])
def test_a_step_is_a_second_word_or_an_option(run: Path, capsys: Capture, command: str) -> None:
    told = []
    for words in ([str(run), "10"], [str(run), "--step", "10"], ["--step=10", str(run)]):
        assert cli.main(["ckpt", command, *words, "--json"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] == told[2]
    assert cli.main(["ckpt", command, str(run), "10", "--step", "20"]) == 2


def test_a_step_folder_lists_itself(run: Path, capsys: Capture) -> None:
    assert [row["step"] for row in answer(capsys, "list", run / "checkpoints" / "global_step_20")[1]] == [20]


def test_the_list_is_a_table_for_people(run: Path, capsys: Capture) -> None:
    cli.main(["ckpt", "pin", str(run), "20"])
    capsys.readouterr()
    assert cli.main(["ckpt", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "kind", "size", "written", "digest"]
    assert ["pinned" in line for line in lines[1:]] == [False, True, False]


def test_a_folder_without_a_manifest_is_listed_with_what_is_wrong(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "global_step_20" / "manifest.json").unlink()
    row = answer(capsys, "list", run, "20")[1][0]
    assert row["kind"] is None
    assert "has no manifest.json" in row["problems"][0]


def test_a_file_that_is_missing_or_of_another_size_is_seen_in_the_list(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "global_step_10" / "actor" / "model.pt").unlink()
    (run / "checkpoints" / "global_step_20" / "actor" / "model.pt").write_bytes(b"torn")
    assert [row["problems"] for row in answer(capsys, "list", run)[1]] == [
        ["actor/model.pt is missing"],
        ["actor/model.pt has 4 bytes instead of 100"],
        [],
    ]


def test_tables_and_verdicts_are_coloured_on_a_terminal_that_wants_them(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "global_step_10" / "actor" / "model.pt").unlink()
    monkeypatch.setenv("TERM", "xterm")
    plain, coloured = [], []
    for shown, is_terminal in ((plain, False), (coloured, True)):
        for command in (["list", run], ["verify", run], ["prune", run, "--dry-run"]):
            with monkeypatch.context() as patch:
                patch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)  # noqa: B023
                cli.main(["ckpt", *map(str, command)])
            shown.append(capsys.readouterr().out)
    red, green = "\x1b[31m", "\x1b[32m"
    assert f"{red}actor/model.pt is missing" in coloured[0]
    assert f"{red}step 10: BAD" in coloured[1]
    assert f"{green}step 20: good" in coloured[1]
    assert f"{red}delete" in coloured[2]
    assert [re.sub("\x1b.*?m", "", text) for text in coloured] == plain


def test_who_names_no_step_to_pin_is_told_which_there_are(run: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "pin", str(run)]) == 2
    assert "which checkpoint? " in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("there are: 10, 20, 30")


def test_what_cannot_be_taken_for_a_checkpoint_is_listed_and_verified_as_what_it_is(run: Path, capsys: Capture) -> None:
    root = run / "checkpoints"
    newer(root / "global_step_20")
    unreadable(root / "global_step_30" / "actor" / "model.pt")
    verls(root, 5)
    write_tracker(root, "full", 30)
    rows = answer(capsys, "list", run)[1]
    assert [row["state"] for row in rows] == ["verl", "committed", "newer", "committed"]
    assert "not verified" in rows[0]["problems"][0]
    code, reports = answer(capsys, "verify", run)
    assert (code, [report["state"] for report in reports]) == (1, ["no_manifest", "committed", "newer", "unreadable"])
    cli.main(["ckpt", "verify", str(run)])
    shown = capsys.readouterr().out
    assert "step 20: OF A NEWER VERSION" in shown
    assert "step 30: CANNOT BE READ NOW" in shown
    assert [row["step"] for row in answer(capsys, "prune", run, "--keep", "keep_last.n=1")[1]["checkpoints"]] == [
        10,
        30,
    ]
    assert (root / "global_step_20").is_dir()


def test_inspect_shows_the_newest_checkpoint_with_its_files(run: Path, capsys: Capture) -> None:
    code, shown = answer(capsys, "inspect", run)
    assert (code, shown["step"], shown["metrics"]) == (0, 30, {"reward/mean": -30})
    assert [entry["path"] for entry in shown["files"]] == ["actor/model.pt"]
    assert cli.main(["ckpt", "inspect", str(run), "10"]) == 0
    assert "actor/model.pt" in capsys.readouterr().out


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_followed(run: Path, capsys: Capture) -> None:
    OmegaConf.save(config.compose(["checkpoint.dir=store/here"]), run / ".hydra" / "config.yaml")
    (run / "run.json").write_text('{"attempt": 0}')
    told = {"event": "commit", "step": 40, "attempt": 0, "kind": "full", "digest": f"{40:032x}", "bytes": 100}
    (run / "events.jsonl").write_text(json.dumps(told) + "\n")
    commit(run.parent / "store" / "here", 40)
    assert [row["step"] for row in answer(capsys, "list", run)[1]] == [40]


@pytest.fixture
def two(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two runs with `checkpoint.dir=${oc.env:PLACE}`, which was `ours` for the first, and is `theirs` of the second."""
    shutil.rmtree(run / "checkpoints")
    monkeypatch.setenv("PLACE", "theirs")
    OmegaConf.save(config.compose(["checkpoint.dir=${oc.env:PLACE}"]), run / ".hydra" / "config.yaml")
    second = Path(shutil.copytree(run, tmp_path / "second"))
    for folder, id, name in ((run, "a" * 32, "ours"), (second, "b" * 32, "theirs")):
        places = {"checkpoint.dir": str(tmp_path / name), "checkpoint.mirror": None}
        (folder / "run.json").write_text(json.dumps({"attempt": 0, "id": id, "places": places}))
        for step in (1, 2, 3):
            commit(tmp_path / name, step, run=id)
        write_mark(tmp_path / name, Owner.new(id, folder))
    return run, second


COMMANDS: list[list[str]] = [["list"], ["inspect"], ["verify"], ["prune", "--keep", "keep_last.n=1"], ["pin", "3"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recorded_folder_is_used_and_not_the_one_that_the_settings_name_today(
    two: tuple[Path, Path], tmp_path: Path, command: list[str], capsys: Capture
) -> None:
    assert cli.main(["ckpt", command[0], str(two[0]), *command[1:]]) == 0
    assert len(list((tmp_path / "theirs").glob("global_step_*"))) == 3
    assert not (tmp_path / "theirs" / ".pins").exists()
    if command[0] == "prune":
        assert [path.name for path in (tmp_path / "ours").glob("global_step_*")] == ["global_step_3"]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("command", [*COMMANDS, ["export", "--output", "out"]])
@pytest.mark.few(4)
def test_a_folder_that_belongs_to_another_run_is_refused(
    two: tuple[Path, Path], tmp_path: Path, command: list[str], capsys: Capture, *, recorded: bool
) -> None:
    record = {"attempt": 0, "id": "a" * 32}
    places = {"places": {"checkpoint.dir": str(tmp_path / "theirs")}} if recorded else {}
    (two[0] / "run.json").write_text(json.dumps(record | places))
    assert cli.main(["ckpt", command[0], str(two[0]), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert f"checkpoint.dir={tmp_path}/theirs belongs to another run: run {'b' * 32} in {two[1]}" in said
    assert f"name that folder in place of {two[0]}" in said
    assert len(list((tmp_path / "theirs").glob("global_step_*"))) == 3
    assert not (tmp_path / "theirs" / ".pins").exists()


def test_the_policies_of_the_run_around_a_folder_are_not_those_of_its_checkpoints(
    two: tuple[Path, Path], capsys: Capture
) -> None:
    commit(two[0] / "strange", 1)
    assert cli.main(["ckpt", "prune", str(two[0] / "strange")]) == 2
    assert "no policies are known" in capsys.readouterr().err


def test_a_report_looks_for_checkpoints_in_the_recorded_folder(two: tuple[Path, Path], tmp_path: Path) -> None:
    assert load_run(two[0]).checkpoints == tmp_path / "ours"


# verify


def test_whole_checkpoints_verify(run: Path, capsys: Capture) -> None:
    code, reports = answer(capsys, "verify", run)
    assert code == 0
    assert [(report["step"], report["ok"], report["bytes"]) for report in reports] == [
        (10, True, 100),
        (20, True, 100),
        (30, True, 100),
    ]


def test_a_changed_file_is_found_and_the_exit_code_says_so(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "global_step_20" / "actor" / "model.pt").write_bytes(b"x" * 100)
    code, reports = answer(capsys, "verify", run)
    assert code == 1
    assert [report["ok"] for report in reports] == [True, False, True]
    assert "actor/model.pt" in reports[1]["problems"][0]
    assert cli.main(["ckpt", "verify", str(run), "20"]) == 1
    assert capsys.readouterr().out.startswith("step 20: BAD")
    assert cli.main(["ckpt", "verify", str(run), "30"]) == 0


@pytest.mark.parametrize(("more", "shown"), [([], True), (["--json"], False)])
def test_a_bar_shows_how_far_verify_is_but_never_with_json(
    run: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], shown: bool
) -> None:
    seen: list[object] = []

    @contextmanager
    def bar(text: str, *, shown: bool) -> Iterator[object]:
        seen.append(shown)
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(checkpoints, "progress_bar", bar)
    assert cli.main(["ckpt", "verify", str(run), *more]) == 0
    assert seen == [shown, (100, 300), (200, 300), (300, 300)]


# prune


def test_prune_follows_the_policies_of_the_run(run: Path, capsys: Capture) -> None:
    code, done = answer(capsys, "prune", run)
    assert (code, done["freed_bytes"], steps(run)) == (0, 100, [20, 30])
    assert [(row["step"], row["keep"], row["deleted"]) for row in done["checkpoints"]] == [
        (10, False, True),
        (20, True, False),
        (30, True, False),
    ]
    assert all(row["reasons"] for row in done["checkpoints"])


def test_a_dry_run_says_why_and_deletes_nothing(run: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "prune", str(run), "--dry-run"]) == 0
    assert steps(run) == [10, 20, 30]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "kind", "size", "decision", "why"]
    assert lines[1].split(maxsplit=5) == ["10", "full", "100", "B", "delete", "not kept by keep_last"]
    assert lines[2].split(maxsplit=5)[:5] == ["20", "full", "100", "B", "keep"]
    assert "keep_last" in lines[2]
    assert lines[-1] == "would delete 1 checkpoint, 100 B"


def test_policies_can_be_given_in_place_of_those_of_the_run(run: Path) -> None:
    assert cli.main(["ckpt", "prune", str(run), "--keep", "keep_last.n=1", "--keep", "keep_best"]) == 0
    assert steps(run) == [10, 30]


@pytest.mark.parametrize("keep", ["keep_most", "keep_last.m=1", "keep_last.n=0", "keep_last.n=many", ""])
def test_a_policy_that_does_not_exist_is_refused(run: Path, capsys: Capture, keep: str) -> None:
    assert cli.main(["ckpt", "prune", str(run), "--keep", keep]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert steps(run) == [10, 20, 30]


def test_without_a_run_the_policies_must_be_given(tmp_path: Path, capsys: Capture) -> None:
    commit(tmp_path / "alone", 10)
    assert cli.main(["ckpt", "prune", str(tmp_path / "alone")]) == 2
    assert "--keep keep_last.n=3" in capsys.readouterr().err


@pytest.fixture
def recorded(run: Path) -> Path:
    """The run has ended, and its record says so."""
    with RunFolder.open(run, resume=False) as folder:
        recorder = Recorder.start(folder, command="", seed=1, config_digest=None, threads=1, total_steps=30, view="off")
        for step in (10, 20, 30):
            digest = f"{step:032x}"
            recorder.event(
                synthetic.event("commit", step=step, kind="full", digest=digest, bytes=100, blocked_s=0.0, total_s=0.0)
            )
        recorder.finish("completed")
    return run


def prunes(run: Path) -> list[tuple[int, str, int]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(line["step"], line["reason"], line["freed_bytes"]) for line in lines if line["event"] == "prune"]


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_prune_tells_the_run_that_has_ended(recorded: Path, where: str) -> None:
    assert json.loads((recorded / "summary.json").read_text())["checkpoint"]["kept"] == [10, 20, 30]
    assert cli.main(["ckpt", "prune", str(recorded / where), "--dry-run"]) == 0
    assert prunes(recorded) == []
    assert cli.main(["ckpt", "prune", str(recorded / where)]) == 0
    assert prunes(recorded) == [(10, "not kept by keep_last", 100)]
    checkpoint = json.loads((recorded / "summary.json").read_text())["checkpoint"]
    assert (checkpoint["kept"], checkpoint["pruned"]) == ([20, 30], 1)


def test_prune_writes_nothing_into_the_record_of_a_run_that_lives(recorded: Path, capsys: Capture) -> None:
    before = (recorded / "events.jsonl").read_bytes()
    with RunFolder.open(recorded, resume=True):
        assert cli.main(["ckpt", "prune", str(recorded)]) == 0
    assert steps(recorded) == [20, 30]
    assert (recorded / "events.jsonl").read_bytes() == before
    # Whoever sums the run up looks at the disk.
    assert load_run(recorded).summary["checkpoint"]["kept"] == [20, 30]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_prune_says_what_it_deleted_where_the_record_of_the_run_cannot_be_read(
    recorded: Path, options: list[str], capsys: Capture
) -> None:
    (recorded / "run.json").write_text('{"attempt"')
    assert cli.main(["ckpt", "prune", str(recorded), *options]) == 0
    said = capsys.readouterr().out
    assert steps(recorded) == [20, 30]
    if options:
        told = json.loads(said)
        assert [row["step"] for row in told["checkpoints"] if row["deleted"]] == [10]
        said = "\n".join(told["warnings"])
    else:
        assert "deleted 1 checkpoint" in said
    assert "run.json cannot be read" in said


def test_prune_says_what_it_could_not_delete(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(step_dir(run / "checkpoints", 10), monkeypatch)
    assert cli.main(["ckpt", "prune", str(run), "--keep", "keep_last.n=1"]) == 1
    said = capsys.readouterr().out
    assert steps(run) == [10, 30]
    assert "warning: step 10 could not be deleted: Input/output error" in said
    assert "deleted 1 checkpoint" in said


def test_what_was_deleted_by_hand_is_not_called_kept(recorded: Path) -> None:
    shutil.rmtree(recorded / "checkpoints" / "global_step_30")
    assert load_run(recorded).summary["checkpoint"]["kept"] == [10, 20]
    shutil.rmtree(recorded / "checkpoints")
    assert load_run(recorded).summary["checkpoint"]["kept"] == []


def test_the_checkpoints_of_a_run_that_keeps_them_elsewhere_are_looked_for_there(recorded: Path) -> None:
    (recorded / "checkpoints").rename(recorded.parent / "elsewhere")
    OmegaConf.save(config.compose(["checkpoint.dir=elsewhere"]), recorded / ".hydra" / "config.yaml")
    assert load_run(recorded).summary["checkpoint"]["kept"] == [10, 20, 30]
    assert cli.main(["ckpt", "prune", str(recorded)]) == 0
    assert prunes(recorded) == [(10, "not kept by keep_last", 100)]


def test_prune_does_not_take_a_step(run: Path) -> None:
    assert cli.main(["ckpt", "prune", str(run / "checkpoints" / "global_step_10")]) == 2
    assert steps(run) == [10, 20, 30]


# pins


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(run: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "pin", str(run), "10"]) == 0
    cli.main(["ckpt", "prune", str(run)])
    assert steps(run) == [10, 20, 30]
    capsys.readouterr()
    assert answer(capsys, "unpin", run / "checkpoints" / "global_step_10") == (0, {"step": 10, "pinned": False})
    cli.main(["ckpt", "prune", str(run)])
    assert steps(run) == [20, 30]


def test_a_setting_that_only_the_run_could_resolve_is_in_the_way_of_no_command(run: Path) -> None:
    saved = OmegaConf.load(run / ".hydra" / "config.yaml")
    OmegaConf.update(saved, "checkpoint.mirror", "/copies/${hydra:job.num}", force_add=True)
    OmegaConf.save(saved, run / ".hydra" / "config.yaml")
    assert cli.main(["ckpt", "prune", str(run)]) == 0
    assert steps(run) == [20, 30]


# mistakes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["list", "none"], "none is not a folder"),
        (["list", "empty"], "holds no checkpoints"),
        (["list", "run", "11"], "there is no checkpoint of step 11 in "),
        (["inspect", "run", "11"], "there are: 10, 20, 30"),
        (["verify", "run/checkpoints/global_step_10", "20"], "is step 10, but step 20 is asked for"),
        (["pin", "run"], "Give its step after run"),
        (["pin", "run", "11"], "there is no checkpoint of step 11 in "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(run.parent)
    (run.parent / "empty").mkdir()
    assert cli.main(["ckpt", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert told in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["list"], ["list", ".", "ten"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: Capture) -> None:
    assert cli.main(["ckpt", *arguments]) == 2


def test_the_commands_load_nothing_that_only_runs_need(run: Path) -> None:
    program = (
        "import sys; from trinity_sync.cli import main as cli; code = cli.main(['ckpt', 'verify', sys.argv[1]]); "
        "sys.exit(code or len({'torch', 'ray', 'asyncio'} & sys.modules.keys()))"
    )
    root = config.conf_dir().parent
    assert subprocess.run([sys.executable, "-c", program, str(run)], cwd=root, capture_output=True).returncode == 0


def test_a_folder_of_checkpoints_alone_is_listed_without_hydra(run: Path) -> None:
    program = (
        "import sys; from trinity_sync.cli import main as cli; code = cli.main(['ckpt', 'list', sys.argv[1]]); "
        "sys.exit(code or len({'hydra', 'omegaconf'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program, str(run / "checkpoints")]
    assert subprocess.run(command, cwd=config.conf_dir().parent, capture_output=True).returncode == 0


HOSTILE = [
    ("created", 1e300),
    ("step", 2.5),
    ("attempt", -1),
    ("world_size", 10**30),
    ("digest", ["x"]),
    ("metrics", {"reward": 10**400}),
    ("metrics", {"reward": "high"}),
    *(
        ("files", [{"path": path, "bytes": 1, "xxh3_128": ""}])
        for path in ("a\0b", "../../run.json", "/etc/passwd", 5, "")
    ),
    *(("files", [{"path": "x", "bytes": size, "xxh3_128": ""}]) for size in (-1, 1e300, True, "1")),
    ("files", [None]),
    ("base", []),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE)
@pytest.mark.few(6)
def test_a_manifest_with_a_value_that_cannot_be_is_damaged(run: Path, key: str, value: object, capsys: Capture) -> None:
    manifest = run / "checkpoints" / "global_step_20" / "manifest.json"
    body = {**json.loads(manifest.read_text()), key: value}
    body.pop("self")
    manifest.write_text(json.dumps({**body, "self": canonical_digest(body)}))
    _, [row] = answer(capsys, "list", run, 20)
    assert row["state"] == "damaged"
    assert str(manifest) in row["problems"][0]
    assert cli.main(["ckpt", "list", str(run)]) == 0
    assert str(manifest) in capsys.readouterr().out
    assert cli.main(["ckpt", "inspect", str(run), "20"]) == 1
    assert cli.main(["ckpt", "verify", str(run)]) == 1


def test_a_manifest_that_is_nested_without_end_is_damaged(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "global_step_20" / "manifest.json").write_text('{"format":' + "[" * 200_000)
    _, [row] = answer(capsys, "list", run, 20)
    assert row["state"] == "damaged"


def test_foreign_text_in_a_table_is_text(run: Path, capsys: Capture) -> None:
    manifest = run / "checkpoints" / "global_step_20" / "manifest.json"
    body = {**json.loads(manifest.read_text()), "digest": "\x1b[31m\nstep  "}
    body.pop("self")
    manifest.write_text(json.dumps({**body, "self": canonical_digest(body)}))
    assert cli.main(["ckpt", "list", str(run), "20"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert len(told.splitlines()) == 2
