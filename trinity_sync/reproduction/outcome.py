"""The outcome of a run, without durations: the digest of each version and the metrics of each step; and its bundle."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import xxhash

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.tracking import json_lines
from trinity_sync.tracking.events import stream_events
from trinity_sync.tracking.json_lines import plain, write_json
from trinity_sync.tracking.run_record import RunJson, check_shape
from trinity_sync.tracking.summary import version_digests

Number = int | float | None
"""A metric in JSON; None: not finite."""

_MEASURED = ("timing/", "perf/", "mfu", "samples/waited_s", "samples/ready", "samples/journaled")
"""Prefixes of metrics that depend on the machine."""
_OF_THE_LINE = ("attempt", "step", "time")


class ValueDifference(NamedTuple):
    """One value that differs: a ``digest`` or a metric of a step. None: missing, or not finite."""

    step: int
    what: str
    old: object
    new: object


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The numbers that a run computed."""

    # Digest of the weights by published or committed step, 0 for the initial ones.
    digests: Mapping[int, str] = field(default_factory=dict)
    # Numbers by step and name, without measured times.
    metrics: Mapping[int, Mapping[str, Number]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.digests or self.metrics)

    @property
    def steps(self) -> int:
        """The last known step; 0 without one."""
        return max((*self.digests, *self.metrics), default=0)

    def up_to(self, step: int) -> Outcome:
        """Leave out later steps."""
        return Outcome(
            digests={at: digest for at, digest in self.digests.items() if at <= step},
            metrics={at: values for at, values in self.metrics.items() if at <= step},
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two outcomes. `versions`, `values`: the number of digests and metrics that both have. `unequal`:
    the differences by step; the metrics of a step come before its digest. `absent`: steps that only the old outcome
    has. A version does not count if the new outcome has a later one: a stopped run saves one more.
    """

    versions: int
    values: int
    unequal: tuple[ValueDifference, ...]
    absent: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether there was something to compare, nothing is absent and nothing differs."""
        return self.versions + self.values > 0 and not self.unequal and not self.absent

    @property
    def first_version(self) -> ValueDifference | None:
        return next((one for one in self.unequal if one.what == DIGEST), None)

    @property
    def first_metrics(self) -> list[ValueDifference]:
        """The metrics that differ at the first such step."""
        metrics = [one for one in self.unequal if one.what != DIGEST]
        return [one for one in metrics if one.step == metrics[0].step]


DIGEST = "digest"


def compare(old: Outcome, new: Outcome) -> Comparison:
    """Compare a run with its repetition, bit for bit. Steps that only the repetition has do not count."""
    versions, values = 0, 0
    newest = max(new.digests or new.metrics, default=-1)  # SFT published versions before, for no explorer
    unequal: list[ValueDifference] = []
    absent: list[int] = []
    for step in sorted({*old.digests, *old.metrics}):
        before, after = old.metrics.get(step), new.metrics.get(step)
        if before is not None and after is not None:
            for name in sorted({*before, *after}):
                values += 1
                if before.get(name) != after.get(name) or (name in before) != (name in after):
                    unequal.append(ValueDifference(step, name, before.get(name), after.get(name)))
        if step in old.digests and step in new.digests:
            versions += 1
            if old.digests[step] != new.digests[step]:
                unequal.append(ValueDifference(step, DIGEST, old.digests[step], new.digests[step]))
        if (before is not None and after is None) or (step in old.digests and step > newest):
            absent.append(step)
    return Comparison(versions=versions, values=values, unequal=tuple(unequal), absent=tuple(absent))


def read_outcome(folder: Path, record: RunJson) -> Outcome:
    """Read the outcome of a run's folder, and its last version from its record."""
    try:
        metrics = json_lines.PackedRecords(json_lines.stream(folder / "metrics.jsonl"))
        events = json_lines.PackedRecords(stream_events(folder / "events.jsonl"))
    except RunError as error:
        raise ConfigError(str(error)) from error
    digests = {int(step): digest for step, digest in version_digests(events).items()}
    last = record.get("last_version")
    if last is not None:  # for missing logs, or logs that were cut since
        digests.setdefault(last["step"], last["digest"])
    lines = ((json_lines.metrics_step(line), line) for line in metrics)
    return Outcome(digests=digests, metrics={step: computed(line) for step, line in lines if step is not None})


def computed(line: Mapping[str, object]) -> dict[str, Number]:
    """Return the metrics of a line that the configuration alone decides."""
    return {
        name: value
        for name, value in line.items()
        if name not in _OF_THE_LINE and not name.startswith(_MEASURED) and isinstance(value, int | float | None)
    }


# Environments: differences that may change sums.


NONE = "none"


class EnvironmentDifference(NamedTuple):
    """One difference between two environments."""

    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.what}: {self.old} -> {self.new}"


def differences(old: RunJson, new: RunJson) -> list[EnvironmentDifference]:
    """Compare packages, repository, threads and hardware of two records; missing values are not compared."""
    return [
        *_mappings(old.get("packages"), new.get("packages")),
        *_git(old, new),
        *_values("threads", old.get("threads"), new.get("threads")),
        *_mappings(old.get("hardware"), new.get("hardware")),
    ]


