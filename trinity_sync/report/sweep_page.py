"""The page of a sweep: its jobs side by side by what varies, what suits best, and their rewards on two charts."""

from __future__ import annotations

from trinity_sync.report import sweep_charts, templating
from trinity_sync.report.agreement import Agreement, agreement
from trinity_sync.report.data import TARGET_REWARD, Sweep
from trinity_sync.report.figures import BY_KEY, COLUMNS, detail
from trinity_sync.report.marks import RULE
from trinity_sync.report.rows import Comparison, Row, compare
from trinity_sync.tracking import units


def render(sweep: Sweep, now: float) -> str:
    """Render the page as HTML.

    Args:
        sweep: what was read.
        now: Unix seconds, for the note on when it was made.
    """
    comparison, agreed = compare(sweep), agreement(sweep.runs)
    return templating.render(
        "sweep.html",
        title=f"Sweep {sweep.path.parent.name}/{sweep.path.name}",
        path=sweep.path,
        now=now,
        common=(" ".join(sweep.common) if len(sweep.runs) > 1 else "") or "the defaults",
        agreed=agreed,
        tiles=_tiles(sweep, comparison, agreed),
        reward_by_step=sweep_charts.reward_by_step,
        reward_by_wall=sweep_charts.reward_by_wall,
        comparison=comparison,
        columns=COLUMNS,
        detail=detail,
        band=_band,
        rule=RULE,
        pages={run.path.name for run in sweep.runs if (run.path / "report.html").exists()},
        notes=[
            (run.path.name, text)
            for run in sweep.runs
            for text in [*([str(run.record["error"])] if run.record.get("error") else []), *run.notes]
        ],
    )


def _band(row: Row, key: str) -> str:
    """Say on hover what decides over ties."""
    one, text = row.figures[key], BY_KEY[key].text
    if len(row.runs) > 1:
        return f"mean of {units.plural(one.count, 'job')}"
    return f"of {one.count}, half lie from {text(one.low)} to {text(one.high)}" if one.count > 1 else ""


def _tiles(sweep: Sweep, comparison: Comparison, agreed: Agreement) -> list[tuple[str, str, str | None]]:
    done = sum(run.status == "completed" for run in sweep.runs)
    walls = [run.summary["wall_s"] for run in sweep.runs if run.summary["wall_s"] is not None]
    digests = {True: "agree", False: "differ", None: "not compared"}[agreed.agree]
    compared = f"{units.plural(agreed.jobs, 'job')}, {units.plural(agreed.versions, 'version')}"
    return [
        ("Runs", str(len(sweep.runs)), f"{done} completed"),
        _leading(comparison, "reward", "Best last reward", "none"),
        _leading(comparison, "steps_to_target", f"Fewest steps to {TARGET_REWARD}", "never"),
        ("Digests", digests, compared if agreed.jobs else None),
        ("Wall, all runs", units.seconds(sum(walls) if walls else None, "none"), None),
    ]


def _leading(comparison: Comparison, key: str, label: str, nothing: str) -> tuple[str, str, str | None]:
    """The best value of a column, and whose it is; where it is a tie, of how many."""
    column = BY_KEY[key]
    having = [row for row in comparison.rows if key in row.figures]
    if not having:
        return label, nothing, None
    best = (min if column.better == "lower" else max)(having, key=lambda row: row.figures[key].value)
    tied = sum(row.marks.get(key) == "tie" for row in comparison.rows)
    return label, column.text(best.figures[key].value), f"a tie of {tied}" if tied else best.label
