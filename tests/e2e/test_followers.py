"""A run with a store, and a follower of it: the folder has the digest of the last published version."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import launch
from trinity_sync.checkpoint.mirror.follower import VersionFollower
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.tensors import state_digest

pytestmark = pytest.mark.all


@pytest.mark.parametrize("encoding", ["delta", "full"])
def test_a_follower_has_the_last_version_of_a_run(tmp_path: Path, encoding: str) -> None:
    store = tmp_path / "store"
    given = ("sync=checkpoint", f"sync.encoding={encoding}", "sync.delta.full_every=2", f"sync.store={store}")
    run = launch(tmp_path / "run", *given)
    assert run.code == 0, run.output
    assert run.events("fault") == []
    follower = VersionFollower(str(store), tmp_path / "into", print)
    follower.open()
    assert follower.update()
    assert follower.version == Version(0, 3)
    published = run.events("publish")[-1]
    assert state_digest(load_file(follower.current / "model.safetensors"), "BF16") == published["digest"]
    assert not (run.folder / "checkpoints" / ".deltas").exists()
    other = launch(tmp_path / "other", *given, "--dry-run")
    assert other.code == 2
    assert f"sync.store={store} cannot be used: it belongs to another run" in other.output
