"""Trainer and explorers on different Ray nodes: a second raylet on this machine, as Ray's own tests have it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.e2e.runs import launch
from tests.explorer.helpers import ARCHITECTURE
from tests.sync.helpers import LIMIT, PretendTrainer, node_id, random_weights, remote_agent
from tests.vllm.stand_in_server import stand_in_server
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.models.architecture import make_model
from trinity_sync.sync import Synchronizer, SynchronizerConfig

NIXL = find_spec("nixl") is not None
SHAPES = {"embed.weight": (4096, 1024), "layers.0.mlp.weight": (24, 10)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of two processors; this process is on the first."""
    small = {"num_cpus": 2, "object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="nodes")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def there(nodes: Cluster) -> str:
    """Id of the node that is not this process's."""
    [other] = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {node_id()}
    return other


class Explorer:
    """An explorer's half, without an engine."""

    def __init__(self, agents: dict[str, AgentClient], synchronizer: SynchronizerClient, name: str) -> None:
        from tests.sync.helpers import empty, make_loader
        from trinity_sync.sync.base import TrainerSide

        side = TrainerSide(synchronizer=synchronizer, agents=agents, ranks=[], timeout_s=LIMIT)
        self._loader = make_loader(side, empty(random_weights(0, SHAPES)), name=name)

    def load(self) -> tuple[str | None, int, str]:
        """Digest, bytes, node."""
        report = self._loader.load(None)
        assert report.fault is None
        return report.digest, report.bytes_moved, node_id()


@pytest.mark.parametrize(
    "transport", ["tcp", "ray", pytest.param("nixl", marks=pytest.mark.skipif(not NIXL, reason="needs NIXL"))]
)
def test_explorers_of_another_node_hold_what_was_published_and_their_node_fetches_it_once(
    there: str, tmp_path: Path, transport: str
) -> None:
    synchronizer = Synchronizer.get_actor(SynchronizerConfig(slots=2, timeout_s=LIMIT), namespace="nodes")
    places = {"run_key": "nodes", "root": str(tmp_path), "fallback": str(tmp_path / "fallback")}
    places |= {"transport": transport, "secret": b"s" * 32}
    agents = {node_id(): remote_agent(synchronizer.client, None, None, places)}
    brings = {**agents, there: remote_agent(synchronizer.client, None, None, places, on=there)}
    trainer = PretendTrainer(synchronizer.client, agents, weights=random_weights(0, SHAPES), bucket_bytes=1 << 20)
    on_other = NodeAffinitySchedulingStrategy(there, soft=False)
    explorers = [
        ray.remote(Explorer)
        .options(num_cpus=0, scheduling_strategy=on_other)
        .remote(brings, synchronizer.client, f"e-{i}")
        for i in range(3)
    ]
    try:
        for seed in (1, 2, 3):
            weights = random_weights(seed, SHAPES)
            sealed = trainer.publish(weights)
            loads = ray.get([explorer.load.remote() for explorer in explorers], timeout=LIMIT)
            assert {digest for digest, _, _ in loads} == {sealed.digest} == {reference_digest(weights, "BF16")}
            assert {node for _, _, node in loads} == {there}
            nbytes = sum(layout.nbytes for layout in trainer.layouts.values())
            assert {moved for _, moved, _ in loads} == {nbytes}
        # One copy on each node; Ray frees that of the version before a moment later.
        deadline = time.monotonic() + LIMIT
        while max(copies := [_object_store_bytes(node) for node in ray.nodes()]) > 1.5 * nbytes:
            assert time.monotonic() < deadline, f"{copies} bytes of objects on the nodes for versions of {nbytes}"
            time.sleep(0.1)
    finally:
        for actor in [*explorers, *(agent.handle for agent in brings.values()), synchronizer.actor]:
            ray.kill(actor)


def _object_store_bytes(node: dict[str, Any]) -> int:
    from ray._private.internal_api import node_stats

    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(stats.store_stats.object_store_bytes_used)


@pytest.mark.all
@pytest.mark.parametrize("encoding", ["full", "auto"])
@pytest.mark.parametrize("mode", ["memory", "checkpoint", "nccl"])
def test_a_run_whose_trainer_and_explorer_are_on_different_nodes(
    nodes: Cluster, tmp_path: Path, mode: str, encoding: str
) -> None:
    # Two ranks need all of a node, so wherever the explorer starts, they are on the other one.
    chosen = [f"sync={mode}", f"sync.encoding={encoding}", "trainer.lr=1e-6"]
    run = launch(tmp_path / "run", "cluster=existing", f"cluster.address={nodes.address}", *chosen)
    assert run.code == 0, run.output
    sent = {event["version"]: event["encoding"] for event in run.events("publish")}
    assert sent == {0: "full"} | dict.fromkeys((1, 2, 3), "full" if encoding == "full" else "delta")
    loads = run.events("load")
    assert [load["version"] for load in loads] == [0, 1, 2, 3]
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)


@pytest.mark.all
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["the driver's node", "another"])
def test_an_explorer_runs_on_the_node_of_its_server(nodes: Cluster, tmp_path: Path, host: str) -> None:
    far = nodes.add_node(num_cpus=2, object_store_memory=200 << 20, node_ip_address="127.0.0.2")
    try:
        model = make_model(ARCHITECTURE, 7, tmp_path / "policy")
        with stand_in_server(model, host=host) as server:
            chosen = ["explorer=vllm_server", f"explorer.url={server.url}", f"model.path={model}"]
            run = launch(tmp_path / "run", "cluster=existing", f"cluster.address={nodes.address}", *chosen)
        assert run.code == 0, run.output
        [up] = re.findall(r"explorer-0 is up: pid \d+ on node (\w+)", (run.folder / "logs/driver.log").read_text())
        assert (up == far.node_id) == (host == "127.0.0.2")
        assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    finally:
        nodes.remove_node(far)
