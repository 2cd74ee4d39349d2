"""A run with a store, and a follower of it: the folder has the digest of the last published version."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import launch, resume, start
from trinity_sync.checkpoint.folder.contents import read_manifest
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


def test_the_store_of_a_run_that_was_killed_and_resumed_has_each_version_bit_for_bit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    given = ("sync=checkpoint", "sync.encoding=delta", "sync.delta.full_every=100", f"sync.store={store}")
    started = start(tmp_path / "run", *given, "trainer.steps=400", "retention=[keep_all]")
    started.wait_for_event(
        lambda event: event["event"] == "mirror" and (event["state"], event["step"]) == ("copied", 4)
    )
    os.killpg(started.process.pid, signal.SIGKILL)
    started.finish().go_back_to(2)
    run = resume(started.folder, "--skip-unreadable", "trainer.steps=5")
    assert run.code == 0, run.output
    published = {(event["attempt"], event["version"]): event["digest"] for event in run.events("publish")}
    there = {path: read_manifest(path) for path in store.glob("global_step_*") if (path / "manifest.json").exists()}
    versions = {(manifest.attempt, manifest.step): path for path, manifest in there.items()}
    assert sorted(versions) == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    for path in there:
        path.rename(tmp_path / path.name)
    follower = VersionFollower(str(store), tmp_path / "into", print)
    follower.open()
    for version, path in sorted(versions.items()):
        (tmp_path / path.name).rename(path)
        assert follower.update()
        assert follower.version == Version(*version)
        assert state_digest(load_file(follower.current / "model.safetensors"), "BF16") == published[version]
