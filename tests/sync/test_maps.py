"""Where the parts of a version can be mapped: slots and shard files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo, shard_file
from trinity_sync.protocol.versions import Lease, Version
from trinity_sync.sync.base import ExplorerSide, LayoutCache
from trinity_sync.sync.maps import FileMaps, SlotMaps
from trinity_sync.sync.memory import PartCopies
from trinity_sync.sync.pieces import BroughtPart, WantedPart
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import write_shard_file
from trinity_sync.weights.shards import whole
from trinity_sync.weights.slots import SegmentError, SlotArena
from trinity_sync.weights.staging import stage

NAMES = ("rank-00000", "rank-00001")
LAYOUTS = {part: PartLayout.build(part, [whole(part, "I64", (number + 3,))], 64) for number, part in enumerate(NAMES)}


def segment(part: str) -> bytes:
    """What a rank stages."""
    staged = bytearray(LAYOUTS[part].nbytes)
    stage(LAYOUTS[part], {part: torch.arange(len(staged) // 8)}, staged)
    return bytes(staged)


def lease_of(folder: Path | None, paths: dict[str, str]) -> Lease:
    parts = {
        part: PartInfo(
            part=part,
            node="here",
            path=paths.get(part, ""),
            nbytes=layout.nbytes,
            layout=layout.digest,
            buckets=[b"digest of a bucket"],
        )
        for part, layout in reversed(LAYOUTS.items())
    }
    return Lease(
        id=0,
        reader=0,
        version=Version(0, 3),
        slot=0,
        expires=0.0,
        parts=parts,
        digest=None,
        location=None if folder is None else str(folder),
    )


def layouts() -> LayoutCache:
    made = LayoutCache({}, 1.0)
    for layout in LAYOUTS.values():
        made.learn(layout)
    return made


class BringingAgent:
    """The agent of a node, which has brought each part to a slot there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def bring(self, wanted: WantedPart) -> Any:
        self.asked.append(wanted.part)
        return SimpleNamespace(result=lambda limit_s: BroughtPart(f"/slots/{wanted.part}", ["it was damaged"]))


def test_parts_of_other_nodes_are_mapped_in_the_slots_that_the_nodes_agent_has_filled() -> None:
    agent, faults = BringingAgent(), list[str]()
    agents: Any = {"here": agent, "there": None}
    side = ExplorerSide(name="e", node="here", agents=agents, layouts=layouts(), timeout_s=1.0, on_fault=faults.append)
    lease = lease_of(None, {NAMES[0]: "/slots/own"})
    away = replace(lease.parts[NAMES[1]], node="there")
    local = PartCopies(side).localize(replace(lease, parts={**lease.parts, NAMES[1]: away}))
    assert {part: (info.node, info.path) for part, info in local.parts.items()} == {
        NAMES[0]: ("here", "/slots/own"),
        NAMES[1]: ("here", f"/slots/{NAMES[1]}"),
    }
    assert (agent.asked, faults) == ([NAMES[1]], ["it was damaged"])


def test_slots_are_mapped_where_they_are_and_what_is_staged_later_is_seen(tmp_path: Path) -> None:
    nbytes = {part: layout.nbytes for part, layout in LAYOUTS.items()}
    with SlotArena.create("maps", 1, nbytes, fallback=tmp_path) as arena:
        lease = lease_of(None, {part: str(arena.path(0, part)) for part in NAMES})
        maps = SlotMaps(layouts())
        mapped = maps.map(lease)
        assert [part.layout.part for part in mapped] == list(NAMES)
        assert {tuple(part.buckets or ()) for part in mapped} == {(b"digest of a bucket",)}
        for part in NAMES:
            arena.map(0, part)[:] = segment(part)
        assert [bytes(part.data) for part in mapped] == [segment(part) for part in NAMES]
        assert maps.map(lease)[0].data is mapped[0].data
    with pytest.raises(SegmentError, match="no longer exists"):
        maps.map(lease)


def test_shard_files_are_mapped_and_others_refused(tmp_path: Path) -> None:
    for part, layout in LAYOUTS.items():
        path = tmp_path / shard_file(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard_file(path, layout, segment(part), {}, fsync=False)
    lease = lease_of(tmp_path, {})
    mapped = FileMaps().map(lease)
    assert [bytes(part.data) for part in mapped] == [segment(part) for part in NAMES]
    assert [part.layout for part in mapped] == list(LAYOUTS.values())
    other = {part: replace(info, layout="0" * 32) for part, info in lease.parts.items()}
    with pytest.raises(RunError, match=r"has layout \w+, the version was staged with 0000"):
        FileMaps().map(replace(lease, parts=other))
    with pytest.raises(RunError, match="version 3 has no folder"):
        FileMaps().map(replace(lease, location=None))
    with pytest.raises(RunError, match="is missing"):
        FileMaps().map(replace(lease, location=str(tmp_path / "gone")))
