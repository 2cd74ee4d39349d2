"""`trinity-sync doctor`: what would stop a run is an error, and exit code 1."""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

import pytest

from trinity_sync.cli import main as cli
from trinity_sync.launch import machine
from trinity_sync.weights import native


def states(found: list[machine.Finding]) -> dict[str, str]:
    return {one.subject: one.state for one in found}


def test_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    told = capsys.readouterr().out
    for subject in (
        "packages",
        "native library",
        "GPUs",
        "shared memory",
        "memory",
        "disk",
        "temporary files",
        "ports",
        "open files",
    ):
        assert f" {subject} " in told
    assert (code == 1) == ("\nerror " in f"\n{told}")


def test_a_package_that_is_missing_stops_a_run_and_an_untried_version_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["ray==2.60", "verl==0.9", "s3fs>=1; extra == 's3'", "rich"])
    found = list(machine.findings({"ray": "2.60", "verl": "0.8"}.get))
    assert {name: states(found)[name] for name in ("verl", "rich")} == {"verl": "warning", "rich": "error"}
    assert not {"s3fs", "ray"} & set(states(found))


def test_gpus_that_torch_is_not_built_for_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "accelerator_count", lambda: 2)
    for torch, state in (("2.13.0+cpu", "error"), ("2.13.0", "ok")):
        found = list(machine.findings({"torch": torch}.get))
        assert states(found)["GPUs"] == state


def test_a_temporary_folder_that_is_too_deep_or_closed_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert states(list(machine.findings()))["sockets"] == "error"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert states(list(machine.findings()))["temporary files"] == "error"
    assert cli.main(["doctor"]) == 1
    assert "a run cannot start here" in capsys.readouterr().out


def test_numpy_in_place_of_the_native_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_PURE", "1")
    native._loaded.cache_clear()
    try:
        (found,) = [one for one in machine.findings() if one.subject == "native library"]
    finally:
        native._loaded.cache_clear()
    assert (found.state, found.told) == ("warning", "numpy and xxhash do its work: TRINITY_SYNC_PURE is set")
