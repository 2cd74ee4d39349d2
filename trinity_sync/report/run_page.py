"""The page of one run: how it went, how fast, what was published, loaded and kept, and what it was made of."""

from __future__ import annotations

import json

from trinity_sync.report import run_charts, templating, timeline
from trinity_sync.report.data import TARGET_REWARD, Run, steps_to
from trinity_sync.tracking import units
from trinity_sync.tracking.jsonl import Record
from trinity_sync.tracking.summary import Spread, SyncFigures, kept_checkpoints, mismatches


def render(run: Run, now: float) -> str:
    """Render the page as HTML.

    Args:
        run: what was read.
        now: Unix seconds, for the note on when it was made.
    """
    loads: dict[object, list[Record]] = {}
    for event in run.of("load"):
        loads.setdefault(event.get("version"), []).append(event)
    attempts = run.record.get("attempts") or []
    started = run.start

    def since_start(event: Record) -> float | None:
        at = units.finite(event.get("time"))
        return None if started is None or at is None else at - started

    return templating.render(
        "run.html",
        title=f"{run.name}: {run.status}",
        run=run,
        path=run.path,
        now=now,
        facts=facts(run),
        tiles=_tiles(run),
        charts=run_charts,
        timeline=timeline.timeline(run),
        wrong=mismatches(run.events),
        kept={event["step"] for event in kept_checkpoints(run.events, run.checkpoints)},
        pruned={event.get("step"): event for event in run.of("prune")},
        loads=loads,
        since_start=since_start,
        attempts=attempts,
        environment=_environment(run),
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """Tell what the run is: name and value, those that are known."""
    sync = run.summary["sync"]
    backend = run.setting("backend", "strategy") or _chosen(run, "backend")
    ranks = run.setting("backend", "ranks")
    items = [
        ("backend", f"{backend} on {units.plural(ranks, 'rank')}" if backend and isinstance(ranks, int) else backend),
        ("sync", run.setting("sync", "mode") or _chosen(run, "sync") or sync["mode"]),
        ("encoding", sync["encoding"]),
        ("explorers", _explorers(run)),
        ("seed", run.record.get("seed")),
        ("wall", units.seconds(run.summary["wall_s"]) if run.summary["wall_s"] is not None else None),
        ("started", units.moment(run.record.get("started")) if run.record.get("started") is not None else None),
    ]
    return [(name, str(value)) for name, value in items if value is not None]


def _explorers(run: Run) -> str | None:
    kind, replicas = run.setting("explorer", "kind"), run.setting("explorer", "replicas")
    return f"{replicas} of {kind}" if kind is not None and replicas is not None else None


def _chosen(run: Run, group: str) -> str | None:
    """Return the option that the command line chose for a config group."""
    chosen = [text.split("=", 1)[1] for text in run.overrides if text.lstrip("+").startswith(f"{group}=")]
    return chosen[-1] if chosen else None


def _tiles(run: Run) -> list[tuple[str, str, str | None]]:
    """Return the key figures: label, value, and a line of detail."""
    summary, sync, saved = run.summary, run.summary["sync"], run.summary["checkpoint"]
    total = run.total_steps
    reached = steps_to(run)
    wrong = sync["mismatched"]
    step_times = _gaps(run)
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
        *(
            [
                (
                    "Validation",
                    units.number(validated["last"]),
                    f"from {units.number(validated['first'])}, {units.number(validated['best'])} at step "
                    f"{validated['best_step']}",
                )
            ]
            if (validated := summary["validation"]) is not None
            else []
        ),
        *(
            [("Failed rewards", str(failed), "responses that could not be judged")]
            if (failed := summary["failed_rewards"])
            else []
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
        *(
            [
                (
                    "Mismatch",
                    units.number(mismatch["k3_kl"]),
                    f"nats a token (k3); log-probs differ by {units.number(mismatch['log_prob_abs_diff'])}, "
                    f"{units.number(mismatch['log_prob_abs_diff_max'])} at most",
                )
            ]
            if (mismatch := summary["mismatch"])["k3_kl"] is not None
            else []
        ),
        *(
            [("Share of the model", f"{100 * shapes['share']:.3g} %", f"{shapes['gb_s'] or 0:.3g} GB/s")]
            if (shapes := summary["shapes"]) is not None
            else []
        ),
        ("Checkpoints kept", str(len(saved["kept"])), f"{saved['commits']} saved, {saved['pruned']} pruned"),
        ("Blocked by save", *_spread(saved["blocked_s"])),
        ("Digests", "all match" if not wrong else f"{wrong} wrong", "trainer, explorers, checkpoints")
        if summary["digests"]
        else ("Digests", "not checked", None),
    ]
    return items + [(f"Peak, {role}", units.size(peak), None) for role, peak in summary["peak_memory"].items()]


def _environment(run: Run) -> list[tuple[str, str]]:
    """Tell what the run was made with: name and value; nothing where it has no record."""
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


def _gaps(run: Run) -> list[float]:
    """Return the seconds between the ends of neighbouring steps of one attempt."""
    pairs = zip(run.metrics, run.metrics[1:], strict=False)
    return [
        end - begin
        for before, after in pairs
        if before.get("attempt") == after.get("attempt")
        and (begin := units.finite(before.get("time"))) is not None
        and (end := units.finite(after.get("time"))) is not None
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
