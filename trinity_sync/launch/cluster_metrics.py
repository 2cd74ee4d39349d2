"""What a cluster that runs already is told of a run: gauges among Ray's own metrics, which the cluster's Prometheus
reads at each node. To the recorder it is one more tracker; the launcher adds it where there is such a cluster.
"""

from __future__ import annotations

import sys
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


class ClusterMetrics:
    """Sets the gauges of a run from its steps and events. A tracker; what comes before Ray is there waits for it."""

    def __init__(self) -> None:
        self._tags: dict[str, str] = {}
        self._faults = 0
        self._waiting: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, Gauge] = {}

    def start(self, run: TrackedRun) -> None:
        """Note whose figures they are."""
        self._tags = dict(zip(OF_RUN, (run.name, str(run.folder)), strict=True))
        self._waiting["faults", ""] = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges of a step."""
        self._set({"step": step, **{gauge: values.get(name) for gauge, name in _OF_STEP.items()}})

    def event(self, event: Mapping[str, object]) -> None:
        """Set the gauges of an event."""
        name = str(event["event"])
        if name == "fault":
            self._faults += 1
            self._set({"faults": self._faults})
        else:
            fields = _OF_EVENT.get(name, {})
            self._set(
                {gauge: event.get(field) for gauge, field in fields.items()},
                explorer=str(event["explorer"]) if name == "load" else "",
            )

    def close(self) -> None:
        """Nothing is pending: the gauges go with this process."""

    def _set(self, values: Mapping[str, object], explorer: str = "") -> None:
        for gauge, value in values.items():
            if (number := finite(value)) is not None:
                self._waiting[gauge, explorer] = number
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for (gauge, of), number in self._waiting.items():
            self._gauge(gauge).set(number, self._tags | ({"explorer": of} if of else {}))
        self._waiting.clear()

    def _gauge(self, name: str) -> Gauge:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            tags = (*OF_RUN, "explorer") if name in _OF_EVENT["load"] else OF_RUN
            self._gauges[name] = Gauge(PREFIX + name, _GAUGES[name], tags)
        return self._gauges[name]
