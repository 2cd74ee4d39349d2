"""`trinity-sync weights`: the weights of any version of a run, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint import written
from tests.checkpoint.histories import commit_weights, remember
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.cli import main as cli
from trinity_sync.protocol.retention import KeepLast, KeepVersions, KeepWithinBudget
from trinity_sync.weights.tensors import saved_tensors, state_digest

Capture = pytest.CaptureFixture[str]
FIRST = {0: 2, 1: 4}
"""The first step of each attempt."""


def weights(attempt: int, step: int) -> dict[str, torch.Tensor]:
    tensors = saved_tensors(written.small_model("tied"))
    return {name: (tensor + step + 10 * attempt).bfloat16() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "run"
    for attempt, first in FIRST.items():
        remember(folder / "checkpoints", attempt, first, [weights(attempt, first + more) for more in range(4)])
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def answer(capsys: Capture, *arguments: object) -> tuple[int, Any]:
    code = cli.main(["weights", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("version", "attempt"), [("3", 0), ("4", 1), ("0-4", 0), ("0-2", 0), ("1-7", 1)])
def test_a_version_is_written_as_it_was_published(
    run: Path, tmp_path: Path, capsys: Capture, version: str, attempt: int
) -> None:
    """Without an attempt, that of the newest attempt."""
    step = int(version.rpartition("-")[2])
    before = sorted(run.rglob("*"))
    code, told = answer(capsys, run, version, "--output", tmp_path / "out")
    digest = state_digest(weights(attempt, step), "BF16")
    assert (code, told["step"], told["digest"], told["manifest_digest"]) == (0, step, digest, digest)
    assert told["source"].endswith(f".deltas/{attempt}-{step}")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(attempt, step).items())
    assert sorted(run.rglob("*")) == before, "nothing is written in the run"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_transformers_loads_it_and_people_are_told_its_digest(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["weights", str(run / "checkpoints"), "6", "-o", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    assert f"; in wire dtype {state_digest(weights(1, 6), 'BF16')}, that of the version" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight.bfloat16(), weights(1, 6)["model.norm.weight"])


def taken(run: Path) -> None:
    (run.parent / "out").mkdir()
    (run.parent / "out" / "mine").write_text("")


def without_history(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / ".deltas")


def lost(run: Path) -> None:
    (run / "checkpoints/.deltas/0-4/rank-00001-from-0-3.delta").unlink()


def record_changed(run: Path) -> None:
    path = run / "checkpoints/.deltas/0-4/history.json"
    path.write_text(re.sub('"digest": ".*"', f'"digest": "{"0" * 32}"', path.read_text()))


def unchanged(run: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("version", "harm", "code", "told"),
    [
        ("4", taken, 2, "out is not empty"),
        ("4", without_history, 2, r"run has no history of versions: it is of runs with retention=\[keep_last,keep_ver"),
        (
            "1",
            unchanged,
            2,
            "step 1 is older than the history, so it was not kept; there are 2 to 5 of attempt 0, 4",
        ),
        ("8", unchanged, 2, "step 8 was not published, or not kept; there are 2 to 5 of attempt 0, 4 to 7 of attempt"),
        ("0-6", unchanged, 2, "step 6 of attempt 0 was not published, or not kept; there are 2 to 5 of attempt 0, 4"),
        ("5-4", unchanged, 2, "step 4 of attempt 5 was not published, or not kept; there are 2 to 5 of attempt 0"),
        ("newest", unchanged, 2, "'newest' is not a version; expected a step, or ATTEMPT-STEP such as 1-20"),
        ("1-", unchanged, 2, "is not a version"),
        ("0-4", lost, 1, "no base and deltas lead to it: .*rank-00001-from-0-3.delta cannot be read: No such file"),
        ("0-4", record_changed, 1, "have the digest .* but the version had .*; nothing was written"),
    ],
)
def test_what_cannot_be_written_is_told_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: Capture, version: str, harm: Callable[[Path], None], code: int, told: str
) -> None:
    harm(run)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["weights", str(run), version, "-o", str(tmp_path / "out")]) == code
    assert re.search(told, " ".join(capsys.readouterr().err.split()))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_told_and_nothing_is_left(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert cli.main(["weights", str(run), "0-4", "-o", str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_base_that_cannot_be_read_now_is_named(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error", str(source))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    assert cli.main(["weights", str(run), "0-4", "-o", str(tmp_path / "out")]) == 1
    assert re.search(r"actor/weights_rank-00000\.safetensors: Input/output error; nothing", capsys.readouterr().err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_of_the_version(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(shutil, "copyfile", lambda *given: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        cli.main(["weights", str(run), "0-4", "-o", str(tmp_path / "out")])
    assert ended.value.code == 128 + number
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert signal.getsignal(number) == before


def test_an_output_in_the_checkpoint_folder_is_refused(run: Path, capsys: Capture) -> None:
    inside = run / "checkpoints" / ".deltas" / "mine"
    assert cli.main(["weights", str(run), "0-4", "-o", str(inside)]) == 2
    assert "lies in the checkpoint folder" in capsys.readouterr().err
    assert not inside.exists()


# ---- what the bytes of a history count for


def test_the_list_of_checkpoints_says_what_the_history_takes(run: Path, template: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "list", str(template)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"history: 8 versions, [\d.]+ kB, [\d.]+ kB shared with the checkpoints above; .*", told)


def test_what_a_base_shares_is_not_freed_with_the_checkpoint(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    remember(root, 0, 2, [weights(0, 2)])
    commit_weights(root, 3, weights(0, 3))
    [old, new] = prune_plan(root, [KeepLast(1), KeepVersions()], now=0.0, keep_state_dicts=1)
    size = sum(path.stat().st_size for path in (root / ".deltas").rglob("*.safetensors"))
    assert (old.keep, new.keep) == (False, True)
    assert old.manifest.bytes - old.bytes == size
    [gone], _ = prune(root, [old, new], now=0.0)
    assert gone["freed_bytes"] == old.bytes
    assert catalog.history_bytes(root) > size


def test_files_that_cannot_be_read_now_do_not_stop_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    remember(root, 0, 2, [weights(0, 2), weights(0, 3)])
    commit_weights(root, 3, weights(0, 3))
    stat = Path.stat

    def refused(path: Path, **given: bool) -> os.stat_result:
        if path.suffix in (".delta", ".safetensors"):
            raise OSError(5, "Input/output error", str(path))
        return stat(path, **given)

    monkeypatch.setattr(Path, "stat", refused)
    rows = prune_plan(root, [KeepLast(1), KeepVersions(), KeepWithinBudget(1)], now=0.0, keep_state_dicts=1)
    assert [(row.step, row.keep) for row in rows] == [(2, False), (3, True)]


def test_a_history_counts_for_a_budget_and_is_not_deleted(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    remember(root, 0, 2, [weights(0, 2), weights(0, 3)])
    kept = catalog.history_bytes(root)
    for step in (3, 4):
        commit_weights(root, step, weights(0, step))
    mine = sum(catalog.shared_bytes(info) for info in catalog.scan(root))
    checkpoints = sum(info.bytes for info in catalog.scan(root)) - mine
    fits = prune_plan(root, [KeepVersions(), KeepWithinBudget(kept + checkpoints)], now=0.0, keep_state_dicts=9)
    assert all(row.keep for row in fits)
    tight = prune_plan(root, [KeepVersions(), KeepWithinBudget(kept)], now=0.0, keep_state_dicts=9)
    assert [row.keep for row in tight] == [False, False, True]
    assert f"the history of versions ({kept} bytes)" in tight[-1].warnings[0]
    prune(root, tight, now=0.0)
    assert catalog.history_bytes(root) == kept
