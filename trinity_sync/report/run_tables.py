"""The tables of a run's page: checkpoints, versions, faults, attempts, and what the run was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_sync.report.data import Run
from trinity_sync.report.html import Html, badge, digest, join, section, table, tag
from trinity_sync.tracking import units
from trinity_sync.tracking.summary import kept_checkpoints, mismatches

_MOST_ROWS = 400


def checkpoints(run: Run) -> Html:
    """Every checkpoint that was committed, and what became of it."""
    kept = {event["step"] for event in kept_checkpoints(run.events, run.checkpoints)}
    pruned = {event.get("step"): event for event in run.of("prune")}
    rows = []
    for event in run.of("commit"):
        step = event.get("step")
        gone = pruned.get(step)
        fate: str | Html = tag("span", "kept", class_="good")
        if step not in kept:
            fate = "deleted, but not by the run"
            if gone is not None:
                fate = f"pruned: {gone.get('reason')} ({units.size(gone.get('freed_bytes'))} freed)"
        rows.append(
            [
                str(step),
                str(event.get("kind")),
                digest(event.get("digest")),
                units.size(event.get("bytes")),
                units.seconds(event.get("blocked_s")),
                units.seconds(event.get("total_s")),
                fate,
            ]
        )
    head = ["Step", "Kind", "Digest", "Size", "Blocked", "Until committed", "Now"]
    shown, older = _newest(rows)
    body = table(head, shown, numeric=(0, 3, 4, 5), empty="No checkpoint has been committed.")
    return section("Checkpoints", body, older, hint="What the run committed, and why it deleted what it deleted")


def versions(run: Run) -> Html:
    """Every version, who loaded it, and whether the digests agree."""
    wrong = {id(event) for event in mismatches(run.events)}
    loads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in run.of("load"):
        loads.setdefault(event.get("version"), []).append(event)
    rows = []
    for event in run.of("publish"):
        version = event.get("version")
        rows.append(
            [
                str(version),
                str(event.get("attempt")),
                join(str(event.get("mode")), ", ", str(event.get("encoding"))),
                digest(event.get("digest")),
                units.size(event.get("bytes_moved")),
                units.seconds(event.get("blocked_s")),
                units.seconds(event.get("total_s")),
                _held_by(loads.get(version, []), wrong, bool(event.get("digest"))),
            ]
        )
    head = ["Version", "Attempt", "Mode, encoding", "Digest", "Moved", "Blocked", "Until committed", "Loaded by"]
    shown, older = _newest(rows)
    body = table(head, shown, numeric=(0, 1, 4, 5, 6), empty="No version has been published.")
    hint = "✓ the explorer's digest of what it holds is the trainer's; ✕ it is another"
    return section("Versions", body, older, hint=hint)


def _held_by(loads: Sequence[Mapping[str, Any]], wrong: set[int], checked: bool) -> Html | str:
    if not loads:
        return tag("span", "nobody", class_="quiet")
    parts: list[str | Html] = []
    for event in loads:
        name = f"{event.get('explorer')} {units.seconds(event.get('total_s'))}"
        if id(event) in wrong:
            mark = tag("span", f"✕ {name}: digest {str(event.get('digest'))[:12]}", class_="bad")
        elif checked and event.get("digest"):
            mark = join(tag("span", "✓ ", class_="good"), name)
        else:
            mark = join(name, " (not checked)")
        parts += [", ", mark]
    return join(*parts[1:])


def faults(run: Run) -> Html:
    """Every fault that was reported."""
    starts = [units.finite(item.get("started")) for item in run.record.get("attempts") or [run.record]]
    first = min((at for at in starts if at is not None), default=None)
    rows = [
        [
            units.seconds(event["time"] - first)
            if first is not None and units.finite(event.get("time")) is not None
            else "-",
            str(event.get("attempt")),
            str(event.get("where")),
            tag("span", str(event.get("error")), class_="verbatim"),
        ]
        for event in run.of("fault")
    ]
    shown, older = _newest(rows)
    body = table(["After", "Attempt", "Where", "What"], shown, numeric=(0, 1), empty="No fault was reported.")
    return section("Faults", body, older)


def attempts(run: Run) -> Html | None:
    """The attempts of a run that was resumed; None for one that was not."""
    attempts = run.record.get("attempts") or []
    if len(attempts) < 2:
        return None
    rows = [
        [
            str(item.get("attempt")),
            badge(str(item.get("status") if item is not attempts[-1] else run.status)),
            "the beginning" if item.get("resumed_from") is None else f"step {item['resumed_from']}",
            units.moment(item.get("started")),
            units.moment(item.get("ended")),
            str(item.get("host")),
            str(item.get("error") or ""),
        ]
        for item in attempts
    ]
    return section(
        "Attempts", table(["Attempt", "Status", "From", "Started", "Ended", "Host", "Error"], rows, numeric=(0,))
    )


def environment(run: Run) -> Html:
    """What the run was made with."""
    record = run.record
    git = record.get("git")
    commit = f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "no repository"
    rows: list[list[str | Html]] = [
        ["command", tag("code", str(record.get("command") or "unknown"))],
        ["git", commit],
        ["host", str(record.get("host") or "unknown")],
        ["threads", json.dumps(record.get("threads"))],
        ["config digest", tag("code", str(record.get("config_digest") or "unknown"))],
    ]
    rows += [[name, str(version)] for name, version in (record.get("packages") or {}).items()]
    return section(
        "Environment", table(["What", "Value"], rows) if record else tag("p", "Nothing recorded.", class_="quiet")
    )


def config(run: Run) -> Html:
    """The overrides and the config."""
    chosen = tag("p", "Overrides: ", tag("code", " ".join(run.overrides) or "none"))
    if run.config_text is None:
        return section("Configuration", chosen, tag("p", "Hydra left no config in .hydra/.", class_="quiet"))
    whole = tag("details", tag("summary", "The whole config"), tag("pre", run.config_text))
    return section("Configuration", chosen, whole)


def _newest(rows: list[list[str | Html]]) -> tuple[list[list[str | Html]], Html | None]:
    """The newest rows first, and a word on those left out."""
    left = len(rows) - _MOST_ROWS
    note = tag("p", f"The {left} older ones are in events.jsonl.", class_="quiet") if left > 0 else None
    return rows[::-1][:_MOST_ROWS], note
