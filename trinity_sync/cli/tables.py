"""Prints the output of commands: one JSON document, or tables and lines, coloured on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trinity_sync.host.terminal import printable

NO_COLOURS: Mapping[str, str] = MappingProxyType({})


def print_json(value: object) -> int:
    """Print one JSON document; return the exit code 0."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
    return 0


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    column: int = -1,
    colours: Mapping[str, str] = NO_COLOURS,
) -> None:
    """Print columns as wide as their longest cell; nothing if there are no rows."""
    if not rows:
        return
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    if not sys.stdout.isatty():
        for line in lines:
            print("  ".join(line).rstrip())
        return
    from rich.text import Text

    from trinity_sync.tracking.console import PlainConsole

    console = PlainConsole()
    for number, line in enumerate(lines):
        styles = ["bold" if number == 0 else ""] * len(line)
        if number:
            styles[column] = colour(line[column], colours)
        text = Text("  ").join(Text(cell, style=style) for cell, style in zip(line, styles, strict=True))
        text.rstrip()
        console.print(text, soft_wrap=True)


def print_line(text: str, style: str) -> None:
    """Print a line, coloured on a terminal."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.text import Text

    from trinity_sync.tracking.console import PlainConsole

    PlainConsole().print(Text(text, style=style), soft_wrap=True)


def colour(cell: str, colours: Mapping[str, str]) -> str:
    """Return the colour of a cell; "" for none."""
    return next((style for word, style in colours.items() if word in cell), "")
