"""`trinity-sync ckpt export` and `ckpt diff`: what they print, where they find checkpoints, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint import written
from tests.checkpoint.helpers import newer, unreadable
from trinity_sync import config
from trinity_sync.checkpoint import export
from trinity_sync.checkpoint.folder import leases
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest
from trinity_sync.cli import main as cli
from trinity_sync.weights.tensors import saved_tensors, state_digest

Capture = pytest.CaptureFixture[str]


def weights(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor + step for name, tensor in saved_tensors(written.small_model("tied")).items()}


def commit(root: Path, step: int, **manifest: Any) -> None:
    actor = prepare_staging(root, step, 0) / "actor"
    written.write_companions(written.small_model("tied"), actor)
    written.write_parts(actor, weights(step), 2)
    digest = state_digest(weights(step), "BF16")
    commit_folder(root, Manifest(**({"step": step, "attempt": 0, "kind": "state_dict", "digest": digest} | manifest)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        commit(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def answer(capsys: Capture, *arguments: object) -> tuple[int, Any]:
    code = cli.main(["ckpt", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def value(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.norm.weight"].float()


# export


def test_the_newest_checkpoint_of_a_run_is_exported(run: Path, tmp_path: Path, capsys: Capture) -> None:
    code, told = answer(capsys, "export", run, "--output", tmp_path / "out")
    assert (code, told["step"], told["dtypes"], told["files"]) == (0, 2, ["BF16"], ["model.safetensors"])
    assert told["digest"] == told["manifest_digest"] == state_digest(weights(2), "BF16")
    assert torch.equal(value(tmp_path / "out"), torch.full((8,), 3.0))


@pytest.mark.parametrize("where", [["run", "1"], ["run/checkpoints", "--step", "1"], ["run/checkpoints/global_step_1"]])
def test_a_step_can_be_named(run: Path, tmp_path: Path, where: list[str]) -> None:
    assert cli.main(["ckpt", "export", str(tmp_path / where[0]), *where[1:], "-o", str(tmp_path / "out")]) == 0
    assert torch.equal(value(tmp_path / "out"), torch.full((8,), 2.0))


def test_people_are_told_the_digest_and_that_it_is_the_manifests(run: Path, tmp_path: Path, capsys: Capture) -> None:
    digest = state_digest(weights(2), "BF16")
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith(f"BF16\ndigest {digest}, that of the manifest\n")
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    assert f"; in wire dtype {digest}, that of the manifest" in capsys.readouterr().out


def test_another_digest_than_the_manifests_ends_with_1(run: Path, tmp_path: Path, capsys: Capture) -> None:
    commit(run / "checkpoints", 3, digest="0" * 32)
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: the weights in ")
    assert not (tmp_path / "out").exists()


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer": (newer, "written by a newer version of trinity-sync: format 2, this one reads 1"),
    "missing": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "damaged": (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "unreadable": (lambda folder: unreadable(folder / "manifest.json"), "cannot be read now: Input/output error"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_an_older_step_is_never_taken_in_silence(run: Path, tmp_path: Path, capsys: Capture, what: str) -> None:
    spoil, word = SPOILT[what]
    spoil(run / "checkpoints" / "global_step_2")
    for command in (
        ["export", run, "--output", tmp_path / "out"],
        ["diff", run, run / "checkpoints" / "global_step_1"],
        ["inspect", run],
    ):
        assert cli.main(["ckpt", *map(str, command)]) == 1
        said = capsys.readouterr().err
        assert "global_step_2" in said
        assert word in said
        assert "to take an older one, name its step: 1" in said
    assert not (tmp_path / "out").exists()
    assert cli.main(["ckpt", "export", str(run), "1", "--output", str(tmp_path / "out")]) == 0
    if what != "missing":
        assert cli.main(["ckpt", "export", str(run), "2", "--output", str(tmp_path / "two")]) == 1
        assert word in capsys.readouterr().err


def test_an_export_follows_no_link_out_of_the_checkpoint(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "secret").write_text("secret")
    actor = run / "checkpoints" / "global_step_2" / "actor"
    for name, target in (("stray.txt", tmp_path / "secret"), ("folder", tmp_path)):
        link = actor / "huggingface" / name
        link.symlink_to(target)
        assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 1
        assert f"{link} is a link to {target}" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        link.unlink()
    (actor / "huggingface" / "inside.json").symlink_to(actor / "huggingface" / "config.json")
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "inside.json").is_symlink()


def test_a_hugging_face_folder_that_was_named_may_be_made_of_links(run: Path, tmp_path: Path) -> None:
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "blobs")]) == 0
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert cli.main(["ckpt", "export", str(tmp_path / "snapshot"), "--output", str(tmp_path / "out")]) == 0


def test_checkpoints_of_other_programs_are_found_by_their_tracker(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        actor = tmp_path / f"global_step_{step}" / "actor"
        written.write_companions(written.small_model("tied"), actor)
        written.write_verl(actor, weights(step), (2,))
    assert answer(capsys, "export", tmp_path, "--output", tmp_path / "two")[1]["step"] == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    code, told = answer(capsys, "export", tmp_path, "--output", tmp_path / "one")
    assert (code, told["step"], told["manifest_digest"]) == (0, 1, None)


def test_a_checkpoint_is_leased_while_it_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity_sync.checkpoint import export as export_module

    leases = run / "checkpoints" / ".leases"
    seen = []

    def look(folder: Path, *rest: Any, **more: Any) -> Any:
        seen.extend(path.name for path in leases.iterdir())
        return real(folder, *rest, **more)

    real = export_module.export_checkpoint
    monkeypatch.setattr(export_module, "export_checkpoint", look)
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert [name[:4] for name in seen] == ["2-0-"]
    assert list(leases.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "run"],
        ["export", "run", "--output", "run"],
        ["export", "run", "7", "--output", "out"],
        ["export", "none", "--output", "out"],
        ["export", "run", "--output", "out", "--dtype", "int8"],
        ["export", "run", "--output", "out", "--max-shard-size", "5XB"],
        ["export", "run", "--output", "out", "--config", "run"],
        ["diff", "run"],
        ["diff", "run", "none"],
    ],
)
def test_mistakes_end_with_2(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str]) -> None:
    monkeypatch.chdir(run.parent)
    assert cli.main(["ckpt", *arguments]) == 2
    assert not (run.parent / "out").exists()


def test_the_largest_file_can_be_set(run: Path, tmp_path: Path, capsys: Capture) -> None:
    told = answer(capsys, "export", run, "--output", tmp_path / "out", "--max-shard-size", "0.5KB")[1]
    assert len(told["files"]) > 1


# diff


def test_a_checkpoint_equals_its_export(run: Path, tmp_path: Path, capsys: Capture) -> None:
    cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")])
    capsys.readouterr()
    code, told = answer(capsys, "diff", run, tmp_path / "out")
    assert (code, told["equal"], told["differing"]) == (0, True, [])
    assert cli.main(["ckpt", "diff", str(run), str(tmp_path / "out")]) == 0
    assert "equal, bit for bit: 13 tensors" in capsys.readouterr().out


def test_two_steps_differ_and_the_exit_code_says_so(run: Path, capsys: Capture) -> None:
    steps = [run / "checkpoints" / f"global_step_{step}" for step in (1, 2)]
    code, told = answer(capsys, "diff", *steps)
    assert (code, told["equal"], len(told["differing"])) == (1, False, told["tensors"])
    norm = next(found for found in told["differing"] if found["name"] == "model.norm.weight")
    assert norm == {
        "name": "model.norm.weight",
        "a": {"dtype": "BF16", "shape": [8]},
        "b": {"dtype": "BF16", "shape": [8]},
        "elements": 8,
        "changed": 8,
        "max_abs": 1.0,
        "mean_abs": 1.0,
        "relative": 0.5,
        "not_finite": 0,
    }


def test_two_models_are_called_that(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        save_file({f"w{layers}": torch.ones(2)}, tmp_path / name / "model.safetensors")
    places = [str(tmp_path / name) for name in ("a", "b")]
    assert cli.main(["ckpt", "diff", *places]) == 1
    assert "these are different models: tensors have other names or shapes\n" in capsys.readouterr().out
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "hidden_size": 4}))
    assert cli.main(["ckpt", "diff", *places]) == 1
    assert "these are different models: num_hidden_layers 2 in A, 3 in B\n" in capsys.readouterr().out
    steps = [str(run / "checkpoints" / f"global_step_{step}") for step in (1, 2)]
    assert cli.main(["ckpt", "diff", *steps]) == 1
    assert "different models" not in capsys.readouterr().out


def test_an_export_looks_at_its_place_first(run: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "file" / "out")]) == 2
    assert f"cannot be created: {tmp_path / 'file'} is a file" in capsys.readouterr().err
    monkeypatch.setattr(leases.os, "access", lambda *_: False)  # root may write anywhere
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "new" / "out")]) == 2
    assert f"cannot be created: {tmp_path} is not writable" in capsys.readouterr().err
    monkeypatch.undo()
    usage = SimpleNamespace(total=100, free=10)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: usage)
    assert cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out")]) == 1
    assert "bytes, and 10 are free there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_people_get_a_line_per_differing_tensor_and_a_summary(tmp_path: Path, capsys: Capture) -> None:
    a = {
        "same": torch.ones(2),
        "value": torch.ones(4),
        "kind": torch.ones(2),
        "form": torch.ones(2),
        "gone": torch.ones(1),
    }
    b = a | {
        "value": torch.tensor([1.0, 2, 1, 1]),
        "kind": torch.ones(2).bfloat16(),
        "form": torch.ones(3),
        "new": torch.ones(1),
    }
    del b["gone"]
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert cli.main(["ckpt", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:6] == [
        "form F32 2 in A, F32 3 in B - - - -",
        "gone only in A: F32 1 - - - -",
        "kind F32 2 in A, BF16 2 in B 0 of 2 (0.00%) 0 0 0",
        "new only in B: F32 1 - - - -",
        "value F32 4 1 of 4 (25.00%) 1 0.250 0.250",
    ]
    assert lines[-2].startswith("5 of 6 tensors differ; 1 of 8 elements (12.50%); dtypes differ: --dtype bf16")


def test_both_can_be_compared_in_another_dtype(run: Path, tmp_path: Path) -> None:
    cli.main(["ckpt", "export", str(run), "--output", str(tmp_path / "out"), "--dtype", "fp32"])
    assert cli.main(["ckpt", "diff", str(run), str(tmp_path / "out")]) == 1
    assert cli.main(["ckpt", "diff", str(run), str(tmp_path / "out"), "--dtype", "bf16"]) == 0


def test_what_cannot_be_read_is_one_line_and_exit_code_1(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for file in (run / "checkpoints" / "global_step_2" / "actor").glob("weights_*"):
        file.write_bytes(b"")
    assert cli.main(["ckpt", "diff", str(run), str(run / "checkpoints" / "global_step_1")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1


def test_help_and_mistakes_need_no_torch(run: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from trinity_sync.cli import main as cli; cli.main(['ckpt', 'diff', '--help']); "
        "code = cli.main(['ckpt', 'export', sys.argv[1], '--output', sys.argv[1]]); "
        "sys.exit(code != 2 or 'torch' in sys.modules)"
    )
    root = config.conf_dir().parent
    done = subprocess.run([sys.executable, "-c", program, str(run)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0
    assert "exit codes: 0 all tensors are equal; 1 some differ" in " ".join(done.stdout.split())
