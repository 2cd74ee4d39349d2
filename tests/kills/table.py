"""The table of a campaign, as docs/faults.md shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kills.trial import KINDS, LOSS, LOST, REFUSED, RESUMED, SURVIVED, kind_of

_ORDER = ("kill", "hang", "pause", "SIGTERM", "SIGHUP", "full disk", "damage", "intrusion")
_COLUMNS = ("trials", "the run went on", "ended and resumed", "refused", *KINDS, "other problem")
_HEAD = f"| what | whom | {' | '.join(_COLUMNS)} |"


def render(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row per kind and victim, and a sum."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["kind"], line["victim"]), []).append(line)
    texts = [_HEAD, "|---|---|" + "---:|" * len(_COLUMNS)]
    for kind, victim in sorted(rows, key=lambda row: (_ORDER.index(row[0]) if row[0] in _ORDER else 9, row[1])):
        texts.append(_row(kind, victim, rows[kind, victim]))
    texts.append(_row("all", "", [line for group in rows.values() for line in group]))
    return "\n".join(texts)


def _row(kind_name: str, victim: str, lines: list[dict[str, Any]]) -> str:
    counts = [sum(line["outcome"] == outcome for line in lines) for outcome in (SURVIVED, RESUMED, REFUSED)]
    for kind in (*KINDS, "other"):
        having = [line for line in lines if kind in map(kind_of, line["problems"])]
        having += [line for line in lines if kind == LOSS and line["outcome"] == LOST and line not in having]
        counts.append(len(having))
    return f"| {kind_name} | {victim} | {' | '.join(map(str, [len(lines), *counts]))} |"
