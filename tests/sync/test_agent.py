"""The node agent: what it makes of staged parts, hands out, and gives back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.sync.helpers import LIMIT, PretendTrainer, empty, make_loader, node_id, random_weights
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call, DeathError
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.base import LayoutCache
from trinity_sync.sync.memory import MemoryTransport
from trinity_sync.sync.node_agent import NodeAgent
from trinity_sync.sync.pieces import WantedPart
from trinity_sync.weights.digests import bucket_digests
from trinity_sync.weights.shard_file import open_shard_file

MakeAgent = Callable[..., AgentClient]


# ---- a version put together


def test_a_sealed_version_says_of_each_part_what_a_reader_needs(trainer: PretendTrainer) -> None:
    weights = random_weights(1)
    sealed = trainer.seal(weights)
    assert sealed.digest == reference_digest(weights, "BF16")
    assert list(sealed.parts) == list(trainer.layouts)
    for part, layout in trainer.layouts.items():
        path = trainer.paths[sealed.slot, part]
        expected = PartInfo(
            part=part, node=node_id(), path=path, nbytes=layout.nbytes, layout=layout.digest, buckets=None
        )
        assert replace(sealed.parts[part], digest_s=0.0) == expected
    assert sealed.digest_s == max(info.digest_s for info in sealed.parts.values()) > 0
    trainer.synchronizer.discard(sealed.version).result(LIMIT)


def test_the_digest_follows_the_weights(trainer: PretendTrainer) -> None:
    digests = [trainer.publish(random_weights(seed)).digest for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(("verify", "has_buckets"), [("bucket", True), ("off", False)])
@pytest.mark.few(1)
def test_what_is_not_asked_for_is_not_computed(
    synchronizer: Synchronizer, make_agent: MakeAgent, verify: str, has_buckets: bool
) -> None:
    trainer = PretendTrainer(synchronizer.client, {node_id(): make_agent(synchronizer.client, verify=verify)})
    sealed = trainer.publish(random_weights(1))
    assert sealed.digest is None
    for part, info in sealed.parts.items():
        digests = bucket_digests(trainer.segment(sealed.slot, part), trainer.layouts[part])
        assert len(digests) > 1
        assert info.buckets == (digests if has_buckets else None)


def test_a_part_reported_twice_does_not_stand_for_another_one(trainer: PretendTrainer) -> None:
    weights = random_weights(3)
    version, slot = trainer.open()
    for _ in range(2):
        trainer.stage_part(version, slot, "rank-00000", weights)
    with pytest.raises(RunError, match="did not seal"):
        trainer.synchronizer.wait_sealed(version, 0.1).result(LIMIT)
    trainer.stage_part(version, slot, "rank-00001", weights)
    assert trainer.synchronizer.wait_sealed(version, LIMIT).result(LIMIT).digest == reference_digest(weights, "BF16")
    trainer.synchronizer.discard(version).result(LIMIT)


def test_what_goes_wrong_in_the_agent_is_told_to_who_waits_for_the_version(trainer: PretendTrainer) -> None:
    version, _ = trainer.open()
    for part in trainer.layouts:
        trainer.agents[node_id()].part_staged(version, 99, part).result(LIMIT)
    with pytest.raises(RunError, match=rf"^version {version} could not be staged: .*99"):
        trainer.synchronizer.wait_sealed(version, LIMIT).result(LIMIT)
    assert trainer.publish(random_weights(4)).digest == reference_digest(random_weights(4), "BF16")


def test_a_part_that_cannot_be_staged_fails_its_version_and_no_other(trainer: PretendTrainer) -> None:
    version, _ = trainer.open()
    trainer.agents[node_id()].part_failed(version, "rank-00001", "StageError: weight (no source)")
    with pytest.raises(RunError, match=rf"^version {version} could not be staged: rank-00001: StageError"):
        trainer.synchronizer.wait_sealed(version, LIMIT).result(LIMIT)
    assert trainer.publish(random_weights(4)).digest == reference_digest(random_weights(4), "BF16")


def test_the_trainer_stood_still_as_long_as_its_slowest_rank(trainer: PretendTrainer) -> None:
    version, slot = trainer.open()
    for blocked, part in enumerate(trainer.layouts, 1):
        trainer.agents[node_id()].part_staged(version, slot, part, 0.25 * blocked).result(LIMIT)
    sealed = trainer.synchronizer.wait_sealed(version, LIMIT).result(LIMIT)
    assert sealed.blocked_s == 0.25 * len(trainer.layouts)
    trainer.synchronizer.discard(version).result(LIMIT)


@pytest.fixture(scope="module")
def two_nodes(synchronizer: Synchronizer, make_agent: MakeAgent) -> PretendTrainer:
    """Three ranks: two on this node, whose agent leads, and one on a node that is not there."""
    settings = {"nodes": 2, "transport": "tcp", "secret": b"s" * 32}
    lead = make_agent(synchronizer.client, **settings)
    other = make_agent(synchronizer.client, lead=lead, node="far-away", **settings)
    return PretendTrainer(synchronizer.client, {node_id(): lead, "far-away": other}, ranks=3)


@pytest.mark.all
def test_agents_of_two_nodes_put_one_digest_together(two_nodes: PretendTrainer) -> None:
    for seed in (1, 2):
        weights = random_weights(seed)
        sealed = two_nodes.publish(weights)
        assert {info.node for info in sealed.parts.values()} == {node_id(), "far-away"}
        assert sealed.digest == reference_digest(weights, "BF16")


def test_the_agent_of_an_explorers_node_brings_the_parts_of_other_nodes_once(two_nodes: PretendTrainer) -> None:
    for seed in (5, 6, 7):
        weights = random_weights(seed)
        sealed = two_nodes.publish(weights)
        [info] = [info for info in sealed.parts.values() if info.node == "far-away"]
        for name in ("explorer-0", "explorer-1"):
            report = make_loader(two_nodes, empty(weights), name=name).load(None)
            assert (report.digest, report.fault) == (reference_digest(weights, "BF16"), None)
            assert report.bytes_moved == sum(layout.nbytes for layout in two_nodes.layouts.values())
        wanted = WantedPart(sealed.version, sealed.slot, info.part, info.nbytes, two_nodes.agents["far-away"])
        brought = [two_nodes.agents[node_id()].bring(wanted).result(LIMIT) for _ in range(2)]
        assert brought[0] == brought[1]
        assert brought[0].path != info.path
        assert Path(brought[0].path).read_bytes() == bytes(two_nodes.segment(sealed.slot, info.part))


def test_an_explorer_that_meets_damage_in_the_slot_of_its_own_node_loads_what_was_published(
    two_nodes: PretendTrainer,
) -> None:
    weights = random_weights(8)
    sealed = two_nodes.publish(weights)
    [info] = [info for info in sealed.parts.values() if info.node == "far-away"]
    wanted = WantedPart(sealed.version, sealed.slot, info.part, info.nbytes, two_nodes.agents["far-away"])
    with Path(two_nodes.agents[node_id()].bring(wanted).result(LIMIT).path).open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    report = make_loader(two_nodes, empty(weights)).load(None)
    assert report.digest == reference_digest(weights, "BF16")
    assert "was read once more" in str(report.fault)


def test_an_agent_makes_slots_for_parts_of_other_nodes_and_not_for_its_own_twice() -> None:
    agent: Any = NodeAgent.__new__(NodeAgent)
    agent._config, agent._layouts = SimpleNamespace(brings={"a": 1, "b": 2, "c": 3}), {"b": None}
    agent._brought, agent._waits = Mock(), ThreadPoolExecutor(1)
    asyncio.run(agent.reserve())
    assert [call.args for call in agent._brought.reserve.call_args_list] == [("a", 1), ("c", 3)]


def test_parts_come_as_rays_objects_where_the_owner_takes_no_connections_and_the_report_says_why(
    synchronizer: Synchronizer, make_agent: MakeAgent
) -> None:
    here = make_agent(synchronizer.client, secret=b"s" * 32)
    other = make_agent(synchronizer.client, secret=b"x" * 32, node="far-away")
    trainer, weights = PretendTrainer(synchronizer.client, {"far-away": other}), random_weights(9)
    trainer.publish(weights)
    agents = {node_id(): here, **trainer.agents}
    layouts = LayoutCache(agents, LIMIT)
    transport = MemoryTransport(agents, layouts, LIMIT, node_id(), lambda error: loader.note_fault(error))
    loader = make_loader(trainer, empty(weights), transport=transport)
    report = loader.load(None)
    assert report.digest == reference_digest(weights, "BF16")
    assert report.fault is not None
    assert "accepts no connection" in report.fault
    assert loader.load(None).fault is None


# ---- files


def test_a_slot_is_written_as_files_that_are_the_segments(trainer: PretendTrainer, folder: Path) -> None:
    sealed = trainer.seal(random_weights(6))
    agent = trainer.agents[node_id()]
    written = agent.write(sealed.slot, str(folder), {"step": "6"}, fsync=False).result(LIMIT)
    assert [path for path, _, _ in written] == [f"actor/weights_{part}.safetensors" for part in trainer.layouts]
    for path, nbytes, _ in written:
        layout, data = open_shard_file(folder / path)
        assert layout == trainer.layouts[layout.part]
        assert data == bytes(trainer.segment(sealed.slot, layout.part))
        assert (folder / path).stat().st_size == nbytes
    trainer.synchronizer.discard(sealed.version).result(LIMIT)


# ---- layouts


def test_a_layout_is_asked_for_once(trainer: PretendTrainer) -> None:
    asked = []

    class Agents(dict[str, AgentClient]):
        def __getitem__(self, node: str) -> AgentClient:
            asked.append(node)
            return super().__getitem__(node)

    cache = LayoutCache(Agents(trainer.agents), LIMIT)
    for seed in (7, 8):
        parts = trainer.publish(random_weights(seed)).parts
        assert {part: cache.get(info) for part, info in parts.items()} == trainer.layouts
    assert asked == [node_id()] * 2


def test_a_layout_that_is_not_the_published_one_is_refused(trainer: PretendTrainer) -> None:
    first, second = trainer.publish(random_weights(8)).parts.values()
    mixed = PartInfo(**{**vars(first), "part": second.part})
    with pytest.raises(RunError, match=rf"describes {second.part} by layout {second.layout}.*staged in {first.layout}"):
        LayoutCache(trainer.agents, LIMIT).get(mixed)


# ---- its life


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def register(agent: AgentClient, trainer: PretendTrainer) -> tuple[set[Path], Sequence[str]]:
    """Have an agent make slots as `trainer`'s: their files, and its notes."""
    slots = agent.register(trainer.layouts).result(LIMIT)
    return {Path(path) for parts in slots.paths.values() for path in parts.values()}, slots.notes


