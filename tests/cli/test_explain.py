"""`trinity-sync explain` and `completion`: what settings there are, said on the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config.description import described


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "sync.interval",
            [
                "trainer steps between published versions",
                "whole number, at least 1",
                "default  1",
                "conf/base/sync.yaml",
            ],
        ),
        ("backend.tp", ["tensor parallel", "(with backend=megatron)"]),
        ("task.too_long", ["refuse | filter | truncate", "task=jsonl", "task=verl"]),
        ("retention.policies.keep_last.n", ["number of checkpoints", "default  2"]),
        ("tracker.wandb.project", ["default  trinity-sync"]),
        ("trainer.lr", ["{new:5.0e-4,given:1.0e-6,sft:1.0e-5,lora:1.0e-4}", "fits the model"]),
        ("trainer.max_tokens", ["whole number, at least 1, or null"]),
        ("name", ["type     text", "by default the task's and the model's"]),
        ("task.validation.interval=3", ["trainer steps from one validation", "conf/base/validation_times.yaml"]),
        ("sync", ["sync=nccl", "sync.interval", "Trainer ranks broadcast"]),
        ("model.lora", ["model.lora.rank"]),
    ],
)
def test_a_setting_or_a_group_is_explained(capsys: pytest.CaptureFixture[str], key: str, words: list[str]) -> None:
    assert cli.main(["explain", key]) == 0
    told = capsys.readouterr().out
    assert [word for word in words if word not in told] == []


@pytest.mark.parametrize(("key", "near"), [("sync.intervall", "sync.interval"), ("synk", "sync")])
def test_an_unknown_one_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str], key: str, near: str) -> None:
    assert cli.main(["explain", key]) == 2
    assert f"error: {key} is not a setting; near to it: {near}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lr", "learning_rate", "steps", "trainer/steps", "max_new_tokens"])
def test_a_setting_is_found_by_another_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["explain", name]) == 0
    assert capsys.readouterr().out.splitlines()[0] in ("trainer.lr", "trainer.steps", "task.response_length")


QUESTIONS = {
    "How do I change the learning rate?": "trainer.lr",
    "stop early": "trainer.steps",
    "keep the best": "retention=keep_best",
    "sync less often": "sync.interval",
    "use two GPUs": "backend.ranks",
    "resume elsewhere": "trinity-sync resume RUN",
    "see samples": "samples.record_interval",
    "compare two runs": "trinity-sync ckpt diff A B",
    "export": "trinity-sync ckpt export RUN --output DIR",
    "go back to verl": "docs/coming-from-verl.md",
}


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_question_is_answered(capsys: pytest.CaptureFixture[str], question: str, answer: str) -> None:
    assert cli.main(["explain", *question.split()]) == 0
    assert any(line.split(" (")[0] == answer for line in capsys.readouterr().out.splitlines())


def test_a_question_about_something_else_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "bake", "a", "cake"]) == 2
    assert "error: bake a cake is not a setting; " in capsys.readouterr().err


def test_every_setting_of_a_run_is_explained_with_a_comment() -> None:
    known = {one.key: one for one in described()}
    keys = {one for one in _leaves(config.compose(["retention=[keep_last,keep_best]", "tracker=[wandb]"]), "")}
    above = tuple(f"{key}." for key in known)  # of those that hold a mapping
    assert {key for key in keys if key not in known and not key.startswith(above)} == set()
    assert [one.key for one in described() if not one.comment] == []
    of_others = (
        "hydra.",
        "model.architecture.",
        "task.reward.",
        "checkpoint.monitor.",
        "checkpoint.coordinator.",
    )  # which the schema leaves to whoever reads them
    assert {one.key for one in described() if not one.type and not one.key.startswith(of_others)} == set()


def _leaves(node: object, prefix: str) -> list[str]:
    if hasattr(node, "items_ex") and len(node):
        found = node.items_ex(resolve=False)
        return [leaf for name, inner in found for leaf in _leaves(inner, f"{prefix}.{name}" if prefix else name)]
    return [prefix]


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers for a line, by the script that the command prints."""
    bash = shutil.which("bash")
    assert bash is not None
    words = line.replace("=", " = ").split(" ")
    program = (
        f'eval "$({sys.executable} -m trinity_sync.cli completion bash)"\n'
        f'trinity-sync() {{ {sys.executable} -m trinity_sync.cli "$@"; }}\n'
        f'COMP_LINE="$1" COMP_POINT=${{#1}} COMP_CWORD={len(words) - 1}\n'
        'COMP_WORDBREAKS=$" \\t\\n\\"\\\'><=;|&(:"; _trinity_sync; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        [bash, "--norc", "-c", program, "bash", line], cwd=folder, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert found.stderr == ""
    return [text for text in found.stdout.split("\n") if text]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trinity-sync re", ["report ", "reproduce ", "resume "]),
        ("trinity-sync run sync=", ["checkpoint ", "memory ", "nccl "]),  # bash has split the word at '='
        ("trinity-sync run sync=nccl sync.inter", ["sync.interval="]),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, offered: list[str]) -> None:
    assert completed(line, tmp_path) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trinity-sync ckpt ex", ["export "]),
        ("trinity-sync run --dry", ["--dry-run "]),
        ("trinity-sync run -m backend=fs", ["backend=fsdp ", "backend=fsdp2 "]),
        ("trinity-sync run --config-dir my_conf task=s", ["task=sums "]),
        ("trinity-sync run sync=bogus trai", ["trainer="]),
        ("trinity-sync resume RUN trainer.st", ["trainer.steps="]),
        ("trinity-sync resume RU", []),  # the shell offers files
        ("trinity-sync explain sync.en", ["sync.encoding "]),
        ("trinity-sync completion ", ["bash ", "zsh "]),
        ("trinity-sync resume --from", ["--from-scratch "]),
    ],
)
def test_a_shell_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, offered: list[str]
) -> None:
    (tmp_path / "my_conf" / "task").mkdir(parents=True)
    (tmp_path / "my_conf" / "task" / "sums.yaml").write_text("_target_: a.B\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.delenv("COMP_POINT", raising=False)
    assert cli.main(["-sc", "query=bash"]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines(), err) == (offered, "")


def test_the_script_for_zsh_is_one_that_zsh_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef trinity-sync\n")
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n"], input=script, text=True, check=True, timeout=60)
