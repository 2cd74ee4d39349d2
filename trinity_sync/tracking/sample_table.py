"""Samples of a step as trackers show them: a table, in the columns that people read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

COLUMNS = ("step", "text", "response", "reward", "exact", "advantage", "finished", "tokens", "version", "spans")
"""Keys of a line of samples.jsonl. `text` is the prompt."""


def name_of(rows: Sequence[Mapping[str, object]]) -> str:
    """What the table of these samples, all of training or all of a validation, is called in every tracker."""
    return "validation_samples" if any(row.get("validation") for row in rows) else "samples"


def cells(rows: Sequence[Mapping[str, object]]) -> list[list[object]]:
    """The cells of each row by `COLUMNS`; spans as JSON."""
    return [[json.dumps(row[name]) if name == "spans" else row[name] for name in COLUMNS] for row in rows]


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """The table as Markdown."""
    lines: list[list[object]] = [list(COLUMNS), ["---"] * len(COLUMNS), *cells(rows)]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
