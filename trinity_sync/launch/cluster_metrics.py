"""What a cluster that runs already is told of a run: gauges among Ray's own metrics, which the cluster's Prometheus
reads at each node. To the recorder it is one more tracker; the launcher adds it where there is such a cluster.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trinity_sync.tracking.trackers import TrackedRun
from trinity_sync.tracking.units import finite

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

PREFIX = "trinity_sync_"
"""Of all names; Ray puts ``ray_`` before it."""
OF_RUN = ("run", "folder")
"""Tags of all gauges: the run's name, and its folder, which is its own."""

_GAUGES = {
    "step": "Last step of the trainer.",
    "reward": "Mean reward of the last step.",
    "loss": "Loss of the last step.",
    "step_seconds": "How long the last step took.",
    "staleness": "Mean staleness of the last step's samples, in steps.",
    "version": "Step of the newest version of the weights that was published.",
    "publish_seconds": "How long the newest version took to be published.",
    "publish_blocked_seconds": "How long the trainer was blocked by that.",
    "publish_bytes": "Bytes that were moved for that.",
    "explorer_version": "Step of the version that an explorer holds.",
    "load_seconds": "How long an explorer took to load it.",
    "checkpoint": "Step of the newest checkpoint.",
    "checkpoint_seconds": "How long it took to be saved.",
    "checkpoint_blocked_seconds": "How long the trainer was blocked by that.",
    "checkpoint_bytes": "Bytes that were written for that.",
    "faults": "Faults since this attempt of the run began.",
}
_OF_STEP = {
    "reward": "reward/mean",
    "loss": "loss",
    "step_seconds": "timing/step",
    "staleness": "staleness/mean",
}
_OF_EVENT = {
    "publish": {
        "version": "version",
        "publish_seconds": "total_s",
        "publish_blocked_seconds": "blocked_s",
        "publish_bytes": "bytes_moved",
    },
    "load": {"explorer_version": "version", "load_seconds": "total_s"},
    "commit": {
        "checkpoint": "step",
        "checkpoint_seconds": "total_s",
        "checkpoint_blocked_seconds": "blocked_s",
        "checkpoint_bytes": "bytes",
    },
}


_REFRESH_S = 1.0
"""Ray forgets a gauge that has not been set for two of its reports, each of which covers at least a second."""
_CLOSE_S = 5.0


class ClusterMetrics:
    """Keeps the gauges of a run at the values of its last step and events. A tracker; it starts before Ray does."""

    def __init__(self) -> None:
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, Gauge] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun) -> None:
        """Note whose figures they are, and begin to set the gauges as soon as Ray is there."""
        self._tags = dict(zip(OF_RUN, (run.name, str(run.folder)), strict=True))
        self._keep({"faults": 0})
        self._thread = threading.Thread(target=self._refresh, name="cluster metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        self._keep({"step": step, **{gauge: values.get(name) for gauge, name in _OF_STEP.items()}})

    def event(self, event: Mapping[str, object]) -> None:
        """Take the figures of an event."""
        name = str(event["event"])
        if name == "fault":
            self._keep({"faults": self._values["faults", ""] + 1})
            return
        figures = {gauge: event.get(field) for gauge, field in _OF_EVENT.get(name, {}).items()}
        self._keep(figures, explorer=str(event["explorer"]) if name == "load" else "")

    def close(self) -> None:
        """Let go of the gauges: they go with this process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _keep(self, values: Mapping[str, object], explorer: str = "") -> None:
        with self._lock:
            for gauge, value in values.items():
                if (number := finite(value)) is not None:
                    self._values[gauge, explorer] = number

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            ray = sys.modules.get("ray")
            if ray is None or not ray.is_initialized():
                continue
            with self._lock:
                values = [*self._values.items()]
            for (name, explorer), number in values:
                self._gauge(name).set(number, self._tags | ({"explorer": explorer} if explorer else {}))

    def _gauge(self, name: str) -> Gauge:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            tags = (*OF_RUN, "explorer") if name in _OF_EVENT["load"] else OF_RUN
            self._gauges[name] = Gauge(PREFIX + name, _GAUGES[name], tags)
        return self._gauges[name]
