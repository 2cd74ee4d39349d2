"""A bar for commands that take long. Shown on a terminal only, on standard error, and gone when the work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trinity_sync.tracking import units

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[int, int], None]
"""Takes (done, in all)."""


@contextmanager
def progress_bar(
    text: str, *, shown: bool = True, in_bytes: bool = True, console: Console | None = None
) -> Iterator[Progress]:
    """Show how far some work is::

        with progress_bar("verifying") as progress:
            progress(done, total)

    Args:
        text: what is being done.
        shown: False: nothing is shown.
        in_bytes: whether the numbers are bytes.
        console: where to show; standard error by default.
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
            amount = f"{units.size(done)} of {units.size(total)}" if in_bytes else f"{done} of {total}"
            bar.update(task, completed=done, total=total, amount=amount)

        yield update
