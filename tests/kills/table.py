"""The table of a campaign, as docs/faults.md shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kills.plan import SIGNALLED
from tests.kills.trial import KINDS, LOSS, LOST, REFUSED, RESUMED, SURVIVED, kind_of

_COLUMNS = ("trials", "the run went on", "ended and resumed", "refused", *KINDS, "other problem")
_HEAD = f"| what | {' | '.join(_COLUMNS)} |"
_TITLES = {
    "kill": "SIGKILL of",
    "kill explorer": "SIGKILL of",
    "kill monitor": "SIGKILL of",
    "hang": "SIGSTOP until noticed:",
    "pause": "SIGSTOP and SIGCONT:",
    "SIGTERM": "SIGTERM to",
    "SIGTERM part": "SIGTERM to",
    "SIGHUP": "SIGHUP to",
    "SIGHUP part": "SIGHUP to",
    "full disk": "full disk",
    "damage": "damage:",
    "damage every checkpoint": "damage:",
    "damage checkpoint folder": "lost:",
    "intrusion": "use of a place of the run:",
}
"""Rows, in this order."""


def render(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row per kind of trial, and a sum."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault(_row_of(line["kind"], line["victim"]), []).append(line)
    texts = [_HEAD, "|---|" + "---:|" * len(_COLUMNS)]
    for name in sorted(rows, key=lambda name: list(_TITLES).index(name) if name in _TITLES else len(_TITLES)):
        victims = ", ".join(sorted({_plain(line["victim"]) for line in rows[name]}))
        texts.append(_row(f"{_TITLES.get(name, name)} {victims}".strip(), rows[name]))
    texts.append(_row("all", [line for group in rows.values() for line in group]))
    return "\n".join(texts)


def _row_of(kind: str, victim: str) -> str:
    if kind.startswith("SIG"):
        return f"{kind} part" if _plain(victim) in SIGNALLED else kind
    return f"{kind} {victim}" if f"{kind} {victim}" in _TITLES else kind


def _plain(victim: str) -> str:
    """Without what is said besides, as in ``driver, twice``."""
    return victim.partition(",")[0]


def _row(title: str, lines: list[dict[str, Any]]) -> str:
    counts = [sum(line["outcome"] == outcome for line in lines) for outcome in (SURVIVED, RESUMED, REFUSED)]
    for kind in (*KINDS, "other"):
        having = [line for line in lines if kind in map(kind_of, line["problems"])]
        having += [line for line in lines if kind == LOSS and line["outcome"] == LOST and line not in having]
        counts.append(len(having))
    return f"| {title} | {' | '.join(map(str, [len(lines), *counts]))} |"