def _git(old: RunJson, new: RunJson) -> Iterator[EnvironmentDifference]:
    before, after = old.get("git"), new.get("git")
    if before is None and after is None:
        return
    texts = [NONE if git is None else git["commit"][:12] + " with changes" * git["dirty"] for git in (before, after)]
    if texts[0] != texts[1] or texts[0].endswith("changes"):  # the changes may differ
        yield EnvironmentDifference("git", *texts)


def _mappings(old: object, new: object) -> Iterator[EnvironmentDifference]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield EnvironmentDifference(name, str(old.get(name, NONE)), str(new.get(name, NONE)))


def _values(what: str, old: object, new: object) -> Iterator[EnvironmentDifference]:
    if old is not None and new is not None and old != new:
        yield EnvironmentDifference(what, str(old), str(new))


# Prediction of further runs, for runs that are not bit-identical.


LAST_STEPS = 10
"""The number of steps that make the end of a run."""
MOST = 11
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom."""
_JUDGED = ("reward/mean", "loss")
"""The first of these metrics that a run has judges it."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The range of 95 % of further runs by the spread of a few: Student's prediction interval of normal values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Compute the interval from 2 to `MOST` values."""
        number = len(values)
        half = _T[number - 2] * statistics.stdev(values) * math.sqrt(1 + 1 / number)
        middle = statistics.fmean(values)
        return cls(low=middle - half, high=middle + half)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def judged(outcome: Outcome) -> str | None:
    """Return the metric that judges a run; None without one."""
    names = {name for values in outcome.metrics.values() for name in values}
    return next((name for name in _JUDGED if name in names), None)


def end_of(outcome: Outcome, name: str) -> float | None:
    """Return the mean of a metric over the last steps; None if it was never finite there."""
    last = sorted(outcome.metrics)[-LAST_STEPS:]
    values = [value for step in last if (value := outcome.metrics[step].get(name)) is not None]
    return statistics.fmean(values) if values else None


# The bundle of a run: one JSON file with its settings, its outcome, its environment and pip constraints, and a digest.
# Folders, addresses, options of mirrors and trackers (they may hold secrets) and the command line stay out.


FORMAT = 1
_KEYS = {"bundle", "run", "config_name", "overrides", "config", "digests", "metrics", "constraints", "self"}
_OF_RUN = ("seed", "git", "packages", "threads", "hardware", "config_digest", "reproducible", "status")
_NOT_A_DISTRIBUTION = ("python", "trinity-sync")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A run for another machine."""

    record: RunJson  # the environment, from its run.json
    config_name: str  # the primary config
    overrides: tuple[str, ...]  # of the command line, as text
    config: Mapping[str, object]  # all settings, resolved
    outcome: Outcome  # digests and metrics

    def write(self, path: Path) -> None:
        """Write the file; raises RunError if the disk refuses."""
        packages = self.record.get("packages") or {}
        content = {
            "bundle": FORMAT,
            "run": {key: value for key, value in self.record.items() if key in _OF_RUN},
            "config_name": self.config_name,
            "overrides": list(self.overrides),
            "config": self.config,
            "digests": {str(step): digest for step, digest in self.outcome.digests.items()},
            "metrics": {str(step): values for step, values in self.outcome.metrics.items()},
            "constraints": [
                f"{name}=={version}" for name, version in packages.items() if name not in _NOT_A_DISTRIBUTION
            ],
        }
        text = {name: plain(value) for name, value in content.items()}
        write_json(path, {**text, "self": _digest(text)})


def read_bundle(path: Path) -> Bundle:
    """Read a file of `Bundle.write`."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a bundle of a run: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("bundle"), int):
        raise ConfigError(f"{path} is not a bundle of a run; write one with `trinity-sync reproduce --bundle RUN_DIR`")
    if content["bundle"] > FORMAT:
        raise ConfigError(
            f"{path} has format {content['bundle']}, written by a newer version; this one reads up to {FORMAT}"
        )
    expected = content.pop("self", None)
    if content.keys() != _KEYS - {"self"} or expected != _digest(content):
        raise ConfigError(f"{path} was changed after it was written: its digest differs; get a new copy")
    try:
        check_shape(_mapping(content["run"]), path)
        return Bundle(
            record=cast(RunJson, _mapping(content["run"])),
            config_name=str(content["config_name"]),
            overrides=tuple(map(str, content["overrides"])),
            config=_mapping(content["config"]),
            outcome=Outcome(
                digests={_step(step): str(digest) for step, digest in _mapping(content["digests"]).items()},
                metrics={_step(step): _numbers(values) for step, values in _mapping(content["metrics"]).items()},
            ),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a bundle of a run: {error}") from error


def _digest(content: Mapping[str, object]) -> str:
    """xxh3_128 hex of canonical JSON: UTF-8, sorted keys, no blanks."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.60} is not a mapping")
    return value


def _step(text: str) -> int:
    step = int(text)
    if not 0 <= step < 2**53:
        raise ValueError(f"{text:.60} is not a step")
    return step


def _numbers(value: object) -> dict[str, Number]:
    values: dict[str, Number] = {}
    for name, number in _mapping(value).items():
        if not isinstance(number, int | float | None):
            raise TypeError(f"{name} is {number!r:.60}, not a number")
        values[name] = number
    return values
