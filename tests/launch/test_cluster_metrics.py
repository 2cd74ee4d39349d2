"""The figures of a run among the metrics of a cluster that runs already, as its Prometheus reads them."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.e2e.runs import launch
from trinity_sync.config import compose, typed
from trinity_sync.launch.cluster import ClusterMetrics
from trinity_sync.launch.launcher import run_trackers
from trinity_sync.tracking.trackers import TrackedRun

LIMIT_S = 120.0
EXISTING = ["cluster=existing", "cluster.address=10.0.0.1:6379"]

Gauges = dict[tuple[str, str, str], float]
"""By name without prefix, run and explorer."""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [([], False), (["cluster.metrics=true"], False), (EXISTING, True), ([*EXISTING, "cluster.metrics=false"], False)],
)
def test_only_a_cluster_that_runs_already_is_told_unless_it_is_not_to_be(overrides: list[str], told: bool) -> None:
    assert any(isinstance(tracker, ClusterMetrics) for tracker in run_trackers(typed(compose(overrides)))) is told


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(port: int) -> Iterator[Cluster]:
    node = {"num_cpus": 3, "object_store_memory": 200 << 20, "include_dashboard": False, "metrics_export_port": port}
    often = {"_system_config": {"metrics_report_interval_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **often})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def scrape(port: int) -> Gauges:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return {}
    found: Gauges = {}
    for name, tags, value in re.findall(r"^ray_trinity_sync_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        tag = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        assert tag["folder"].startswith("/")
        found[name, tag["run"], tag.get("explorer", "")] = float(value)
    return found


def wait_for(port: int, enough: Callable[[Gauges], bool]) -> Gauges:
    deadline = time.monotonic() + LIMIT_S
    while not enough(found := scrape(port)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


@pytest.mark.all
def test_gauges_show_the_last_step_and_event_and_wait_for_ray(cluster: Cluster, port: int, tmp_path: Path) -> None:
    metrics = ClusterMetrics()
    metrics.start(TrackedRun(folder=tmp_path, name="gauges"))
    metrics.event({"event": "fault", "where": "here", "error": "it failed"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="gauges")
    try:
        metrics.log(1, {"reward/mean": 0.25})
        metrics.log(2, {"reward/mean": 0.5, "timing/step": 3.0})
        metrics.event({"event": "publish", "version": 2, "total_s": 0.2, "blocked_s": None, "bytes_moved": 1000})
        metrics.event({"event": "load", "version": 2, "explorer": "explorer-0", "total_s": 0.3})
        metrics.event({"event": "load", "version": 1, "explorer": "explorer-1", "total_s": 0.4})
        found = wait_for(port, lambda found: len(found) >= 11)
        time.sleep(3.0)  # longer than Ray remembers a gauge here
        assert scrape(port) == found
    finally:
        metrics.close()
        ray.shutdown()
    assert found == {
        ("step", "gauges", ""): 2,
        ("reward", "gauges", ""): 0.5,
        ("step_seconds", "gauges", ""): 3,
        ("version", "gauges", ""): 2,
        ("publish_seconds", "gauges", ""): 0.2,
        ("publish_bytes", "gauges", ""): 1000,
        ("explorer_version", "gauges", "explorer-0"): 2,
        ("load_seconds", "gauges", "explorer-0"): 0.3,
        ("explorer_version", "gauges", "explorer-1"): 1,
        ("load_seconds", "gauges", "explorer-1"): 0.4,
        ("faults", "gauges", ""): 1,
    }


@pytest.mark.all
def test_a_run_on_a_cluster_is_seen_while_it_goes_on(cluster: Cluster, port: int, tmp_path: Path) -> None:
    seen: list[Gauges] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            seen.append({key: value for key, value in scrape(port).items() if key[1] == "watched"})

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        own = ["cluster=existing", f"cluster.address={cluster.address}", "name=watched", "trainer.steps=30"]
        run = launch(tmp_path / "run", *own)
    finally:
        over.set()
        watcher.join()
    assert run.code == 0, run.output
    last = next(found for found in reversed(seen) if found)
    assert last["step", "watched", ""] > 1
    assert last["explorer_version", "watched", "explorer-0"] > 0
    assert last["checkpoint", "watched", ""] > 0
    assert last["publish_bytes", "watched", ""] > 0
    assert last["faults", "watched", ""] == 0
    assert len({found.get(("step", "watched", "")) for found in seen}) > 2
