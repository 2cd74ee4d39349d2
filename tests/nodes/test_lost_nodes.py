"""A run that loses a node of its cluster goes on with what is left, or what comes back: raylets on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cluster_utils

from tests.e2e.runs import Run, Started, launch, start
from tests.models.test_shapes import SMALL

REPLICAS = ("explorer.replicas=2", "backend.ranks=2", "checkpoint.interval=2", "trainer.steps=6")
STORE = 200 << 20


@pytest.fixture
def nodes() -> Iterator[cluster_utils.Cluster]:
    """A node for the driver, which joins the first one, both ranks and one explorer."""
    head = {"num_cpus": 3, "object_store_memory": STORE, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        made.shutdown()


def add_node(nodes: cluster_utils.Cluster) -> Any:
    """A node for one explorer."""
    return nodes.add_node(num_cpus=1, object_store_memory=STORE)


def lose_node(nodes: cluster_utils.Cluster, folder: Path, *settings: str, small: bool = True) -> Started:
    """A run that has lost its second node, with an explorer, and waits for one."""
    lost = add_node(nodes)
    of_cluster = ("cluster=existing", f"cluster.address={nodes.address}")
    started = start(folder, *of_cluster, *REPLICAS, *settings, small=small)
    started.wait_for_event(lambda event: event["event"] == "publish" and event["version"] == 3)
    nodes.remove_node(lost, allow_graceful=False)
    started.wait_for_line("the run goes on from its newest checkpoint")
    started.wait_for_line("for room for 2 explorers (cluster.rejoin_s)")
    return started


def explorers_of(run: Run, attempt: int) -> set[str]:
    return {event["explorer"] for event in run.events("load") if event["attempt"] == attempt}


def of_cluster(run: Run) -> list[str]:
    return [fault["error"] for fault in run.events("fault") if fault["where"] == "the cluster"]


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_a_run_whose_node_does_not_come_back_goes_on_with_fewer_explorers_bit_for_bit(
    nodes: cluster_utils.Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = lose_node(nodes, folder, "cluster.rejoin_s=12").finish()
    assert run.code == 0, run.output
    assert [explorers_of(run, attempt) for attempt in (0, 1)] == [{"explorer-0", "explorer-1"}, {"explorer-0"}]
    told = "it has room for 1 of 2 explorers after 12 s (cluster.rejoin_s): 3 of 4 processors that the run needs"
    (fault,) = of_cluster(run)
    assert fault.startswith(told)
    assert told in " ".join(run.output.split())
    assert "room for 1 of 2 explorers" in (folder / "report.html").read_text()
    undisturbed = launch(tmp_path / "undisturbed", *REPLICAS)
    assert run.digests == undisturbed.digests
    assert run.record["config_digest"] == undisturbed.record["config_digest"]


@pytest.mark.all
@pytest.mark.timeout(1200)
def test_a_run_whose_node_comes_back_in_time_goes_on_with_all_explorers(
    nodes: cluster_utils.Cluster, tmp_path: Path
) -> None:
    shapes = tmp_path / "config.json"
    shapes.write_text(json.dumps(SMALL))
    of_bytes = ("workload=bytes", f"model.shapes={shapes}", "model.layers=2", "trainer.steps=100")
    started = lose_node(
        nodes, tmp_path / "run", *of_bytes, "checkpoint.interval=10", "cluster.rejoin_s=300", small=False
    )
    add_node(nodes)
    run = started.finish()
    assert run.code == 0, run.output
    assert explorers_of(run, 1) == {"explorer-0", "explorer-1"}
    assert of_cluster(run) == []
