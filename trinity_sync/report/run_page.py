"""The page of one run, and one line for each run and sweep below a folder (`trinity-sync list`)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trinity_sync.errors import in_one_line
from trinity_sync.host.masking import masked_override
from trinity_sync.host.references import model_name, select_values, setting_of, task_name
from trinity_sync.report import charts, run_charts, timeline
from trinity_sync.report.run_data import TARGET_REWARD, Run, is_run, job_order, status_now, steps_to
from trinity_sync.tracking import json_lines, units
from trinity_sync.tracking.events import (
    CommitEvent,
    Event,
    FaultEvent,
    HealEvent,
    LoadEvent,
    PruneEvent,
    PublishEvent,
    parse_event,
    stream_events,
)
from trinity_sync.tracking.json_lines import Record
from trinity_sync.tracking.run_record import RunJson, read_record
from trinity_sync.tracking.summary import (
    LOSS,
    REWARD_STEPS,
    Spread,
    SyncFigures,
    headline,
    kept_checkpoints,
    mismatches,
    spread,
    summarise,
    wall_seconds,
)

_MOST_ROWS = 400
"""Of a table, the newest."""


def render(run: Run, now: float) -> str:
    """Render the page as HTML; `now` in Unix seconds, for the time of its making."""
    publishes, commits = run.of(PublishEvent), run.of(CommitEvent)
    loads: dict[int, list[LoadEvent]] = {event.version: [] for event in publishes[-_MOST_ROWS:]}
    for load in run.of(LoadEvent):
        if load.version in loads:
            loads[load.version].append(load)
    steps = {event.step for event in commits[-_MOST_ROWS:]}
    attempts = run.record.get("attempts") or []
    started = run.start
    first, *others = run_charts.training(run)
    about = [text for text in (run.task, run.model) if text and text not in run.name]
    heading = ", ".join([run.name, *about])

    def since_start(event: Event) -> float | None:
        return None if started is None or event.time is None else event.time - started

    return charts.render(
        "run.html",
        title=f"{heading}: {run.status}",
        heading=heading,
        run=run,
        path=run.path,
        now=now,
        facts=facts(run),
        tiles=_training_tiles(run),
        more_tiles=_tiles(run),
        training=[first, *(item for item in others if "<svg" in item[2])],
        constant=[chart for _, _, chart in others if "<svg" not in chart],
        charts=run_charts,
        timeline=timeline.timeline(run),
        wrong=mismatches(run.events),
        kept={event.step for event in kept_checkpoints(run.events, run.checkpoints)},
        commits=commits,
        publishes=publishes,
        most_rows=_MOST_ROWS,
        synced=bool(publishes or run.of(LoadEvent)),
        pruned={event.step: event for event in run.of(PruneEvent) if event.step in steps},
        faults=run.of(FaultEvent),
        heals=run.of(HealEvent),
        loads=loads,
        since_start=since_start,
        attempts=attempts,
        environment=_environment(run),
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """Return name and value of the run's main settings, where known."""
    attempts = run.record.get("attempts") or [run.record]
    last = attempts[-1]
    rate, scheduler = units.finite(run.setting("trainer", "lr")), run.setting("trainer", "lr_scheduler")
    if rate is None:
        rate = max((value for _, value in run.series("lr") if value is not None), default=None)
    rank, sync = run.setting("model", "lora", "rank"), run.summary["sync"]
    explores = headline(run.summary)[0] == "reward"
    backend = run.setting("backend", "strategy") or _chosen(run, "backend")
    ranks = run.setting("backend", "ranks")
    kind, replicas = run.setting("explorer", "kind"), run.setting("explorer", "replicas")
    items = [
        ("model", f"{run.model}, LoRA of rank {rank}" if run.model and rank else run.model),
        ("task", run.task),
        ("algorithm", run.setting("algorithm", "kind")),
        (
            "rate",
            None if rate is None else f"{rate:g}{f', {scheduler}' if scheduler not in (None, 'constant') else ''}",
        ),
        ("backend", f"{backend} on {units.plural(ranks, 'rank')}" if backend and isinstance(ranks, int) else backend),
        ("sync", (run.setting("sync", "mode") or _chosen(run, "sync") or sync["mode"]) if explores else None),
        ("encoding", sync["encoding"]),
        ("explorers", f"{replicas} of {kind}" if explores and None not in (kind, replicas) else None),
        ("seed", run.record.get("seed")),
        ("wall", units.seconds(run.summary["wall_s"]) if run.summary["wall_s"] is not None else None),
        ("started", units.moment(run.start) if run.start is not None else None),
    ]
    if len(attempts) > 1:
        items.append(("resumed", f"{units.moment(last.get('started'))} from step {last.get('resumed_from') or 0}"))
    return [(name, str(value)) for name, value in items if value is not None]


def _chosen(run: Run, group: str) -> str | None:
    """Return the command line's option of a config group."""
    chosen = [text.split("=", 1)[1] for text in run.overrides if text.lstrip("+").startswith(f"{group}=")]
    return chosen[-1] if chosen else None


