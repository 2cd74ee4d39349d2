"""The figures of summary.json, computed from the metrics and events of a run.

The recorder writes them at the end; reports compute them for runs that never ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TypedDict

from trinity_sync.tracking import json_lines, units
from trinity_sync.tracking.events import (
    CommitEvent,
    Event,
    FaultEvent,
    LoadEvent,
    PruneEvent,
    PublishEvent,
    RowsEvent,
    SkipEvent,
    event_line,
    event_step,
    events_of,
    read_events,
)
from trinity_sync.tracking.json_lines import Record, write_json
from trinity_sync.tracking.run_record import AttemptJson, RunFolder, RunFolderInUse, RunJson, read_record

REWARD_STEPS = 10
SKIPPED = "updates/skipped"
"""The metric of a step's updates that were skipped, because their gradient was not finite."""
_FAILED = ("reward/failed", "val/failed")
_SAMPLES = ("samples/dropped", "samples/waited_s", "samples/mixed", "staleness/mean", "staleness/max")


class Spread(TypedDict):
    """Median and 95th percentile; None without a measurement."""

    median: float | None
    p95: float | None


class PublishTimes(TypedDict):
    """Seconds per version, measured by the trainer."""

    blocked_s: Spread
    total_s: Spread


class LoadTimes(TypedDict):
    """Seconds per load, measured by the explorers."""

    total_s: Spread
    paused_s: Spread


class SyncFigures(TypedDict):
    """Published and loaded versions; bytes are means per version."""

    mode: str | None
    encoding: str | None
    versions: int
    latest: int | None
    loads: int
    explorers: list[str]
    mismatched: int
    skipped: int
    publish: PublishTimes
    load: LoadTimes
    bytes_full: float | None
    bytes_moved: float | None


class CheckpointFigures(TypedDict):
    """Committed and kept checkpoints; bytes are the mean per checkpoint."""

    commits: int
    pruned: int
    kept: list[int]
    latest: int | None
    blocked_s: Spread
    total_s: Spread
    bytes: float | None


class SampleFigures(TypedDict):
    """Samples that were too stale, seconds that all explorers waited, samples of several versions, staleness."""

    dropped: int | None
    waited_s: float | None
    mixed: int | None
    staleness_mean: float | None
    staleness_max: float | None


class RowFigures(TypedDict):
    """The rows of the task's file; `longest` in tokens, `policy` is `task.too_long`."""

    rows: int
    too_long: int
    longest: int
    policy: str


class ShapesFigures(TypedDict):
    """The cost of a version where only bytes are moved (`workload=bytes`). `share`: of the bytes of the whole model.
    `gb_s`: bytes of a version divided by the median times of its publish and its load, GB/s. `copies`: the same time in
    copies of these bytes by one thread, at the speed measured for each version; median.
    """

    share: float
    gb_s: float | None
    copies: float | None


class Summary(TypedDict):
    """The content of summary.json; None: not measured.

    Attributes:
        steps: the last completed one.
        wall_s: seconds of all attempts.
        reward_first, reward_last: means of ``reward/mean``.
        loss_first, loss_last: means of ``loss``.
        mean_steps: the steps of each of these means, see `mean_steps`.
        digests: step as text -> digest.
        skipped_updates: optimizer steps with a gradient that is not finite.
        failed_rewards: responses that the task could not judge.
        peak_memory: bytes by role.
    """

    status: str
    steps: int
    wall_s: float | None
    reward_first: float | None
    reward_last: float | None
    loss_first: float | None
    loss_last: float | None
    mean_steps: int
    digests: dict[str, str]
    sync: SyncFigures
    checkpoint: CheckpointFigures
    samples: SampleFigures
    mismatch: MismatchFigures
    rows: RowFigures | None
    skipped_updates: int
    failed_rewards: int
    peak_memory: dict[str, int]
    faults: int
    shapes: ShapesFigures | None
    validation: ValidationFigures | None
    deltas: DeltaFigures | None


