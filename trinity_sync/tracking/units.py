"""Formats durations, sizes and numbers for people. Used by the live view, the summary and the report."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def finite(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def seconds(value: float | None, none: str = "-") -> str:
    """Format seconds: three figures up to a minute (``850 us``, ``34 s``), then ``4 min 12 s`` and ``2 h 05 min``."""
    if value is None or not math.isfinite(value):
        return none
    if value < 0:
        return "-" + seconds(-value)
    if value >= 3599.5:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if value >= 59.5:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale * 0.9995 or unit == "us":
            return f"{_figures(value / scale)} {unit}" if value else "0 s"
    raise AssertionError("unreachable: the smallest unit takes every value")


def elapsed(value: float) -> str:
    """Format seconds that a person waits: tenths up to a minute (``2.8 s``), then as `seconds`."""
    return f"{max(value, 0.0):.1f} s" if value < 59.95 else seconds(value)


def size(value: float | None, none: str = "-") -> str:
    """Format bytes in decimal units: ``980 B``, ``1.24 MB``, ``16.4 GB``."""
    if value is None or not math.isfinite(value):
        return none
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5:
            return f"{int(amount)} B" if unit == "B" else f"{_figures(amount)} {unit}"
        amount /= 1000
    return f"{_figures(amount)} PB"


def number(value: float | None, none: str = "-") -> str:
    """Format a metric: three decimals around one, scientific for very small and large values."""
    if value is None or not math.isfinite(value):
        return none
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3f}" if 0.01 <= abs(value) < 1e5 else f"{value:.2e}"


def rate(value: float | None, none: str = "-") -> str:
    """Format a number per second with three figures, ``0.85``, ``51.6``, ``1240``."""
    if value is None or not math.isfinite(value):
        return none
    return _figures(value) if abs(value) < 999.5 else f"{value:.0f}"


def moment(value: float | None) -> str:
    """Format Unix seconds as local date and time, ``2026-01-31 14:05:09 +0100``."""
    try:
        return "-" if value is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(value))
    except (ValueError, OverflowError, OSError):  # a hostile file may hold any number
        return "?"


def plural(count: int, noun: str) -> str:
    """Count a noun: ``1 version``, ``2 versions``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _figures(value: float) -> str:
    return f"{value:.3g}"


# Progress of commands, on a terminal only.


Progress = Callable[[int, int], None]
"""Takes (done, total)."""


@contextmanager
def progress_bar(
    text: str, *, shown: bool = True, in_bytes: bool = True, console: Console | None = None
) -> Iterator[Progress]:
    """Show the progress of some work on a terminal::

    with progress_bar("verifying") as progress:
        progress(done, total)
    """
    if not shown or (console is None and not sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from trinity_sync.tracking.console import PlainConsole

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[amount]}")
    target = console or PlainConsole(stderr=True)
    if target.is_dumb_terminal:
        yield lambda done, total: None
        return
    with Progress(*columns, TimeRemainingColumn(), console=target, transient=True) as bar:
        task = bar.add_task(text, total=None, amount="")

        def update(done: int, total: int) -> None:
            amount = f"{size(done)} of {size(total)}" if in_bytes else f"{done} of {total}"
            bar.update(task, completed=done, total=total, amount=amount)

        yield update
