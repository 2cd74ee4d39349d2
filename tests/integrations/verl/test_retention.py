"""Retention of a verl program: what its variable may say, and that its monitor is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import local_run
from trinity_sync.integrations.verl.committed_saves import CommittedSaves
from trinity_sync.integrations.verl.engine_registry import policies_in
from trinity_sync.integrations.verl.vendor import RETENTION
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import KeepEvery, KeepFor, KeepLast, KeepWithinBudget


def test_policies_are_read_as_the_configuration_names_them() -> None:
    said = "keep_last.n=2 keep_every.steps=100  keep_for.seconds=12h keep_within_budget.bytes=1TB"
    expected = (KeepLast(2), KeepEvery(100), KeepFor(12 * 3600.0), KeepWithinBudget(10**12))
    assert policies_in({RETENTION: said}) == expected
    assert policies_in({}) == policies_in({RETENTION: " "}) == ()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("keep_lots", "keep_lots is not a policy"),
        ("keep_last", "keep_last: .*'n'"),
        ("keep_last=2", "'keep_last=2'; allowed are"),
        ("keep_last.n", "'keep_last.n'; allowed are"),
        ("keep_last.n=0", "keep_last.n is 0"),
        ("keep_last.n=some", "keep_last.n"),
        ("keep_for.seconds=soon", "keep_for.seconds is soon"),
        ("keep_last.n=2 keep_versions", "keep_versions is for runs with sync=checkpoint"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_name(said: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{RETENTION}.*{told}"):
        policies_in({RETENTION: said})


def test_the_monitor_that_is_started_has_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(local_run, "join_run", lambda root, **given: told.update(given))
    local_run.open_monitor(str(Path("/checkpoints/global_step_6/actor")), None, 1.0, policies=[KeepLast(2)])
    assert told["config"].policies == [KeepLast(2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("limit", "told"), [(3, {"keep_last": 3}), (None, {}), (0, {}), (-1, {})])
def test_the_monitor_knows_verls_limit_before_the_commit(limit: int | None, told: dict[str, int]) -> None:
    monitor = Mock()
    rank: Any = SimpleNamespace(
        **{"rank": 0, "world_size": 1, "_backend": "fsdp", "_roles": [], "_attempt": 0, "_timeout_s": 1.0},
        **{"_monitor": monitor, "_coordinator": Mock(), "_limit": limit},
    )
    CommittedSaves._announce_parts(rank, "/checkpoints/global_step_4/actor", 4, FULL, {"part": "model"})
    assert monitor.begin.call_args.args[4] == {"backend": "fsdp", "world_size": 1, **told}


@pytest.mark.parametrize(("limit", "kept"), [(3, [3]), (None, []), (0, []), (-1, [])])
def test_the_limit_is_enforced_where_there_is_one(limit: int | None, kept: list[int]) -> None:
    rank: Any = SimpleNamespace(_folders={}, _monitor=Mock(), _timeout_s=1.0, previous_saved_paths=[])
    CommittedSaves.register_checkpoint(rank, "/checkpoints/global_step_4/actor", limit)
    assert [call.args[0] for call in rank._monitor.prune.call_args_list] == kept
