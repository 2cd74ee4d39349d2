"""The names of a run's task and model, from its settings."""

from __future__ import annotations

import pytest

from trinity_sync.host.references import Settings, model_name, run_name, task_name


def settings(
    *, task: str | list[str] | None = None, model: str | None = None, shapes: str | None = None, of: str = "JsonlTask"
) -> Settings:
    kind = "train" if shapes is None else "bytes"
    return {
        "workload": {"kind": kind},
        "task": {"path": task, "_target_": f"trinity_sync.tasks.some.{of}"},
        "model": {"path": model, "shapes": shapes, "architecture": {"model_type": "qwen3"}},
    }


def test_a_run_with_a_model_of_its_own_is_named_after_its_task() -> None:
    default = settings(of="CopyDigits")
    assert (run_name(default), task_name(default), model_name(default)) == ("copy-digits", "copy-digits", "qwen3")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("data/gsm8k.jsonl", "gsm8k"),
        ("gsm8k.jsonl.gz", "gsm8k"),
        ("/data/gsm8k/train.parquet", "gsm8k"),
        ("math/data/train-00000-of-00002.parquet", "math"),
        ("train.jsonl", "train"),
        (["gsm8k.jsonl", "more.jsonl"], "gsm8k"),
        ("gsm8k/*.jsonl", "gsm8k"),
        ("my prompts (1).jsonl", "my-prompts-1"),
        (r"C:\data\gsm8k.jsonl", "gsm8k"),
        ("größe.jsonl", "größe"),
        ("${oc.env:DATA}/gsm8k.jsonl", "jsonl"),
        ("", "jsonl"),
        ([], "jsonl"),
        (None, "jsonl"),
    ],
)
def test_a_task_is_named_after_its_file_else_after_its_class(task: str | list[str] | None, name: str) -> None:
    assert run_name(settings(task=task)) == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        (f"~/.cache/hub/models--Qwen--Qwen3-0.6B/snapshots/{'0a' * 20}", "Qwen3-0.6B"),
        ("outputs/sft/2026-11-21_12-00-00/hf", "sft"),
        ("multirun/sft/2026-11-21_12-00-00/3/export", "sft"),
        ("sft/checkpoint-500", "sft"),
        ("sft/checkpoints/global_step_20/actor/huggingface", "sft"),
        ("hf", "hf"),
        ("../hf", "hf"),
    ],
)
def test_a_model_is_named_after_its_folder(model: str, name: str) -> None:
    assert model_name(settings(model=model)) == name
    assert run_name(settings(task="gsm8k.jsonl", model=model)) == f"gsm8k-{name}"


@pytest.mark.parametrize(("shapes", "name"), [("qwen3-8b", "bytes-qwen3-8b"), ("/models/Big/config.json", "bytes-Big")])
def test_a_run_of_bytes_is_named_after_the_sizes(shapes: str, name: str) -> None:
    assert run_name(settings(shapes=shapes)) == name


def test_long_names_are_cut() -> None:
    assert run_name(settings(task="a" * 300, model="b" * 300)) == f"{'a' * 40}-{'b' * 40}"


def test_settings_of_other_programs_have_no_names() -> None:
    unknown: Settings = {"task": "text", "model": None}
    assert (task_name(unknown), model_name(unknown), run_name(unknown)) == (None, None, "run")
