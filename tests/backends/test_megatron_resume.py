"""In which layouts a run may go on from a Megatron checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.backends.megatron.megatron_families import check_layout
from trinity_sync.config import compose
from trinity_sync.errors import ConfigError


def _checkpoint(folder: Path, **layout: Any) -> Path:
    contents = {"layout": {"tp": 2, "pp": 1, "dp": 1, "optimizer_format": "fully_reshardable", **layout}}
    (folder / "actor").mkdir()
    (folder / "actor" / "ckpt_contents.json").write_text(json.dumps(contents))
    return folder


def _run(*overrides: str) -> Any:
    return compose(["backend=megatron", *overrides]).backend


def test_the_same_layout_needs_nothing_said(tmp_path: Path) -> None:
    assert check_layout(_run("backend.tp=2"), _checkpoint(tmp_path)) is None


def test_a_checkpoint_that_does_not_say_its_layout_is_taken_as_it_is(tmp_path: Path) -> None:
    assert check_layout(_run("backend.tp=2"), tmp_path) is None


@pytest.mark.parametrize("wanted", [["backend.pp=2"], ["backend.ranks=1"], ["backend.ranks=4", "backend.tp=2"]])
def test_another_layout_has_to_give_up_the_random_generators(tmp_path: Path, wanted: list[str]) -> None:
    checkpoint = _checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"set backend\.restore_rng=false"):
        check_layout(_run(*wanted), checkpoint)
    said = check_layout(_run("backend.restore_rng=false", *wanted), checkpoint)
    assert said is not None
    assert "tp=2 pp=1 dp=1" in said


@pytest.mark.parametrize(("saved", "wanted"), [({"ep": 2}, 1), ({}, 2)], ids=["fewer", "of-a-time-before-experts"])
def test_other_expert_ranks_are_another_layout(tmp_path: Path, saved: dict[str, int], wanted: int) -> None:
    checkpoint = _checkpoint(tmp_path, tp=1, dp=2, **saved)
    with pytest.raises(ConfigError, match=r"tp=1 pp=1 dp=2 ep=\d, .* set backend\.restore_rng=false"):
        check_layout(_run(f"backend.ep={wanted}"), checkpoint)
    assert check_layout(_run(f"backend.ep={wanted}", "backend.restore_rng=false"), checkpoint)
    buckets = tmp_path / "buckets"
    buckets.mkdir()
    checkpoint = _checkpoint(buckets, tp=1, dp=2, **saved, optimizer_format="dp_reshardable")
    with pytest.raises(ConfigError, match=rf"set backend\.tp=1 backend\.pp=1 backend\.ep={3 - wanted};"):
        check_layout(_run(f"backend.ep={wanted}", "backend.restore_rng=false"), checkpoint)


def test_an_optimizer_in_buckets_keeps_tp_and_pp(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, optimizer_format="dp_reshardable")
    with pytest.raises(ConfigError, match=r"set backend\.tp=2 backend\.pp=1.*fully_reshardable"):
        check_layout(_run("backend.pp=2", "backend.restore_rng=false"), checkpoint)
    assert check_layout(_run("backend.ranks=4", "backend.tp=2", "backend.restore_rng=false"), checkpoint)
