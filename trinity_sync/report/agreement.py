"""Compares the digests of the jobs of a sweep that should be equal, version by version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trinity_sync.report.run_data import Run
from trinity_sync.tracking import units

# Settings that numbers do not depend on: transport, retention, folders, display.
_NO_MATTER = ("name", "live", "hydra", "tracker", "cluster", "retention")
_MATTERS_OF = {
    "sync": ("interval", "max_staleness", "what", "encoding", "wire_dtype", "keep_fp32"),
    "checkpoint": ("resume_from",),
}


class DigestDifference(NamedTuple):
    """The first version that differs between two jobs, and both digests."""

    version: int
    job: str
    digest: str
    other_job: str
    other_digest: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Comparison of the digests of jobs.

    Attributes:
        jobs: the number of jobs that were compared.
        sets: the number of sets of jobs that should be equal.
        versions: the number of versions with digests of at least two jobs of a set.
        differs: the first difference.
    """

    jobs: int
    sets: int
    versions: int
    differs: DigestDifference | None

    @property
    def agree(self) -> bool | None:
        """Whether all are equal; None if there was nothing to compare."""
        return self.differs is None if self.versions else None

    @property
    def text(self) -> str:
        if self.differs is not None:
            one = self.differs
            return (
                f"digests differ: version {one.version} is {one.digest} in job {one.job}, {one.other_digest} in job "
                f"{one.other_job}"
            )
        if not self.versions:
            return (
                "digests not compared: no two reproducible jobs of one seed, and of the same settings up to sync, "
                "retention and checkpoint, have a version in common"
            )
        of = f" in {self.sets} sets" if self.sets > 1 else ""
        return f"digests agree: {units.plural(self.jobs, 'job')}{of}, {units.plural(self.versions, 'version')}"


def agreement(runs: Sequence[Run]) -> Agreement:
    """Compare the digests of the jobs that should be equal, at each step that both published or committed.

    These jobs are reproducible and have the same settings, seed, packages, threads and hardware. Settings of transport,
    retention and saving may differ (of `sync` all but interval, staleness, encoding and dtypes, which change samples).
    """
    sets: dict[str, list[Run]] = {}
    for run in runs:
        if run.config and run.record.get("reproducible", True) and run.summary["digests"]:
            sets.setdefault(_computes(run), []).append(run)
    compared, counted, versions = 0, 0, 0
    first: DigestDifference | None = None
    for alike in sets.values():
        held: dict[int, list[tuple[Run, str]]] = {}
        for run in alike:
            for step, digest in run.summary["digests"].items():
                held.setdefault(int(step), []).append((run, digest))
        shared = {step: pairs for step, pairs in held.items() if len(pairs) > 1}
        versions += len(shared)
        counted += bool(shared)
        compared += len({run.path for pairs in shared.values() for run, _ in pairs})
        found = [found for step, pairs in shared.items() if (found := _first(step, pairs)) is not None]
        first = min([*found, *([first] if first else [])], default=None)
    return Agreement(jobs=compared, sets=counted, versions=versions, differs=first)


def _first(step: int, pairs: Sequence[tuple[Run, str]]) -> DigestDifference | None:
    (run, digest), *others = pairs
    return next(
        (
            DigestDifference(step, run.path.name, digest, other.path.name, found)
            for other, found in others
            if found != digest
        ),
        None,
    )


def _computes(run: Run) -> str:
    """Return the settings that decide the numbers of a run, as text."""
    settings = {name: value for name, value in run.config.items() if name not in {*_NO_MATTER, *_MATTERS_OF}}
    parts = [run.setting(name, key) for name, keys in _MATTERS_OF.items() for key in keys]
    place = [run.record.get(name) for name in ("seed", "packages", "threads", "hardware")]
    return json.dumps([settings, parts, place], sort_keys=True, default=str)
