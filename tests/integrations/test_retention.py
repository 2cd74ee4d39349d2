"""Retention of a verl program: what its variable may say, and that its monitor is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl import opening
from trinity_sync.integrations.verl.retention import RETENTION, policies_in
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
        ("keep_last=2", "'keep_last=2'; what it may have is"),
        ("keep_last.n", "'keep_last.n'; what it may have is"),
        ("keep_last.n=0", "keep_last.n is 0"),
        ("keep_last.n=some", "keep_last.n"),
        ("keep_for.seconds=soon", "keep_for.seconds is soon"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_name(said: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{RETENTION}.*{told}"):
        policies_in({RETENTION: said})


def test_the_monitor_that_is_started_has_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(opening, "join_run", lambda root, **given: told.update(given))
    opening.open_monitor(str(Path("/root/global_step_6/actor")), None, 1.0, policies=[KeepLast(2)])
    assert told["config"].policies == [KeepLast(2)]  # type: ignore[attr-defined]
