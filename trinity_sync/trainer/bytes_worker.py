"""A rank of `workload=bytes`: weights that change, without an engine. Takes the place of `TrinityWorker`."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import cast

import torch

from trinity_sync.actors.rank_client import RankInfo
from trinity_sync.backends.bytes_backend import BytesBackend
from trinity_sync.backends.bytes_option import BytesFields
from trinity_sync.host.logs import story
from trinity_sync.models.shapes import SIZES, check_made_of
from trinity_sync.tracking import units
from trinity_sync.trainer.member import Member, join_group
from trinity_sync.trainer.worker_spec import WorkerSpec

_PROBE_BYTES = 64 << 20


class BytesWorker(Member):
    """A rank that trains nothing."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        join_group("gloo", spec.backend_timeout_s)

    def initialise(self) -> RankInfo:
        """Make the weights. Collective."""
        spec, rank = self._spec, int(os.environ["RANK"])
        folder = Path(spec.model_path)
        fields = cast("BytesFields", spec.engine)
        check_made_of(folder, spec.engine)
        sizes = json.loads((folder / SIZES).read_text())
        self._share = sizes["bytes"] / sizes["bytes_whole"]
        self._probe = _Probe() if rank == 0 else None
        backend = BytesBackend(
            folder,
            spec.wire_dtype,
            keep_fp32=spec.keep_fp32,
            rank=rank,
            ranks=int(os.environ["WORLD_SIZE"]),
            seed=spec.seed,
            changed=fields["changed"],
            master_dtype=fields["master_dtype"],
            optimizer=fields["optimizer"],
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        self._bytes = backend
        return self.hold(spec, backend, rank)

    def train_step(self, step: int, batch: object, advantages: object) -> dict[str, float]:
        """Change the weights; return the metrics."""
        started = time.perf_counter()
        with torch.no_grad():
            changed = self._bytes.update(step)
        self._saver.prepare()
        metrics = {"model/share": self._share, "update/changed": changed}
        if self._probe is not None:
            metrics["memcpy_gb_s"] = self._probe.gb_s()
        story.info("changed %.3g of the values in %s", changed, units.seconds(time.perf_counter() - started))
        return metrics

    def begin_at(self, step: int) -> None:
        """Do nothing: there is no schedule."""


class _Probe:
    """Speed at which one thread copies memory, measured at each step: other programs slow down versions and copies."""

    def __init__(self) -> None:
        self._source = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
        self._target = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)

    def gb_s(self) -> float:
        """Return GB a second, the median of three copies."""
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self._target.copy_(self._source)
            seconds.append(time.perf_counter() - started)
        return _PROBE_BYTES / statistics.median(seconds) / 1e9
