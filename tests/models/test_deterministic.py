"""Kernels that give the same bits each time: asked for on a GPU, and nothing changed without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinity_sync.config import compose, typed
from trinity_sync.explorer.actor import explorer_spec
from trinity_sync.trainer.worker_spec import worker_spec

PROGRAM = """
import os, torch
from trinity_sync.models.families import use_deterministic_kernels

torch.cuda.is_available = lambda: {gpu}  # stands for a machine that has one: no kernel is run here
use_deterministic_kernels()
print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
      torch.utils.deterministic.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
      os.environ.get("NCCL_ALGO"))
"""


@pytest.mark.parametrize(
    ("gpu", "found"), [(False, "False False True None Tree"), (True, "True True False :4096:8 Tree")]
)
def test_a_gpu_is_asked_for_them_and_nothing_changes_without_one(
    gpu: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    program = [sys.executable, "-c", PROGRAM.format(gpu=gpu)]
    assert subprocess.check_output(program, text=True, timeout=120).strip() == found


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [([], True), (["trainer.deterministic=false"], False), (["trainer.schedule=free", "sync.max_staleness=1"], False)],
)
def test_who_promises_the_same_bits_asks_for_them(overrides: list[str], asked: bool) -> None:
    cfg = typed(compose(overrides))
    assert worker_spec(cfg, "model", "logs").deterministic is asked
    assert explorer_spec(cfg, "model", "logs").deterministic is asked
