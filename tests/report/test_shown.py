"""What of a run's settings is shown, and what a hostile folder can do to a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.report.test_report import Page
from tests.tracking import synthetic
from trinity_sync.cli import main as cli
from trinity_sync.config import compose
from trinity_sync.host.references import shown_values
from trinity_sync.report import load, render_json, write_report

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its settings have a secret from the environment, and one that was typed."""
    monkeypatch.setenv("PLACE", "value-of-place")
    run = synthetic.whole_run(tmp_path / "sweep" / "0")
    hydra = run / ".hydra"
    hydra.mkdir(exist_ok=True)
    (hydra / "overrides.yaml").write_text("- tracker.x.api_key=typed-secret\n- task.place=${oc.env:PLACE}\n")
    (hydra / "config.yaml").write_text(
        "name: it\ntask:\n  place: ${oc.env:PLACE}\n  also: at-${task.place}\n  double: ${sum:1,2}\n"
        "tracker:\n  x:\n    api_key: typed-secret\n    store: sftp://me:pass-word@host/x\n"
    )
    return run


def test_the_page_shows_references_and_no_secrets(run: Path) -> None:
    page = write_report(run).read_text()
    for secret in ("value-of-place", "typed-secret", "pass-word"):
        assert secret not in page
    for kept in ("${oc.env:PLACE}", "at-${task.place}", "double: 3", "api_key: &#39;***&#39;", "sftp://me:***@host"):
        assert kept in page


def test_the_table_and_the_json_of_a_sweep_show_no_secrets(run: Path, capsys: Capture) -> None:
    shutil.copytree(run, run.parent / "1")
    (run.parent / "1" / ".hydra" / "overrides.yaml").write_text("- tracker.x.api_key=another-one\n")
    (run.parent / "multirun.yaml").touch()
    assert cli.main(["report", str(run.parent)]) == 0
    assert cli.main(["list", str(run.parent), "--json"]) == 0
    assert cli.main(["list", str(run.parent), "--jobs"]) == 0
    told = capsys.readouterr().out + render_json(run.parent) + (run.parent / "report.html").read_text()
    for secret in ("value-of-place", "typed-secret", "another-one"):
        assert secret not in told


def test_what_is_sent_to_trackers_has_references_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "value-of-key")
    monkeypatch.setenv("STEPS", "7")
    given = ("+tracker.x.api_key=typed", "+tracker.x.password=${oc.env:KEY}", "trainer.steps=${oc.env:STEPS}")
    cfg = compose([*given, "checkpoint.mirror=sftp://me:word@host/x", "name=${oc.env:KEY}"])
    sent = shown_values(cfg)
    assert sent["tracker"]["x"] == {"api_key": "***", "password": "${oc.env:KEY}"}
    assert (sent["trainer"]["steps"], sent["name"]) == ("${oc.env:STEPS}", "${oc.env:KEY}")
    assert sent["checkpoint"]["mirror"] == "sftp://me:***@host/x"
    assert sent["samples"]["buffer"] == cfg.samples.buffer  # what it refers to is no secret
    assert (cfg.name, cfg.trainer.steps) == ("value-of-key", 7)


@pytest.mark.parametrize("name", ["javascript:alert(1)", 'a"onclick="x', "a?b#c", "//host", "a%41"])
@pytest.mark.few(2)
def test_a_link_leads_to_the_folder_of_the_job_whatever_its_name(name: str, tmp_path: Path) -> None:
    job = name.strip("/")
    for place in (tmp_path / job, tmp_path / "1"):
        synthetic.whole_run(place)
        write_report(place)
    page = Page(write_report(tmp_path))
    assert "1/report.html" in page.addresses
    assert {unquote(address) for address in page.addresses} == {"1/report.html", f"{job}/report.html"}
    assert not any(urlsplit(address).scheme or urlsplit(address).netloc for address in page.addresses)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("run.json", "started", 1e300),
        ("run.json", "error", "\ud800"),
        ("run.json", "error", "\x1b[31m</pre><script>"),
        ("events.jsonl", "attempt", []),
        ("metrics.jsonl", "attempt", {}),
        ("metrics.jsonl", "step", -1),
        ("metrics.jsonl", "step", 10**400),
        ("summary.json", "peak_memory", {"driver": 10**400}),
    ],
)
@pytest.mark.few(3)
def test_a_hostile_value_costs_only_its_own_part(
    file: str, key: str, value: object, tmp_path: Path, capsys: Capture
) -> None:
    run = synthetic.whole_run(tmp_path / "run")
    path = run / file
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(json.dumps({**json.loads(line), key: value}) + "\n" for line in lines))
    for command in (["list", tmp_path], ["report", run], ["report", run, "--json"]):
        assert cli.main(list(map(str, command))) in (0, 1)
    watched = cli.main(["watch", str(run), "--once"])
    told = capsys.readouterr()
    if key == "started":
        assert (watched, "run.json is not the record of a run: started is 1e+300" in told.err) == (2, True)
    else:
        assert watched in (0, 1)
    assert "\x1b" not in told.out + told.err
    assert "<script>\x1b" not in (run / "report.html").read_text()
    assert load(run)
