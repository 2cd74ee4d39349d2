"""What happens in a run in plain words: one line for each event, for `driver.log`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trinity_sync.tracking import units
from trinity_sync.tracking.record import RunJson
from trinity_sync.tracking.summary import Summary

_STEP_FIGURES = {"reward/mean": "reward", "loss": "loss", "staleness/mean": "staleness"}


def told_beginning(record: RunJson, name: str, subtitle: str) -> str:
    """Put what an attempt begins with into one line.

    Args:
        record: as run.json has it.
        name, subtitle: the run's, as the live view shows them.
    """
    resumed = record.get("resumed_from")
    begins = "begins" if resumed is None else f"goes on after step {resumed}"
    parts = [
        f"run {name} ({subtitle}) {begins}, attempt {record['attempt']}",
        f"settings {record.get('config_digest')}, seed {record.get('seed')}",
        f"driver is pid {os.getpid()} on {record.get('host')}",
        f"command: {record.get('command')}",
    ]
    return "; ".join(parts)


def told_ending(status: str, error: str | None, summary: Summary | None) -> str:
    """Put how an attempt ended into one line.

    Args:
        status: completed, failed or interrupted.
        error: why it failed.
        summary: None where the disk refused it.
    """
    figures = f" after {summary['steps']} steps and {units.seconds(summary['wall_s'])}" if summary is not None else ""
    return f"run {status}{figures}" + (f": {error}" if error else "")


def told_event(event: Mapping[str, object]) -> str:
    """Put an event, as it stands in events.jsonl, into one line; the traceback of a fault follows it."""
    match event["event"]:
        case "publish":
            text = (
                f"version {event['version']} published by {event['mode']}: {_size(event['bytes_moved'])} in "
                f"{_seconds(event['total_s'])}, trainer blocked {_seconds(event['blocked_s'])}{_digest(event)}"
            )
        case "load":
            moved = f"{_size(event['bytes'])} in " if "bytes" in event else ""
            text = (
                f"{event['explorer']} loaded version {event['version']}: {moved}{_seconds(event['total_s'])}, "
                f"paused {_seconds(event['paused_s'])}{_digest(event)}"
            )
        case "generate":
            text = (
                f"{event['explorer']} generated for step {event['step']} with version {event['version']} in "
                f"{_seconds(event['total_s'])}"
            )
        case "skip":
            text = f"version {event['version']} left out: {event['reason']}"
        case "skipped_update":
            text = f"step {event['step']}: {event['count']} of its updates skipped, the gradient is not finite"
        case "failed_rewards":
            text = (
                f"step {event['step']}: {event['count']} of the responses "
                f"{'of its validation ' if event.get('validation') else ''}could not be judged, the first: "
                f"{event['error']}"
            )
        case "agreement":
            text = (
                f"step {event['step']}: log-probs of {event['explorer']} and of the trainer differ by "
                f"{event['mean']:.3g} on average, {event['largest']:.3g} at most, over {event['tokens']} tokens "
                f"({event['bound']:.3g} allowed)"
            )
        case "filled_batch":
            text = (
                f"step {event['step']}: {event['count']} of its prompts have samples without a difference, as too few "
                f"of the {event['drawn']} that were answered have one (algorithm.filter_groups)"
            )
        case "all_rejected":
            text = f"step {event['step']}: nothing learnt, rollout_rs leaves out each of its tokens"
        case "commit":
            text = (
                f"checkpoint of step {event['step']} committed ({event['kind']}): {_size(event['bytes'])} after "
                f"{_seconds(event['total_s'])}, trainer blocked {_seconds(event['blocked_s'])}{_digest(event)}"
            )
        case "prune":
            text = (
                f"checkpoint of step {event['step']} deleted by retention: {event['reason']}; "
                f"{_size(event['freed_bytes'])} freed"
            )
        case "mirror":
            how = f"{_size(event['bytes'])} in {_seconds(event['total_s'])}"
            copied = event["state"] == "copied"
            text = (
                f"checkpoint of step {event['step']} {'copied' if copied else 'not copied'} to {event['url']}: "
                f"{how if copied else event.get('reason', event['state'])}"
            )
        case "rows":
            text = (
                f"{event['rows']} rows looked through, the longest of {event['longest']} tokens: {event['too_long']} "
                f"too long (task.too_long={event['policy']})"
            )
        case "phase":
            text = str(event["what"])
        case "save":
            text = f"checkpoint of step {event['step']} begun"
        case "fault":
            text = f"fault in {event['where']}: {event['error']}"
            if "traceback" in event:
                text += f"\n{event['traceback']}"
        case name:
            text = f"{name}: {', '.join(f'{key}={value}' for key, value in event.items() if key != 'event')}"
    return text


def told_step(step: int, values: Mapping[str, object]) -> str:
    """Put a trainer step into one line: its reward, its loss, and where its seconds went."""
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


def _size(value: object) -> str:
    return units.size(units.finite(value))


def _seconds(value: object) -> str:
    return units.seconds(units.finite(value))


def _digest(event: Mapping[str, object]) -> str:
    return f", digest {event['digest']}" if event.get("digest") else ""
