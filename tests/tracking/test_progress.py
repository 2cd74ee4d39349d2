"""The bar of long commands: on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trinity_sync.tracking.units import progress_bar


def test_a_terminal_sees_how_far_it_is() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with progress_bar("verifying", console=console) as progress:
        progress(250_000_000, 1_000_000_000)
    assert "verifying" in screen.getvalue()
    assert "250 MB of 1 GB" in screen.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    with progress_bar("verifying", shown=shown) as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_that_cannot_move_its_cursor_is_left_alone() -> None:
    screen = io.StringIO()
    with progress_bar(
        "verifying", console=Console(file=screen, force_terminal=True, _environ={"TERM": "dumb"})
    ) as progress:
        progress(1, 2)
    assert screen.getvalue() == ""