def summarise(
    metrics: Sequence[Record],
    events: Sequence[Event],
    status: str,
    wall_s: float | None,
    peak_memory: Mapping[str, int] | None = None,
    checkpoints: Path | None = None,
) -> Summary:
    """Compute the content of summary.json; metrics and events oldest first, `checkpoints` as in `kept_checkpoints`."""
    rewards, losses = (_recorded(metrics, name) for name in ("reward/mean", "loss"))
    steps = mean_steps(len(rewards or losses))
    return {
        "status": status,
        "steps": max((step for line in metrics if (step := json_lines.metrics_step(line)) is not None), default=0),
        "wall_s": wall_s,
        "reward_first": _mean(rewards[:steps]),
        "reward_last": _mean(rewards[-steps:]),
        "loss_first": _mean(losses[:steps]),
        "loss_last": _mean(losses[-steps:]),
        "mean_steps": steps,
        "digests": version_digests(events),
        "sync": (sync := _sync(events)),
        "checkpoint": checkpoint_figures(events, checkpoints),
        "samples": _samples(metrics),
        "mismatch": mismatch_figures(metrics),
        "rows": _rows(events),
        "skipped_updates": int(sum(_recorded(metrics, SKIPPED))),
        "failed_rewards": int(sum(sum(_recorded(metrics, name)) for name in _FAILED)),
        "peak_memory": dict(sorted((peak_memory or {}).items())),
        "faults": len(events_of(FaultEvent, events)),
        "shapes": _shapes(metrics, events, sync),
        "validation": validation_figures(metrics),
        "deltas": delta_figures(events),
    }


