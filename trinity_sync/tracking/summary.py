"""summary.json: the figures of a run, from its metrics and events; and the short text a user sees when the run is over.

The recorder calls both at the end. `summarise` is a pure function, so a report can use it on a run
that never got there.
"""

from __future__ import annotations

import itertools
import os
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from trinity_sync.tracking import units
from trinity_sync.tracking.files import write_json

REWARD_STEPS = 10
_SAMPLES = ("samples/dropped", "samples/waited_s", "staleness/mean", "staleness/max")
_WHOLE = ("folder", "report", "next")

Record = Mapping[str, Any]


def summarise(
    metrics: Sequence[Record],
    events: Sequence[Record],
    status: str,
    wall_s: float | None,
    peak_memory: Mapping[str, int] | None = None,
    checkpoints: Path | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        metrics: lines of metrics.jsonl, oldest first.
        events: lines of events.jsonl, oldest first.
        status: how the run stands.
        wall_s: seconds of all its attempts.
        peak_memory: bytes by role.
        checkpoints: the checkpoint folder, see `kept_checkpoints`.

    Returns:
        ``status``, ``steps`` (the last completed one), ``wall_s``, ``reward_first`` and ``reward_last`` (means of
        ``reward/mean`` over up to ten steps), ``digests`` (step as text: digest), ``sync``, ``checkpoint``,
        ``samples``, ``peak_memory``, ``faults`` (how many). In ``sync`` and ``checkpoint`` each time is ``{"median",
        "p95"}`` in seconds and each size a mean in bytes, per version and per checkpoint. What nothing was measured
        for is None.
        ``samples`` has ``dropped`` (how many were over-stale), ``waited_s`` (of all explorers together) and staleness.
    """
    rewards = _measured(line.get("reward/mean") for line in metrics)
    return {
        "status": status,
        "steps": max((line["step"] for line in metrics), default=0),
        "wall_s": wall_s,
        "reward_first": _mean(rewards[:REWARD_STEPS]),
        "reward_last": _mean(rewards[-REWARD_STEPS:]),
        "digests": version_digests(events),
        "sync": _sync(events),
        "checkpoint": checkpoint_figures(events, checkpoints),
        "samples": _samples(metrics),
        "peak_memory": dict(sorted((peak_memory or {}).items())),
        "faults": sum(event.get("event") == "fault" for event in events),
    }


def version_digests(events: Iterable[Record]) -> dict[str, str]:
    """Digest by step: what the trainer published, or, for a version that was only checkpointed, what was committed."""
    published: dict[int, str] = {}
    committed: dict[int, str] = {}
    for event in events:
        if event.get("digest"):
            if event["event"] == "publish":
                published[event["version"]] = event["digest"]
            elif event["event"] == "commit":
                committed[event["step"]] = event["digest"]
    return {str(step): digest for step, digest in sorted({**committed, **published}.items())}


def mismatches(events: Iterable[Record]) -> list[Record]:
    """The publishes, loads and commits whose digest is not the one that `version_digests` has for their step."""
    events = list(events)
    digests = version_digests(events)
    return [
        event
        for event in events
        if event.get("digest") and event["digest"] != digests.get(str(event.get("version", event.get("step"))))
    ]


def spread(values: Iterable[Any]) -> dict[str, float | None]:
    """``{"median", "p95"}`` of what was measured, interpolated as numpy's default does; None each if nothing was."""
    ordered = sorted(_measured(values))
    return {"median": _quantile(ordered, 0.5), "p95": _quantile(ordered, 0.95)}


def kept_checkpoints(events: Iterable[Record], checkpoints: Path | None = None) -> list[Record]:
    """The commit events whose checkpoint was not pruned later, by step; a step committed again counts once.

    Args:
        checkpoints: the checkpoint folder. What is not there is not kept, whoever deleted it. None, or one that cannot
            be read now: go by the events alone.
    """
    kept: dict[int, Record] = {}
    for event in events:
        if event.get("event") == "commit":
            kept[event["step"]] = event
        elif event.get("event") == "prune":
            kept.pop(event["step"], None)
    there = _names(checkpoints) if checkpoints is not None else None
    return [kept[step] for step in sorted(kept) if there is None or f"global_step_{step}" in there]


def _names(folder: Path) -> set[str] | None:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def wall_seconds(record: Record, metrics: Iterable[Record], events: Iterable[Record]) -> float | None:
    """Seconds of all attempts of a run.

    Args:
        record: the content of run.json.
        metrics, events: the run's lines. An attempt that was killed is taken to have lasted until its last line.

    Returns:
        None if no attempt has a beginning and an end.
    """
    written: dict[Any, float] = {}
    for line in itertools.chain(metrics, events):
        at = units.finite(line.get("time"))
        if at is not None:
            written[line.get("attempt")] = max(at, written.get(line.get("attempt"), at))
    total = None
    for item in record.get("attempts") or [record]:
        begin, end = units.finite(item.get("started")), units.finite(item.get("ended"))
        end = written.get(item.get("attempt")) if end is None else end
        if begin is not None and end is not None:
            total = (total or 0.0) + max(0.0, end - begin)
    return total


def write_summary(path: Path, summary: Record) -> None:
    """Replaces summary.json.

    Raises:
        RunError: the disk refuses.
    """
    write_json(path, summary)


class _Closing:
    """The closing text as rich prints it: as wide as the output, ASCII where it knows no more."""

    def __init__(self, summary: Record, run_dir: Path, total_steps: int | None, error: str | None) -> None:
        self._summary, self._run_dir, self._total, self._error = summary, run_dir, total_steps, error

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary, status = self._summary, self._summary["status"]
        style = {"completed": "bold green", "failed": "bold red"}.get(status, "bold yellow")
        steps = str(summary["steps"]) if self._total is None else f"{summary['steps']} of {self._total}"
        yield Text.assemble((status, style), f": {steps} steps in {units.seconds(summary['wall_s'])}")
        if self._error:
            yield Text(self._error, style="red")
        rows = closing_lines(summary, self._run_dir, "->" if options.ascii_only else "→")
        for label, text in lay_out(rows, options.max_width):
            yield Text.assemble((label, "bold"), text, no_wrap=True, overflow="ignore")


def render_summary(
    summary: Record, run_dir: str | os.PathLike[str], *, total_steps: int | None = None, error: str | None = None
) -> RenderableType:
    """What a user sees when a run ends: how it went, what is kept, where it is, and the one next command.

    Args:
        summary: the content of summary.json.
        run_dir: the folder; shown relative to the working directory when it is below it.
        total_steps: how many steps the run was to have.
        error: why it failed.

    Returns:
        To be printed by ``console.print(..., crop=False)``, so that long paths and commands stay whole.
    """
    return _Closing(summary, Path(run_dir), total_steps, error)


def lay_out(rows: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Labels, padded, and texts in two columns; texts are wrapped, but paths and commands stay whole to be copied."""
    indent = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, text in rows:
        text = "".join(char if char.isprintable() else " " for char in text)
        pieces = [text] if label in _WHOLE else textwrap.wrap(text, max(width - indent, 20)) or [""]
        lines += [(label.ljust(indent) if index == 0 else " " * indent, piece) for index, piece in enumerate(pieces)]
    return lines


def closing_lines(summary: Record, run_dir: Path, arrow: str = "->") -> list[tuple[str, str]]:
    """Label and text of each line below the status."""
    sync, checkpoint = summary["sync"], summary["checkpoint"]
    lines = []
    if summary["reward_last"] is not None:
        first, last = units.number(summary["reward_first"]), units.number(summary["reward_last"])
        lines.append(("reward", f"{first} {arrow} {last} (means of the first and last {REWARD_STEPS} steps)"))
    lines.append(("versions", _versions_text(sync)))
    if summary["samples"]["dropped"] is not None:
        lines.append(("samples", _samples_text(summary["samples"])))
    if sync["mismatched"]:
        lines.append(("digests", f"{sync['mismatched']} not as published: see the report"))
    lines.append(("checkpoints", _checkpoints_text(checkpoint)))
    if summary["faults"]:
        lines.append(("faults", f"{units.plural(summary['faults'], 'fault')} reported: see events.jsonl"))
    shown = shorten(run_dir)
    lines.append(("folder", shown))
    if (run_dir / "report.html").exists():
        lines.append(("report", f"{shown}/report.html"))
    lines.append(("next", next_command(summary, shown)))
    return lines


def next_command(summary: Record, run_dir: str) -> str:
    """The one command that most users want now."""
    folder = shlex.quote(run_dir)
    if summary["checkpoint"]["latest"] is None:
        return f"trinity-sync report {folder}"
    if summary["status"] == "completed":
        return f"trinity-sync ckpt list {folder}"
    return f"trinity-sync resume {folder}"


def shorten(path: Path) -> str:
    """A path relative to the working directory when it is below it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) and path != Path.cwd() else str(path)


def _sync(events: Sequence[Record]) -> dict[str, Any]:
    publishes = [event for event in events if event.get("event") == "publish"]
    loads = [event for event in events if event.get("event") == "load"]
    return {
        "mode": publishes[-1].get("mode") if publishes else None,
        "encoding": publishes[-1].get("encoding") if publishes else None,
        "versions": len({event["version"] for event in publishes}),
        "latest": max((event["version"] for event in publishes), default=None),
        "loads": len(loads),
        "explorers": sorted({str(event.get("explorer")) for event in loads}),
        "mismatched": len(mismatches(events)),
        "skipped": sum(event.get("event") == "skip" for event in events),
        "publish": {name: spread(event.get(name) for event in publishes) for name in ("blocked_s", "total_s")},
        "load": {name: spread(event.get(name) for event in loads) for name in ("total_s", "paused_s")},
        "bytes_full": _mean(_measured(event.get("bytes_full") for event in publishes)),
        "bytes_moved": _mean(_measured(event.get("bytes_moved") for event in publishes)),
    }


def checkpoint_figures(events: Sequence[Record], checkpoints: Path | None) -> dict[str, Any]:
    """``checkpoint`` in summary.json; arguments as of `kept_checkpoints`."""
    commits = [event for event in events if event.get("event") == "commit"]
    kept = kept_checkpoints(events, checkpoints)
    return {
        "commits": len(commits),
        "pruned": sum(event.get("event") == "prune" for event in events),
        "kept": [event["step"] for event in kept],
        "latest": max((event["step"] for event in kept if event.get("kind") == "full"), default=None),
        "blocked_s": spread(event.get("blocked_s") for event in commits),
        "total_s": spread(event.get("total_s") for event in commits),
        "bytes": _mean(_measured(event.get("bytes") for event in commits)),
    }


def _samples(metrics: Sequence[Record]) -> dict[str, Any]:
    columns = {name: _measured(line.get(name) for line in metrics) for name in _SAMPLES}
    dropped, waited, mean, most = columns.values()
    return {
        "dropped": int(sum(dropped)) if dropped else None,
        "waited_s": sum(waited) if waited else None,
        "staleness_mean": _mean(mean),
        "staleness_max": max(most, default=None),
    }


def _samples_text(samples: Record) -> str:
    return (
        f"{samples['dropped']} dropped as over-stale, explorers waited {units.seconds(samples['waited_s'])}; "
        f"staleness {units.number(samples['staleness_mean'])} on average, {samples['staleness_max']:.0f} at most"
    )


def _versions_text(sync: Record) -> str:
    if not sync["versions"]:
        return "none published"
    text = f"{sync['versions']} published ({sync['mode']}), {units.plural(sync['loads'], 'load')}"
    text += f" by {units.plural(len(sync['explorers']), 'explorer')}" if sync["explorers"] else ""
    blocked, total = sync["publish"]["blocked_s"]["median"], sync["load"]["total_s"]["median"]
    times = [f"trainer blocked {units.seconds(blocked)}"] if blocked is not None else []
    times += [f"load {units.seconds(total)}"] if total is not None else []
    return f"{text}; median {', '.join(times)}" if times else text


def _checkpoints_text(checkpoint: Record) -> str:
    if not checkpoint["commits"]:
        return "none saved"
    pruned = f", {checkpoint['pruned']} pruned" if checkpoint["pruned"] else ""
    if not checkpoint["kept"]:
        return f"none kept ({checkpoint['commits']} saved{pruned})"
    steps = ", ".join(str(step) for step in checkpoint["kept"][-5:])
    more = len(checkpoint["kept"]) - 5
    word = "step" if len(checkpoint["kept"]) == 1 else "steps"
    return f"{word} {steps}{f' and {more} earlier' if more > 0 else ''} kept ({checkpoint['commits']} saved{pruned})"


def _measured(values: Iterable[Any]) -> list[float]:
    return [number for number in map(units.finite, values) if number is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
