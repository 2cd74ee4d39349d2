"""The page of one run: how it went, how fast, what was published, loaded and kept, and what it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_sync.report import run_charts, run_tables
from trinity_sync.report.data import TARGET_REWARD, Run, steps_to
from trinity_sync.report.html import Html, badge, join, page, tag, tiles
from trinity_sync.tracking import units
from trinity_sync.tracking.summary import mismatches

_MOST_NAMED = 10


def render(run: Run, now: float) -> str:
    """The page as HTML.

    Args:
        run: what was read.
        now: Unix seconds, for the note on when it was made.
    """
    return page(
        f"{run.name}: {run.status}",
        _top(run),
        _troubles(run),
        _tiles(run),
        run_charts.reward(run),
        run_charts.loss(run),
        run_charts.timing(run),
        run_charts.staleness(run),
        run_charts.latencies(run),
        run_charts.moved(run),
        run_charts.saves(run),
        run_tables.checkpoints(run),
        run_tables.versions(run),
        run_tables.faults(run),
        run_tables.attempts(run),
        run_tables.environment(run),
        run_tables.config(run),
        tag("p", f"Made {units.moment(now)} from {run.path}", class_="quiet wide"),
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """What the run is: name and value, those that are known."""
    sync = run.summary["sync"]
    backend = run.setting("backend", "strategy") or _chosen(run, "backend")
    ranks = run.setting("backend", "ranks")
    items = [
        ("backend", f"{backend} on {units.plural(ranks, 'rank')}" if backend and isinstance(ranks, int) else backend),
        ("sync", run.setting("sync", "mode") or _chosen(run, "sync") or sync["mode"]),
        ("encoding", sync["encoding"]),
        ("seed", run.record.get("seed")),
        ("wall", units.seconds(run.summary["wall_s"]) if run.summary["wall_s"] is not None else None),
        ("started", units.moment(run.record.get("started")) if run.record.get("started") is not None else None),
    ]
    return [(name, str(value)) for name, value in items if value is not None]


def _chosen(run: Run, group: str) -> str | None:
    """The option that the command line chose for a config group."""
    chosen = [text.split("=", 1)[1] for text in run.overrides if text.lstrip("+").startswith(f"{group}=")]
    return chosen[-1] if chosen else None


def _top(run: Run) -> Html:
    items = [tag("li", f"{name} ", tag("b", value), class_="quiet") for name, value in facts(run)]
    return tag("div", tag("h1", run.name), badge(run.status), tag("ul", *items, class_="facts"), class_="top")


def _troubles(run: Run) -> Html:
    error = run.record.get("error")
    parts = []
    if error:
        parts.append(tag("section", tag("h2", "Why it ended"), tag("pre", str(error)), class_="card wide error"))
    wrong = [_mismatch_text(event) for event in mismatches(run.events)]
    if wrong:
        more = [f"... and {len(wrong) - _MOST_NAMED} more"] if len(wrong) > _MOST_NAMED else []
        lines = [tag("p", text) for text in [*wrong[:_MOST_NAMED], *more]]
        parts.append(
            tag("section", tag("h2", "Digests that are not the published ones"), *lines, class_="card wide error")
        )
    if run.notes:
        parts.append(tag("section", *(tag("p", note) for note in run.notes), class_="card wide note"))
    return join(*parts)


def _mismatch_text(event: Mapping[str, Any]) -> str:
    who = {"load": f"{event.get('explorer')} loaded version", "commit": "the checkpoint of step"}.get(
        event["event"], "published again: version"
    )
    return f"{who} {event.get('version', event.get('step'))}: {event.get('digest')}"


def _tiles(run: Run) -> Html:
    summary, sync, saved = run.summary, run.summary["sync"], run.summary["checkpoint"]
    total = run.total_steps
    reached = steps_to(run)
    wrong = sync["mismatched"]
    step_times = [gap for gap in _gaps(run) if gap is not None]
    items: list[tuple[str, str, str | None]] = [
        (
            "Steps",
            f"{summary['steps']} of {total}" if total is not None else str(summary["steps"]),
            f"{units.seconds(sorted(step_times)[len(step_times) // 2])} each, median" if step_times else None,
        ),
        (
            "Reward",
            units.number(summary["reward_last"], "none"),
            f"from {units.number(summary['reward_first'])}"
            + (f", {TARGET_REWARD} at step {reached}" if reached is not None else "")
            if summary["reward_last"] is not None
            else None,
        ),
        (
            "Versions",
            str(sync["versions"]),
            f"{sync['loads']} loads by {units.plural(len(sync['explorers']), 'explorer')}",
        ),
        ("Blocked by publish", *_spread(sync["publish"]["blocked_s"])),
        ("Load", *_spread(sync["load"]["total_s"])),
        (
            "Moved per version",
            units.size(sync["bytes_moved"], "none"),
            f"of {units.size(sync['bytes_full'])}{_saving(sync)}" if sync["bytes_full"] is not None else None,
        ),
        ("Checkpoints kept", str(len(saved["kept"])), f"{saved['commits']} saved, {saved['pruned']} pruned"),
        ("Blocked by save", *_spread(saved["blocked_s"])),
        ("Digests", "all match" if not wrong else f"{wrong} wrong", "trainer, explorers, checkpoints")
        if summary["digests"]
        else ("Digests", "not checked", None),
    ]
    peaks = [(f"Peak, {role}", units.size(peak), None) for role, peak in summary["peak_memory"].items()]
    return tiles([*items, *peaks])


def _gaps(run: Run) -> list[float | None]:
    """Seconds between the ends of neighbouring steps of one attempt."""
    pairs = zip(run.metrics, run.metrics[1:], strict=False)
    return [
        after["time"] - before["time"]
        for before, after in pairs
        if before.get("attempt") == after.get("attempt")
        and units.finite(before.get("time")) is not None
        and units.finite(after.get("time")) is not None
    ]


def _spread(figures: Mapping[str, float | None]) -> tuple[str, str | None]:
    if figures["median"] is None:
        return "none", None
    return units.seconds(figures["median"]), f"median; p95 {units.seconds(figures['p95'])}"


def _saving(sync: Mapping[str, Any]) -> str:
    if not sync["bytes_moved"] or sync["bytes_moved"] * 1.05 > sync["bytes_full"]:
        return ""
    return f", {sync['bytes_full'] / sync['bytes_moved']:.1f} times less"
