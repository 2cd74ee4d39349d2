"""Texts about a run: the summary on the terminal at its end, and the lines of driver.log."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from trinity_sync.host.terminal import printable
from trinity_sync.tracking import events, units
from trinity_sync.tracking.run_record import RunJson
from trinity_sync.tracking.summary import (
    LOSS,
    CheckpointFigures,
    SampleFigures,
    ShapesFigures,
    Summary,
    SyncFigures,
    headline,
)

_WHOLE = ("folder", "report", "next")
ResumeCommand = Callable[[Path, str], str]
"""Returns the command that resumes the run in a folder, whose name in the command is the text."""


class _SummaryView:
    """The summary as rich prints it: as wide as the output, in ASCII if the output is limited to that."""

    def __init__(
        self, summary: Summary, run_dir: Path, total_steps: int | None, error: str | None, resume: ResumeCommand | None
    ) -> None:
        self._summary, self._run_dir, self._total, self._error = summary, run_dir, total_steps, error
        self._resume = resume

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary, status = self._summary, self._summary["status"]
        style = {"completed": "bold green", "failed": "bold red"}.get(status, "bold yellow")
        steps = str(summary["steps"]) if self._total is None else f"{summary['steps']} of {self._total}"
        yield Text.assemble((status, style), f": {steps} steps in {units.seconds(summary['wall_s'])}")
        if self._error:
            yield Text(printable(self._error, keep="\n"), style="red")
        rows = closing_lines(summary, self._run_dir, "->" if options.ascii_only else "→", self._resume)
        for label, text in lay_out(rows, options.max_width):
            yield Text.assemble((label, "bold"), text, no_wrap=True, overflow="ignore")


def render_summary(
    summary: Summary,
    run_dir: str | os.PathLike[str],
    *,
    total_steps: int | None = None,
    error: str | None = None,
    resume: ResumeCommand | None = None,
) -> RenderableType:
    """Render the status, the figures, the folder of a run and its next command. Returns a text for ``console.print(...,
    crop=False)``: long paths and commands stay whole.
    """
    return _SummaryView(summary, Path(run_dir), total_steps, error, resume)


def lay_out(rows: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Lay out padded labels and texts in two columns; texts are wrapped, but paths and commands stay whole."""
    indent = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, text in rows:
        text = printable(text, instead=" ")
        pieces = [text] if label in _WHOLE else textwrap.wrap(text, max(width - indent, 20)) or [""]
        lines += [(label.ljust(indent) if index == 0 else " " * indent, piece) for index, piece in enumerate(pieces)]
    return lines


def closing_lines(
    summary: Summary, run_dir: Path, arrow: str = "->", resume: ResumeCommand | None = None
) -> list[tuple[str, str]]:
    """Return label and text of each line below the status."""
    sync, checkpoint = summary["sync"], summary["checkpoint"]
    lines = []
    name, begin, end = headline(summary)
    if end is not None:
        count = summary["mean_steps"]
        which = f"means of the first and last {count} steps" if count > 1 else "the first and the last step"
        lines.append((name, f"{units.number(begin)} {arrow} {units.number(end)} ({which})"))
    if failed := summary["failed_rewards"]:
        lines.append(("rewards", f"{units.plural(failed, 'response')} could not be judged: see events.jsonl"))
    if (validated := summary["validation"]) is not None:
        first, last = units.number(validated["first"]), units.number(validated["last"])
        best = f"best {units.number(validated['best'])} at step {validated['best_step']}"
        what = "loss" if validated["metric"] == LOSS else "reward"
        lines.append(("validation", f"{what} {first} {arrow} {last}, {best}"))
    if sync["versions"] or name == "reward":  # a supervised run publishes none
        lines.append(("versions", _versions_text(sync)))
    if summary["shapes"] is not None:
        lines.append(("bytes", _shapes_text(summary["shapes"], sync)))
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
    lines.append(("next", next_command(summary, shown, resume)))
    return lines


def next_command(summary: Summary, run_dir: str, resume: ResumeCommand | None = None) -> str:
    """Return the command that most users need next."""
    folder = shlex.quote(run_dir)
    if summary["status"] == "running":
        return f"trinity-sync watch {folder}"
    if summary["checkpoint"]["latest"] is None:
        return f"trinity-sync report {folder}"
    if summary["status"] == "completed":
        return f"trinity-sync ckpt list {folder}"
    return f"trinity-sync resume {folder}" if resume is None else resume(Path(run_dir).absolute(), run_dir)