def test_it_gives_the_shared_memory_back_when_it_is_closed(
    trainer: PretendTrainer, synchronizer: Synchronizer, make_agent: MakeAgent, tmp_path: Path
) -> None:
    agent = make_agent(synchronizer.client, root=str(tmp_path))
    files, notes = register(agent, trainer)
    assert files <= set(files_in(tmp_path))
    assert notes == []
    for _ in range(2):
        agent.close().result(LIMIT)
        assert list(tmp_path.iterdir()) == []


def test_a_killed_agent_is_named_at_once_and_what_it_left_is_removed_by_the_next_one(
    trainer: PretendTrainer, make_synchronizer: Callable[..., Synchronizer], make_agent: MakeAgent, tmp_path: Path
) -> None:
    synchronizer = make_synchronizer()
    agent = make_agent(synchronizer.client, root=str(tmp_path))
    abandoned, _ = register(agent, trainer)
    version, parts = Version(0, 0), list(trainer.layouts)
    synchronizer.client.begin(version, parts, LIMIT).result(LIMIT)
    waiting = synchronizer.actor.wait_sealed.remote(version, LIMIT * 10)
    os.kill(agent.memory().result(LIMIT)["pid"], signal.SIGKILL)
    with pytest.raises(DeathError, match=rf"^the agent of node {node_id()} died before it could seal version 0$"):
        Call(waiting, "the synchronizer", "seal version 0").result(LIMIT)
    with pytest.raises(DeathError, match="died before it could take version 1"):
        synchronizer.client.begin(Version(0, 1), parts, LIMIT).result(LIMIT)

    assert abandoned <= set(files_in(tmp_path))
    files, _ = register(make_agent(trainer.synchronizer, root=str(tmp_path)), trainer)
    assert files <= set(files_in(tmp_path))
    assert abandoned.isdisjoint(files_in(tmp_path))


def test_a_node_without_shared_memory_is_told_and_files_are_used(
    trainer: PretendTrainer, synchronizer: Synchronizer, make_agent: MakeAgent, tmp_path: Path
) -> None:
    root, fallback = tmp_path / "no-such-place", tmp_path / "fallback"
    files, notes = register(make_agent(synchronizer.client, root=str(root), fallback=str(fallback)), trainer)
    assert "no-such-place cannot hold the 2 slots" in notes[0]
    assert files <= set(files_in(fallback))


def test_it_loads_no_torch() -> None:
    program = (
        "import sys, trinity_sync.sync.node_agent; print(sorted({'torch', 'transformers', 'verl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