def mean_steps(count: int) -> int:
    """Return the number of steps at each end of `count` steps that a mean is taken over; the ends do not overlap."""
    return max(1, min(REWARD_STEPS, count // 2))


def headline(summary: Summary) -> tuple[str, float | None, float | None]:
    """Return the name of a run's main figure, and its first and last mean: reward, or loss in a run without rewards."""
    if summary["reward_last"] is None and summary["loss_last"] is not None:
        return "loss", summary["loss_first"], summary["loss_last"]
    return "reward", summary["reward_first"], summary["reward_last"]


def version_digests(events: Sequence[Event]) -> dict[str, str]:
    """Return digests by step: those published, and those committed for versions that were not published."""
    published = {event.version: event.digest for event in events_of(PublishEvent, events) if event.digest}
    committed = {event.step: event.digest for event in events_of(CommitEvent, events) if event.digest}
    return {str(step): digest for step, digest in sorted({**committed, **published}.items())}


def mismatches(events: Sequence[Event]) -> list[PublishEvent | LoadEvent | CommitEvent]:
    """List the publishes, loads and commits whose digest differs from the published one.

    A resume may publish a step again with another size (`sync.what`): each size has a digest of its own.
    """
    digests = version_digests(events)
    found = [
        event
        for event in events
        if isinstance(event, PublishEvent | LoadEvent | CommitEvent)
        and event.digest
        and event.digest != digests.get(str(event_step(event)))
    ]
    steps = {event_step(event) for event in found}
    publishes = (event for event in events_of(PublishEvent, events) if event.version in steps)
    sizes = {(event.version, event.bytes_full): event.digest for event in publishes}
    others = {(version, digest) for (version, _), digest in sizes.items()}
    return [event for event in found if (event_step(event), event.digest) not in others]


def spread(values: Iterable[object]) -> Spread:
    """Compute median and 95th percentile, interpolated as numpy's default does."""
    ordered = sorted(_measured(values))
    return {"median": quantile(ordered, 0.5), "p95": quantile(ordered, 0.95)}


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Interpolate the quantile of sorted values as numpy's default does; None without values."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def kept_checkpoints(events: Sequence[Event], checkpoints: Path | None = None) -> list[CommitEvent]:
    """List the commits that were not pruned later, by step; a step committed again counts once."""
    kept = _kept(events, checkpoints)
    return [kept[step] for step in sorted(kept)]


def _kept(events: Iterable[Event], checkpoints: Path | None) -> dict[int, CommitEvent]:
    kept: dict[int, CommitEvent] = {}
    for event in events:
        if isinstance(event, CommitEvent):
            kept[event.step] = event
        elif isinstance(event, PruneEvent):
            kept.pop(event.step, None)
    there = _names(checkpoints) if checkpoints is not None else None
    return {step: event for step, event in kept.items() if there is None or f"global_step_{step}" in there}


def _names(folder: Path) -> set[str] | None:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def wall_seconds(record: RunJson, metrics: Iterable[Record], events: Iterable[Event]) -> float | None:
    """Add up the seconds of all attempts of a run; None if no attempt has a beginning and an end."""
    found = spans(record, metrics, events)
    return sum(end - begin for begin, end in found.values()) if found else None


def spans(record: RunJson, metrics: Iterable[Record], events: Iterable[Event]) -> dict[int | None, tuple[float, float]]:
    """Return begin and end of each attempt in Unix seconds, oldest first, where both are known.

    A killed attempt ends with its last line.
    """
    times = ((units.finite(line.get("time")), line.get("attempt")) for line in metrics)
    written: dict[object, float] = {}
    for at, attempt in chain(times, ((event.time, event.attempt) for event in events)):
        if at is not None and isinstance(attempt, int | None):
            written[attempt] = max(at, written.get(attempt, at))
    found = {}
    attempts: Sequence[AttemptJson] = record.get("attempts") or [record]
    for item in attempts:
        begin, end = units.finite(item.get("started")), units.finite(item.get("ended"))
        end = written.get(item.get("attempt")) if end is None else end
        if begin is not None and end is not None:
            found[item.get("attempt")] = (begin, max(begin, end))
    return found


def training_spans(
    record: RunJson, metrics: Sequence[Record], events: Iterable[Event]
) -> dict[int | None, tuple[float, float]]:
    """Return the spans from the first step of each attempt on; attempts without a step are left out.

    Starts are not comparable: only the first job of a sweep starts Ray.
    """
    first: dict[object, float] = {}
    for line in metrics:
        at = units.finite(line.get("time"))
        if at is not None:
            begun = at - (units.finite(line.get("timing/step")) or 0.0)
            first[line.get("attempt")] = min(begun, first.get(line.get("attempt"), begun))
    found = spans(record, metrics, events)
    return {
        number: (min(max(begin, first[number]), end), end) for number, (begin, end) in found.items() if number in first
    }


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Replace summary.json."""
    write_json(path, summary)


def _rows(events: Sequence[Event]) -> RowFigures | None:
    found = events_of(RowsEvent, events)
    if not found:
        return None
    last = found[-1]
    return {"rows": last.rows, "too_long": last.too_long, "longest": last.longest, "policy": last.policy}


def _sync(events: Sequence[Event]) -> SyncFigures:
    publishes, loads = events_of(PublishEvent, events), events_of(LoadEvent, events)
    versions = {event.version for event in publishes}
    encodings = Counter(event.encoding for event in publishes)
    return {
        "mode": publishes[-1].mode if publishes else None,
        "encoding": max(sorted(encodings), key=encodings.__getitem__, default=None),
        "versions": len(versions),
        "latest": max(versions, default=None),
        "loads": len(loads),
        "explorers": sorted({event.explorer for event in loads}),
        "mismatched": len(mismatches(events)),
        "skipped": len(events_of(SkipEvent, events)),
        "publish": {
            "blocked_s": spread(event.blocked_s for event in publishes),
            "total_s": spread(event.total_s for event in publishes),
        },
        "load": {
            "total_s": spread(event.total_s for event in loads),
            "paused_s": spread(event.paused_s for event in loads),
        },
        "bytes_full": _mean(_measured(event.bytes_full for event in publishes)),
        "bytes_moved": _mean(_measured(event.bytes_moved for event in publishes)),
    }


def checkpoint_figures(events: Sequence[Event], checkpoints: Path | None) -> CheckpointFigures:
    """Compute the checkpoint figures; arguments as in `kept_checkpoints`."""
    commits = events_of(CommitEvent, events)
    kept = _kept(events, checkpoints)
    return {
        "commits": len(commits),
        "pruned": len(events_of(PruneEvent, events)),
        "kept": sorted(kept),
        "latest": max((step for step, event in kept.items() if event.kind == "full"), default=None),
        "blocked_s": spread(event.blocked_s for event in commits),
        "total_s": spread(event.total_s for event in commits),
        "bytes": _mean(_measured(event.bytes for event in commits)),
    }


def _shapes(metrics: Sequence[Record], events: Sequence[Event], sync: SyncFigures) -> ShapesFigures | None:
    shares = _recorded(metrics, "model/share")
    if not shares:
        return None
    nbytes, publish, load = sync["bytes_full"], sync["publish"]["total_s"]["median"], sync["load"]["total_s"]["median"]
    if nbytes is None or publish is None or load is None or publish + load <= 0:
        return {"share": shares[-1], "gb_s": None, "copies": None}
    speed = nbytes / (publish + load) / 1e9
    return {"share": shares[-1], "gb_s": speed, "copies": spread(copies_taken(metrics, events))["median"]}


def copies_taken(metrics: Iterable[Record], events: Iterable[Event]) -> list[float]:
    """List each version's time of publish and median load, in copies of its bytes by one thread (``memcpy_gb_s``)."""
    speeds = {json_lines.metrics_step(line): units.finite(line.get("memcpy_gb_s")) for line in metrics}
    publishes: dict[int, PublishEvent] = {}
    loads: dict[int, list[float | None]] = {}
    for event in events:
        if isinstance(event, PublishEvent):
            publishes[event.version] = event
        elif isinstance(event, LoadEvent):
            loads.setdefault(event.version, []).append(event.total_s)
    found = []
    for step, publish in publishes.items():
        load, speed = spread(loads.get(step, []))["median"], speeds.get(step)
        if publish.bytes_full and publish.total_s is not None and load is not None and speed:
            found.append((publish.total_s + load) * speed * 1e9 / publish.bytes_full)
    return found


def _samples(metrics: Sequence[Record]) -> SampleFigures:
    columns = {name: _recorded(metrics, name) for name in _SAMPLES}
    dropped, waited, mixed, mean, most = columns.values()
    return {
        "dropped": int(sum(dropped)) if dropped else None,
        "waited_s": sum(waited) if waited else None,
        "mixed": int(sum(mixed)) if mixed else None,
        "staleness_mean": _mean(mean),
        "staleness_max": max(most, default=None),
    }


def _measured(values: Iterable[object]) -> list[float]:
    return [number for number in map(units.finite, values) if number is not None]


def _recorded(metrics: Iterable[Record], name: str) -> list[float]:
    return _measured(json_lines.column(metrics, name))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Mismatch of samplers and trainer.


KL, K3_KL = "rollout_corr/kl", "rollout_corr/k3_kl"
ABS_DIFF, ABS_DIFF_MAX = "rollout_corr/log_prob_abs_diff", "rollout_corr/log_prob_abs_diff_max"


class MismatchFigures(TypedDict):
    """Difference of the samplers' log-probs from the trainer's; None: no step measured it. `kl`, `k3_kl`: estimators of
    the divergence of the trainer from the sampler, in nats per token; means of the steps. `log_prob_abs_diff`: absolute
    difference of a token's log-probs; mean of the steps. `log_prob_abs_diff_max`: the largest of all steps.
    """

    kl: float | None
    k3_kl: float | None
    log_prob_abs_diff: float | None
    log_prob_abs_diff_max: float | None


def mismatch_figures(metrics: Sequence[Record]) -> MismatchFigures:
    """Compute the mismatch figures."""
    kl, k3_kl, mean, most = (_recorded(metrics, name) for name in (KL, K3_KL, ABS_DIFF, ABS_DIFF_MAX))
    return {
        "kl": _mean(kl),
        "k3_kl": _mean(k3_kl),
        "log_prob_abs_diff": _mean(mean),
        "log_prob_abs_diff_max": max(most, default=None),
    }


# Validations.


REWARD, EXACT, LOSS = "val/reward/mean", "val/exact", "val/loss"


class ValidationFigures(TypedDict):
    """The first, last and best validation; `metric` is the mean reward, or the loss of a supervised run."""

    metric: str
    first: float
    last: float
    best: float
    best_step: int


def validation_figures(metrics: Sequence[Record]) -> ValidationFigures | None:
    """Compute the validation figures; None without a validation. In a free run their lines come after their step's."""
    for name, sign in ((REWARD, 1.0), (LOSS, -1.0)):
        found = {
            step: value
            for line in metrics
            if (step := json_lines.metrics_step(line)) is not None
            and (value := units.finite(line.get(name))) is not None
        }
        if found:
            values = [found[step] for step in sorted(found)]
            best, step = max((sign * value, step) for step, value in found.items())
            return {"metric": name, "first": values[0], "last": values[-1], "best": sign * best, "best_step": step}
    return None


def was_validated(metrics: Path, step: int) -> bool:
    """Return whether metrics.jsonl has a validation of a step's version."""
    lines = (line for line in json_lines.stream(metrics) if json_lines.metrics_step(line) == step)
    return any(name.startswith("val/") for line in lines for name in line)


def is_late(line: Record) -> bool:
    """Return whether a line is that of a validation alone: of the initial version, or late in a free run."""
    return "timing/step" not in line and any(name.startswith("val/") for name in line)


def put_to_steps(metrics: Iterable[Record]) -> json_lines.PackedRecords[Record]:
    """Move the values of late validations into the lines of their steps; lines oldest first."""
    found: json_lines.PackedRecords[Record] = json_lines.PackedRecords()
    places: dict[int | None, int] = {}
    for line in metrics:
        step = json_lines.metrics_step(line)
        if is_late(line) and step in places:
            found[places[step]] = {**line, **found[places[step]]}
        else:
            places[step] = len(found)
            found.append(line)
    return found


# Versions as deltas.


class DeltaFigures(TypedDict):
    """Medians over versions and over loads by deltas; None: not measured. `bytes`: that such a load moved.
    `pays_below`: bytes a second of the link at which deltas take as long as whole versions. `by_layer`: for each third
    of the versions, such as ``1-20``: mean share of the elements that changed, by layer.
    """

    bytes: float | None
    encode_s: float | None
    apply_s: float | None
    pays_below: float | None
    by_layer: dict[str, dict[str, float]]


def delta_figures(events: Sequence[Event]) -> DeltaFigures | None:
    """Compute the figures of deltas; None without deltas. Loads that began with a full version do not count."""
    publishes = events_of(PublishEvent, events)
    made = {event.version: place for place, event in enumerate(publishes) if event.changed is not None}
    if not made:
        return None
    sizes = {version: publishes[place].bytes_full or 0.0 for version, place in made.items()}
    loads = [
        (event.bytes, event.apply_s)
        for event in events_of(LoadEvent, events)
        if event.apply_s is not None and (event.bytes or 0.0) < sizes.get(event.version, 0.0)
    ]
    full, moved = spread(sizes.values())["median"], spread(moved for moved, _ in loads)["median"]
    encode = spread(publishes[place].encode_s for place in made.values())["median"]
    apply = spread(apply for _, apply in loads)["median"]
    pays = None
    if full is not None and moved is not None and encode is not None and apply:
        pays = (full - moved) / (encode + apply)
    by_layer: dict[str, dict[str, float]] = {}
    known = [made[version] for version in sorted(made) if publishes[made[version]].changed_ppm]
    for begin, end in pairwise(len(known) * third // 3 for third in range(4)):
        if begin < end:
            total = Counter[str]()
            for place in known[begin:end]:
                total.update(publishes[place].changed_ppm or {})
            versions = "-".join(dict.fromkeys(str(publishes[known[at]].version) for at in (begin, end - 1)))
            by_layer[versions] = {layer: round(ppm / (end - begin)) / 1e6 for layer, ppm in total.items()}
    return {
        "bytes": moved,
        "encode_s": encode,
        "apply_s": apply,
        "pays_below": pays,
        "by_layer": by_layer,
    }


# After the end of a run; while it runs, only the driver writes its files.


def note_prunes(run: Path, pruned: Iterable[tuple[int, str, int]], checkpoints: Path) -> bool:
    """Add ``prune`` events to a run that has ended, and update its summary. `pruned`: step, reason and freed bytes of
    each deleted checkpoint. Returns False if the run is still running: nothing is written, as its summary will look at
    the disk. Raises ConfigError, RunError if its files cannot be read or written.
    """
    try:
        with RunFolder.open(run, resume=True) as folder:
            attempt = read_record(folder.run_json)["attempt"]
            with contextlib.closing(json_lines.JsonlWriter(folder.events)) as writer:
                for step, reason, freed in pruned:
                    event = PruneEvent(time=time.time(), attempt=attempt, step=step, reason=reason, freed_bytes=freed)
                    writer.append(event_line(event))
            if folder.summary.exists():
                with contextlib.suppress(ValueError):  # a damaged one says nothing of checkpoints
                    summary = dict(json.loads(folder.summary.read_bytes()))
                    summary["checkpoint"] = checkpoint_figures(read_events(folder.events), checkpoints)
                    write_summary(folder.summary, summary)
    except RunFolderInUse:
        return False
    return True