Tile = tuple[str, str, str | None]
"""Label, value, and a line of detail."""


def _training_tiles(run: Run) -> list[Tile]:
    """Return the key figures of training."""
    summary = run.summary
    took, reached = spread(json_lines.column(run.metrics, "timing/step"))["median"], steps_to(run)
    done = str(summary["steps"]) if run.total_steps is None else f"{summary['steps']} of {run.total_steps}"
    each = f"{units.seconds(took)} each, median" if took is not None else None
    name, begin, end = headline(summary)
    course = f"mean of {units.plural(summary['mean_steps'], 'step')}, from {units.number(begin)}"
    course += f", {TARGET_REWARD} at step {reached}" if reached is not None else ""
    items: list[Tile] = [
        ("Steps", done, each),
        (name.capitalize(), units.number(end, "none"), None if end is None else course),
    ]
    if (validated := summary["validation"]) is not None:
        first, best = units.number(validated["first"]), units.number(validated["best"])
        course = f"from {first}; best {best} at step {validated['best_step']}"
        name = "Validation loss" if validated["metric"] == LOSS else "Validation"
        items.append((name, units.number(validated["last"]), course))
    if failed := summary["failed_rewards"]:
        items.append(("Failed rewards", str(failed), "responses that could not be judged"))
    return items


def _tiles(run: Run) -> list[Tile]:
    """Return the key figures of sync, checkpoints and memory."""
    summary, sync, saved = run.summary, run.summary["sync"], run.summary["checkpoint"]
    whole = None if sync["bytes_full"] is None else f"of {units.size(sync['bytes_full'])}{_saving(sync)}"
    loads = f"{sync['loads']} loads by {units.plural(len(sync['explorers']), 'explorer')}"
    items: list[Tile] = [
        ("Versions", str(sync["versions"]), loads),
        ("Blocked by publish", *_spread(sync["publish"]["blocked_s"])),
        ("Load", *_spread(sync["load"]["total_s"])),
        ("Moved per version", units.size(sync["bytes_moved"], "none"), whole),
    ]
    if not sync["versions"] and not sync["loads"]:
        items = []
    if (mismatch := summary["mismatch"])["k3_kl"] is not None:
        mean, most = (units.number(mismatch[name]) for name in ("log_prob_abs_diff", "log_prob_abs_diff_max"))
        detail = f"nats a token (k3); log-probs differ by {mean}, {most} at most"
        items.append(("Mismatch", units.number(mismatch["k3_kl"]), detail))
    if (shapes := summary["shapes"]) is not None:
        items.append(("Share of the model", f"{100 * shapes['share']:.3g} %", f"{shapes['gb_s'] or 0:.3g} GB/s"))
    compared = f"{sync['mismatched']} wrong" if sync["mismatched"] else "all match"
    return [
        *items,
        ("Checkpoints kept", str(len(saved["kept"])), f"{saved['commits']} saved, {saved['pruned']} pruned"),
        ("Blocked by save", *_spread(saved["blocked_s"])),
        ("Digests", compared, "trainer, explorers, checkpoints")
        if summary["digests"]
        else ("Digests", "not checked", None),
        *((f"Peak, {role}", units.size(peak), None) for role, peak in summary["peak_memory"].items()),
    ]


def _environment(run: Run) -> list[tuple[str, str]]:
    """Return name and value of the run's environment; nothing without a record."""
    record, git = run.record, run.record.get("git")
    if not record:
        return []
    return [
        ("command", str(record.get("command") or "unknown")),
        ("git", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "no repository"),
        ("host", str(record.get("host") or "unknown")),
        ("threads", json.dumps(record.get("threads"))),
        ("config digest", str(record.get("config_digest") or "unknown")),
        *((name, str(version)) for name, version in (record.get("packages") or {}).items()),
    ]


def _spread(figures: Spread) -> tuple[str, str | None]:
    if figures["median"] is None:
        return "none", None
    return units.seconds(figures["median"]), f"median; p95 {units.seconds(figures['p95'])}"


def _saving(sync: SyncFigures) -> str:
    moved, full = sync["bytes_moved"], sync["bytes_full"]
    if not moved or full is None or moved * 1.05 > full:
        return ""
    return f", {full / moved:.1f} times less"


# Lists of runs and sweeps.


_LAST_LINES = 4 * REWARD_STEPS
"""Lines that are read of metrics.jsonl: those of twice the steps of a mean, each also with a late validation."""

UNREADABLE = "unreadable"
"""Status of a run or folder that cannot be read."""

_Loader: type[yaml.CSafeLoader] | type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEYS = ("name", "trainer.steps", "backend.strategy", "backend.ranks", "sync.mode")


