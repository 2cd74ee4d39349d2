"""The same figures as plain text, for `trinity-sync report` and for logs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from trinity_sync.report.data import TARGET_REWARD, Run, Sweep, steps_to
from trinity_sync.report.run_page import facts
from trinity_sync.report.sweep_page import HEAD, cells
from trinity_sync.tracking import units
from trinity_sync.tracking.closing import closing_lines, lay_out

# Columns of HEAD in the order in which a narrow terminal loses them: the two p95, faults, load, bytes, blocked, wall.
_LEAST_FIRST = (10, 8, 12, 9, 11, 7, 6)


def render(found: Run | Sweep, width: int | None = None) -> str:
    """Render a run or sweep as plain text without colours or control characters.

    Args:
        found: what was read.
        width: columns; those of the terminal by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    runs = found.runs if isinstance(found, Sweep) else [found]
    lines = _sweep(found, width) if isinstance(found, Sweep) else _run(found, width)
    for run in runs:
        lines += textwrap.wrap(": ".join([run.path.name, " ".join(run.notes)]), width) if run.notes else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _run(run: Run, width: int) -> list[str]:
    summary = run.summary
    steps = f"{summary['steps']} of {run.total_steps}" if run.total_steps is not None else str(summary["steps"])
    rows = [("run", run.name), ("status", f"{run.status}, {steps} steps"), *facts(run)]
    if run.record.get("error"):
        rows.append(("error", str(run.record["error"])))
    reached = steps_to(run)
    if reached is not None:
        rows.append((f"steps to {TARGET_REWARD}", str(reached)))
    rows += [(f"peak, {role}", units.size(peak)) for role, peak in summary["peak_memory"].items()]
    rows += closing_lines(summary, run.path)
    return [label + text for label, text in lay_out(rows, width)]


def _sweep(sweep: Sweep, width: int) -> list[str]:
    """Lay out a table whose least important columns go where the width is too small; overrides stand one per line."""
    rows = [cells(sweep, run) for run in sweep.runs]
    stacks = [sweep.distinct(run) or ["none"] for run in sweep.runs]
    widths = [max(len(title), *(len(row[index]) for row in rows)) for index, title in enumerate(HEAD)]
    widths[1] = max(len(HEAD[1]), *(len(text) for stack in stacks for text in stack))
    shown = list(range(len(HEAD)))
    for index in _LEAST_FIRST:
        if sum(widths[column] + 2 for column in shown) - 2 > width:
            shown.remove(index)

    def line(texts: Sequence[str]) -> str:
        aligned = [
            texts[column].ljust(widths[column]) if column < 3 else texts[column].rjust(widths[column])
            for column in shown
        ]
        return "  ".join(aligned)

    lines = [line(HEAD), "  ".join("-" * widths[column] for column in shown)]
    for row, stack in zip(rows, stacks, strict=True):
        lines.append(line([row[0], stack[0], *row[2:]]))
        lines += [line(["", text, *[""] * (len(HEAD) - 2)]) for text in stack[1:]]
    if len(sweep.runs) > 1 and sweep.common:
        lines += ["", *textwrap.wrap(f"the same in all: {' '.join(sweep.common)}", width)]
    return lines
