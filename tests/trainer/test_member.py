"""What a rank of the trainer is given when it is attached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trinity_sync.trainer import member as member_module
from trinity_sync.trainer.member import Member


def test_a_versions_copy_is_waited_for_by_the_limit_of_syncs_and_a_save_by_that_of_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[str, float] = {}

    def stager(*args: Any, sync_timeout_s: float) -> None:
        limits["version"] = sync_timeout_s

    def meetings(timeout_s: float) -> None:
        limits["save"] = timeout_s

    monkeypatch.setattr(member_module, "WeightStager", stager)
    monkeypatch.setattr(member_module, "Meetings", SimpleNamespace(of_default_group=meetings))
    monkeypatch.setattr(member_module, "AgentSaver", lambda *args, **kwargs: None)
    monkeypatch.setattr(member_module, "this_process", lambda who: None)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(member_module, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    rank = object.__new__(Member)
    backend = SimpleNamespace(writes_own_files=False)
    vars(rank).update(_rank=0, _part="rank-00000", _layout=None, _segments={}, _backend=None)
    vars(rank).update(_spec=SimpleNamespace(backend=backend, checkpoint_format="verl", lazy_snapshot=True))
    lifeline = SimpleNamespace(reference=None)
    synchronizer: Any = SimpleNamespace(timeout_s=60.0, lifeline=lambda: lifeline, watch=lambda *args: None)
    agent: Any = None
    rank.attach(agent, {}, synchronizer, lambda **named: SimpleNamespace(), 1800.0)
    assert limits == {"version": 60.0, "save": 1800.0}
