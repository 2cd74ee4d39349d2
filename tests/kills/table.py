"""The table of a campaign, as docs/faults.md shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kills.trial import LOST, REFUSED, RESUMED, SURVIVED

_ORDER = ("kill", "hang", "pause", "full disk", "damage")
_HEAD = "| what | whom | trials | the run went on | ended and resumed | refused | lost | with a problem |"


def render(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row per kind and victim, and a sum."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["kind"], line["victim"]), []).append(line)
    texts = [_HEAD, "|---|---|" + "---:|" * 6]
    for kind, victim in sorted(rows, key=lambda row: (_ORDER.index(row[0]) if row[0] in _ORDER else 9, row[1])):
        texts.append(_row(kind, victim, rows[kind, victim]))
    texts.append(_row("all", "", [line for group in rows.values() for line in group]))
    return "\n".join(texts)


def _row(kind: str, victim: str, lines: list[dict[str, Any]]) -> str:
    counts = [sum(line["outcome"] == outcome for line in lines) for outcome in (SURVIVED, RESUMED, REFUSED, LOST)]
    problems = sum(bool(line["problems"]) for line in lines)
    return f"| {kind} | {victim} | {' | '.join(map(str, [len(lines), *counts, problems]))} |"
