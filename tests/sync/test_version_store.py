"""What a publisher hands over to a store of versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from trinity_sync.actors.agent_client import WrittenDelta
from trinity_sync.protocol.parts import delta_file
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import checkpoint
from trinity_sync.sync.checkpoint import CheckpointPublisher, DeltaPublisher

PARTS = ("rank-00000", "rank-00001")


class Handed:
    """A store that only notes what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, str | None, bool, list[str]]] = []

    def add(self, version: Version, digest: str | None, full: Path | None, deltas: Sequence[Path]) -> None:
        assert all(path.is_file() for path in deltas)
        self.got.append((version.step, digest, full is not None, [path.name for path in deltas]))


class Deltas:
    """Agents that make a delta of each part, and of the first part one more over two versions."""

    def encode(self, sealed: Any, folder: Path, *, pays: bool, durable: bool) -> list[WrittenDelta]:
        step = sealed.version.step
        starts = [(part, step - 1) for part in PARTS if step > 1] + [(PARTS[0], step - 2)] * (step > 2)
        found = [WrittenDelta(part, Version(0, start), 10, "gap8z", 1, 100) for part, start in starts]
        for one in found:
            (folder / delta_file(one.part, one.start)).touch()
        return found

    kept = True
    report = commit = Mock()
    pays = Mock(return_value=True)


def sealed(step: int) -> Any:
    return SimpleNamespace(version=Version(0, step), digest=f"digest {step}", parts=dict.fromkeys(PARTS))


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(CheckpointPublisher, "_write", lambda self, sealed: Path(f"/global_step_{sealed.version.step}"))
    monkeypatch.setattr(checkpoint, "commit", Mock())
    return SimpleNamespace(versions=Handed(), base_every=None)


def test_with_deltas_a_store_gets_whole_ones_and_the_full_versions(
    side: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "VersionDeltas", lambda side, codec, always: Deltas())
    publisher = DeltaPublisher(side, Mock(), False, tmp_path, SimpleNamespace(full_every=3, codec="auto"))
    for step in (1, 2, 3, 4):
        publisher.publish(sealed(step))
    before = [[delta_file(part, (0, step - 1)) for part in PARTS] for step in (2, 3, 4)]
    assert side.versions.got == [
        (1, "digest 1", True, []),
        (2, "digest 2", False, before[0]),
        (3, "digest 3", False, before[1]),
        (4, "digest 4", True, before[2]),
    ]


def test_without_deltas_a_store_gets_full_versions(side: Any) -> None:
    publisher = CheckpointPublisher(side, Mock(), durable=False)
    publisher.publish(sealed(1))
    publisher.publish(sealed(2))
    assert side.versions.got == [(1, "digest 1", True, []), (2, "digest 2", True, [])]