def shorten(path: Path) -> str:
    """Return a path relative to the working directory when it is below it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) and path != Path.cwd() else str(path)


def _samples_text(samples: SampleFigures) -> str:
    return (
        f"{samples['dropped']} dropped as over-stale, explorers waited {units.seconds(samples['waited_s'])}; "
        f"staleness {units.number(samples['staleness_mean'])} on average, {samples['staleness_max']:.0f} at most"
    )


def _versions_text(sync: SyncFigures) -> str:
    if not sync["versions"]:
        return "none published"
    text = f"{sync['versions']} published ({sync['mode']}), {units.plural(sync['loads'], 'load')}"
    text += f" by {units.plural(len(sync['explorers']), 'explorer')}" if sync["explorers"] else ""
    blocked, total = sync["publish"]["blocked_s"]["median"], sync["load"]["total_s"]["median"]
    times = [f"trainer blocked {units.seconds(blocked)}"] if blocked is not None else []
    times += [f"load {units.seconds(total)}"] if total is not None else []
    return f"{text}; median {', '.join(times)}" if times else text


def _checkpoints_text(checkpoint: CheckpointFigures) -> str:
    if not checkpoint["commits"]:
        return "none saved"
    pruned = f", {checkpoint['pruned']} pruned" if checkpoint["pruned"] else ""
    if not checkpoint["kept"]:
        return f"none kept ({checkpoint['commits']} saved{pruned})"
    steps = ", ".join(str(step) for step in checkpoint["kept"][-5:])
    more = len(checkpoint["kept"]) - 5
    word = "step" if len(checkpoint["kept"]) == 1 else "steps"
    return f"{word} {steps}{f' and {more} earlier' if more > 0 else ''} kept ({checkpoint['commits']} saved{pruned})"


def _shapes_text(shapes: ShapesFigures, sync: SyncFigures) -> str:
    text = f"{units.size(sync['bytes_full'])} a version, {100 * shapes['share']:.3g} % of the whole model"
    if shapes["gb_s"] is not None:
        text += f"; publish and load {shapes['gb_s']:.3g} GB/s"
    if shapes["copies"] is not None:
        text += f", {shapes['copies']:.1f} copies of the bytes"
    return text


# Lines of driver.log.


_STEP_FIGURES = {"reward/mean": "reward", "loss": "loss", "staleness/mean": "staleness"}


def beginning_text(record: RunJson, name: str, subtitle: str) -> str:
    """Describe the beginning of an attempt in one line."""
    resumed = record.get("resumed_from")
    begins = "begins" if resumed is None else f"resumes after step {resumed}"
    parts = [
        f"run {name} ({subtitle}) {begins}, attempt {record['attempt']}",
        f"settings {record.get('config_digest')}, seed {record.get('seed')}",
        f"driver is pid {os.getpid()} on {record.get('host')}",
        f"command: {record.get('command')}",
    ]
    return "; ".join(parts)


def ending_text(status: str, error: str | None, summary: Summary | None) -> str:
    """Describe the end of an attempt in one line; `summary` is None if the disk refused it."""
    figures = f" after {summary['steps']} steps and {units.seconds(summary['wall_s'])}" if summary is not None else ""
    return f"run {status}{figures}" + (f": {error}" if error else "")


def event_text(event: events.Event) -> str:
    """Describe an event in one line; the traceback of a fault follows."""
    match event:
        case events.PublishEvent():
            return (
                f"version {event.version} published by {event.mode}: {units.size(event.bytes_moved)} in "
                f"{units.seconds(event.total_s)}, trainer blocked {units.seconds(event.blocked_s)}"
                f"{_digest(event.digest)}"
            )
        case events.LoadEvent():
            moved = f"{units.size(event.bytes)} in " if event.bytes is not None else ""
            return (
                f"{event.explorer} loaded version {event.version}: {moved}{units.seconds(event.total_s)}, "
                f"paused {units.seconds(event.paused_s)}{_digest(event.digest)}"
            )
        case events.GenerateEvent():
            return (
                f"{event.explorer} generated for step {event.step} with version {event.version} in "
                f"{units.seconds(event.total_s)}"
            )
        case events.SkipEvent():
            return f"version {event.version} not published: {event.reason}"
        case events.SkippedUpdateEvent():
            return f"step {event.step}: {event.count} of its updates skipped: the gradient is not finite"
        case events.FailedRewardsEvent():
            whose = " of its validation" if event.validation else ""
            return f"step {event.step}: {event.count} responses{whose} could not be judged; first error: {event.error}"
        case events.AgreementEvent():
            mean, largest, bound = (
                "nan" if value is None else f"{value:.3g}" for value in (event.mean, event.largest, event.bound)
            )
            return (
                f"step {event.step}: log-probs of {event.explorer} and of the trainer differ by {mean} on average, "
                f"{largest} at most, over {event.tokens} tokens ({bound} allowed)"
            )
        case events.FilledBatchEvent():
            return (
                f"step {event.step}: {event.count} of its prompts have equal rewards, because too few of the "
                f"{event.drawn} answered prompts have different ones (algorithm.filter_groups)"
            )
        case events.AllRejectedEvent():
            return f"step {event.step}: nothing trained: rollout_rs rejected all of its tokens"
        case events.CommitEvent():
            return (
                f"checkpoint of step {event.step} committed ({event.kind}): {units.size(event.bytes)} after "
                f"{units.seconds(event.total_s)}, trainer blocked {units.seconds(event.blocked_s)}"
                f"{_digest(event.digest)}"
            )
        case events.PruneEvent():
            freed = units.size(event.freed_bytes)
            return f"checkpoint of step {event.step} deleted by retention: {event.reason}; {freed} freed"
        case events.MirrorEvent(state="copied"):
            how = f"{units.size(event.bytes)} in {units.seconds(event.total_s)}"
            return f"checkpoint of step {event.step} copied to {event.url}: {how}"
        case events.MirrorEvent():
            return f"checkpoint of step {event.step} not copied to {event.url}: {event.reason or event.state}"
        case events.RowsEvent():
            return (
                f"{event.rows} rows read, the longest of {event.longest} tokens; {event.too_long} too long "
                f"(task.too_long={event.policy})"
            )
        case events.PhaseEvent():
            return event.what
        case events.SaveEvent():
            return f"checkpoint of step {event.step} started"
        case events.FaultEvent():
            return f"fault in {event.where}: {event.error}" + (f"\n{event.traceback}" if event.traceback else "")
        case events.HealEvent():
            return f"{healed_text(event)}: {event.died}"
    figures = ", ".join(f"{key}={value}" for key, value in events.event_fields(event).items())
    return f"{events.event_name(event)}: {figures}"


def healed_text(event: events.HealEvent) -> str:
    """Describe how a run went on by itself."""
    made = f", {units.plural(event.made, 'group')} of samples made meanwhile" if event.made else ""
    kept = f", {units.plural(event.kept.count(',') + 1, 'explorer')} lived on" if event.kept else ""
    return (
        f"went on after step {event.resumed_from}, {units.plural(event.lost, 'step')} done again, "
        f"{units.seconds(event.total_s)} to the next step{kept}{made}"
    )


def step_text(step: int, values: Mapping[str, object]) -> str:
    """Describe a trainer step in one line: reward, loss, and its seconds by part."""
    figures = [
        f"{word} {units.number(value)}"
        for key, word in _STEP_FIGURES.items()
        if (value := _known(values, key)) is not None
    ]
    took = _known(values, "timing/step")
    parts = [
        f"{key.removeprefix('timing/')} {units.seconds(value)}"
        for key in values
        if key.startswith("timing/") and key != "timing/step" and (value := _known(values, key)) is not None
    ]
    text = f"step {step} done" + (f" in {units.seconds(took)}" if took is not None else "")
    text += f" ({', '.join(parts)})" if parts else ""
    return f"{text}: {', '.join(figures)}" if figures else text


def _known(values: Mapping[str, object], key: str) -> float | None:
    return units.finite(values.get(key))


def _digest(digest: str | None) -> str:
    return f", digest {digest}" if digest else ""