@dataclass(kw_only=True)
class RunLine:
    """A run in a list; None: not known.

    Attributes:
        status: as in a report, or `UNREADABLE`.
        task, model: see `task_name`, `model_name`.
        steps, total_steps: completed, and planned.
        reward, loss: as in summary.json, at the end.
        wall_s: seconds of all attempts.
        started: the beginning of its newest attempt, in Unix seconds.
        problems: one sentence for each file that could not be read.
    """

    path: Path
    name: str | None = None
    task: str | None = None
    model: str | None = None
    status: str = "not started"
    steps: int = 0
    total_steps: int | None = None
    reward: float | None = None
    loss: float | None = None
    backend: str | None = None
    ranks: int | None = None
    sync: str | None = None
    wall_s: float | None = None
    started: float | None = None
    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.status == "running"

    @property
    def figure(self) -> str:
        """The reward, or the loss of a run without rewards; empty without both."""
        name, value = ("loss", self.loss) if self.reward is None else ("reward", self.reward)
        return f"{name} {units.number(value)}" if value is not None else ""


@dataclass(kw_only=True)
class SweepLine:
    """A sweep in a list: its folder, and its jobs by number."""

    path: Path
    jobs: list[RunLine]

    @property
    def started(self) -> float | None:
        """The beginning of the newest attempt of a job."""
        return max((job.started for job in self.jobs if job.started is not None), default=None)

    @property
    def running(self) -> bool:
        return any(job.running for job in self.jobs)

    @property
    def states(self) -> dict[str, int]:
        """The number of jobs by status."""
        return dict(Counter(job.status for job in self.jobs))

    def distinct(self, job: RunLine) -> list[str]:
        """List the overrides of a job that not all jobs share."""
        shared = set.intersection(*(set(one.overrides) for one in self.jobs)) if len(self.jobs) > 1 else set()
        return [text for text in job.overrides if text not in shared]


def find(roots: Sequence[Path]) -> list[RunLine | SweepLine]:
    """Find all runs and sweeps in and below folders, the newest last; links and hidden folders are skipped."""
    found = [line for root in roots for line in _below(root)]
    return sorted(found, key=lambda line: (line.started or _modified(line.path), str(line.path)))


def _below(folder: Path) -> Iterator[RunLine | SweepLine]:
    try:
        if is_run(folder):
            yield run_line(folder)
            return
        inner = [
            Path(entry.path)
            for entry in os.scandir(folder)
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]
        swept = (folder / "multirun.yaml").is_file()
    except OSError as error:
        yield RunLine(path=folder, status=UNREADABLE, problems=[f"{folder} cannot be read: {error.strerror or error}"])
        return
    lines = [line for place in sorted(inner, key=job_order) for line in _below(place)]
    if swept:
        jobs = [job for line in lines for job in (line.jobs if isinstance(line, SweepLine) else [line])]
        yield SweepLine(path=folder, jobs=jobs)
    else:
        yield from lines


def run_line(folder: Path) -> RunLine:
    """Read the folder of one run; takes milliseconds."""
    line = RunLine(path=folder)
    for read in (_read_settings, _read_overrides, _read_record):
        try:
            read(folder, line)
        except Exception as error:  # the other runs are listed nevertheless
            line.problems.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    return line


def _read_record(folder: Path, line: RunLine) -> None:
    if not (folder / "run.json").exists():
        return
    line.status = UNREADABLE
    record = read_record(folder / "run.json")
    line.status, line.started = status_now(folder, record), record.get("started")
    metrics, events = _last_lines(folder, record)
    line.wall_s = wall_seconds(record, metrics, events)
    summary = summarise(metrics, (), line.status, line.wall_s)
    line.steps, line.reward, line.loss = summary["steps"], summary["reward_last"], summary["loss_last"]


def _last_lines(folder: Path, record: RunJson) -> tuple[Sequence[Record], Sequence[Event]]:
    """Return the last metrics and events; all of them if an earlier attempt was killed, to know its duration."""
    earlier = (record.get("attempts") or [])[:-1]
    if any(attempt.get("ended") is None for attempt in earlier):
        events = json_lines.PackedRecords(stream_events(folder / "events.jsonl"))
        return json_lines.PackedRecords(json_lines.stream(folder / "metrics.jsonl")), events
    metrics, lines = (json_lines.read_last(folder / name, _LAST_LINES) for name in ("metrics.jsonl", "events.jsonl"))
    return metrics, [parse_event(line) for line in lines]


def _read_settings(folder: Path, line: RunLine) -> None:
    path = folder / ".hydra" / "config.yaml"
    if not path.exists():
        return
    config = _load(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a mapping")
    line.task, line.model = task_name(config), model_name(config)
    values = [setting_of(config, key) for key in _KEYS]
    if any(isinstance(value, str) and "${" in value for value in values):
        values = select_values(config, _KEYS)
    name, steps, backend, ranks, sync = values
    line.name, line.backend, line.sync = (None if text is None else str(text) for text in (name, backend, sync))
    line.total_steps, line.ranks = (number if isinstance(number, int) else None for number in (steps, ranks))


def _read_overrides(folder: Path, line: RunLine) -> None:
    path = folder / ".hydra" / "overrides.yaml"
    if path.exists():
        overrides = _load(path) or []
        if not isinstance(overrides, list):
            raise ValueError(f"{path} is not a list")
        line.overrides = [masked_override(str(text)) for text in overrides]


def _load(path: Path) -> object:
    try:
        return yaml.load(path.read_bytes(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read: {in_one_line(error)}") from error


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
