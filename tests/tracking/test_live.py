from __future__ import annotations

import io
import logging
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.tracking import synthetic
from tests.tracking.synthetic import Clock
from trinity_sync.tracking.live import LiveView, sparkline


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class Flaky(io.StringIO):
    broken = False

    def write(self, text: str) -> int:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().write(text)


def line_view(total: int | None = 20, **other: Any) -> tuple[LiveView, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    return LiveView("line", total, Console(file=file, width=80), clock=clock, **other), clock, file


def panel_text(view: LiveView, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(view.render())
    file.seek(0)
    return file.read()


def ascii_console() -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields}


def fed(view: LiveView, clock: Clock, last: int = 10) -> None:
    for step in range(1, last + 1):
        clock.pass_(2)
        view.event(event("publish", **synthetic.publish(step)))
        view.event(event("load", **synthetic.load(step)))
        view.event(event("load", **synthetic.load(step - 1, "explorer-1")))
        view.step({"step": step, "reward/mean": step / 10, "loss": 0.5, "staleness/mean": 0.25})


def off_view(console: Console | None = None, total: int | None = 20) -> tuple[LiveView, Clock]:
    clock = Clock()
    return LiveView("off", total, console or synthetic.quiet_console(), title="run", clock=clock), clock


def test_auto_is_a_panel_on_a_terminal_and_lines_elsewhere() -> None:
    assert LiveView("auto", console=Console(file=io.StringIO())).mode == "line"
    view = LiveView("auto", console=Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}))
    view.close()
    assert view.mode == "panel"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, panel, line or off"):
        LiveView("loud")  # type: ignore[arg-type]


def test_lines_carry_no_control_characters_even_where_the_text_does() -> None:
    view, clock, file = line_view()
    view.phase("starting\x1b[31m Ray\r\nnow")
    fed(view, clock)
    view.event(event("fault", where="a\x07", error="b\nc\x1b[2J"))
    view.close()
    assert all(line.isprintable() for line in file.getvalue().splitlines())
    assert len(file.getvalue().splitlines()) == file.getvalue().count("\n")


def test_a_phase_is_a_line_with_the_time_it_began() -> None:
    view, clock, file = line_view()
    view.phase("starting Ray")
    clock.pass_(3.25)
    view.phase("loading the trainer")
    assert [line.strip("[ ") for line in file.getvalue().splitlines()] == [
        "0.0 s] starting Ray",
        "3.2 s] loading the trainer",
    ]


def test_quick_steps_are_shown_at_each_tenth_of_the_way() -> None:
    view, clock, file = line_view(total=100, interval_s=1e9)
    for step in range(1, 101):
        clock.pass_(0.1)
        view.step({"step": step})
    shown = [int(line.split("step ")[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert shown == [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_slow_steps_are_shown_once_per_interval() -> None:
    view, clock, file = line_view(total=100_000, interval_s=10)
    for step in range(1, 13):
        clock.pass_(4)
        view.step({"step": step})
    assert [line.split("step ")[1].split("/")[0] for line in file.getvalue().splitlines()] == ["1", "4", "7", "10"]


def test_a_line_says_step_reward_versions_and_the_time_left() -> None:
    view, clock, file = line_view(total=20)
    fed(view, clock, last=10)
    last = file.getvalue().splitlines()[-1]
    for words in ("step 10/20", "reward 1", "version 10 (explorers at 9-10)", "20.0 s left"):
        assert words in last


def test_endless_faults_do_not_flood_the_lines() -> None:
    view, _, file = line_view()
    for index in range(1000):
        view.event(event("fault", where="explorer-0", error=str(index)))
    assert len(file.getvalue().splitlines()) < 50


def test_the_panel_shows_phases_until_the_first_step() -> None:
    view, clock = off_view()
    view.phase("starting Ray")
    clock.pass_(2)
    view.phase("loading the trainer")
    clock.pass_(0.5)
    text = panel_text(view)
    assert "starting Ray         2.0 s" in text
    assert "loading the trainer  0.5 s" in text


def test_the_panel_shows_where_the_run_stands() -> None:
    view, clock = off_view()
    fed(view, clock)
    view.event(event("commit", **synthetic.commit(10)))
    clock.pass_(4)
    view.saving(20)
    view.event(event("fault", where="explorer-1", error="died\nand came back"))
    text = panel_text(view)
    for words in (
        "10/20",
        "20.0 s left",
        "mean of 10: 0.550",
        "newest 10 · explorer-0 10 · explorer-1 9 · staleness 0.250",
        "step 10, 4 s ago, took 1.9 s · 3.7 GB · writing step 20",
        "1, last in explorer-1: died and came back",
        "▁",
    ):
        assert words in text


def test_a_commit_ends_the_save_that_it_was_for() -> None:
    view, clock = off_view()
    fed(view, clock)
    view.saving(10)
    view.event(event("commit", **synthetic.commit(10)))
    assert "writing" not in panel_text(view)


def test_many_explorers_are_counted_by_version() -> None:
    view, clock = off_view()
    fed(view, clock)
    for index in range(60):
        view.event(event("load", **synthetic.load(9 if index < 5 else 10, f"explorer-{index}")))
    assert "55 explorers at 10 · 5 explorers at 9" in panel_text(view)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_keeps_to_its_width(width: int) -> None:
    view, clock = off_view(Console(file=io.StringIO(), width=width))
    fed(view, clock)
    view.event(event("fault", where="x" * 90, error="y" * 900))
    assert max(len(line) for line in panel_text(view, width).splitlines()) <= min(width, 100)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    console = ascii_console()
    view, clock = off_view(console)
    view.phase("starting Ray")
    view.phase("loading the trainer")
    assert panel_text(view, encoding="ascii").isascii()
    fed(view, clock)
    text = panel_text(view, encoding="ascii")
    assert text.isascii()
    assert "############------------" in text


def test_text_without_an_ascii_form_does_not_stop_the_lines() -> None:
    console = ascii_console()
    view = LiveView("line", 2, console, clock=Clock())
    view.phase("é starts")
    console.file.seek(0)
    assert console.file.read().endswith("? starts\n")


def test_an_open_run_has_a_panel_and_lines() -> None:
    view, clock = off_view(total=None)
    fed(view, clock)
    assert "10" in panel_text(view)
    lines, clock, file = line_view(total=None)
    fed(lines, clock)
    assert "step 1," in file.getvalue()


def test_an_output_that_breaks_is_logged_once_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    view = LiveView("line", 5, Console(file=Broken()), clock=Clock())
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            view.phase("starting")
            view.step({"step": step})
        view.close()
    assert [record.message for record in caplog.records] == [
        "the live view cannot be drawn, the run goes on without it: BrokenPipeError: [Errno 32] Broken pipe"
    ]


@pytest.mark.parametrize("mode", ["panel", "line", "off"])
def test_what_it_does_not_understand_is_swallowed(mode: Any) -> None:
    view = LiveView(mode, 5, synthetic.quiet_console(), clock=Clock())
    view.step({})
    view.step({"step": "?"})
    view.event({})
    view.event({"event": "load"})
    view.event({"event": "publish", "version": None, "blocked_s": "soon"})
    view.step({"step": 1, "reward/mean": "good", "staleness/mean": None})
    view.close()
    view.close()


def test_closing_a_panel_gives_the_terminal_back() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = LiveView("panel", 5, console, clock=Clock())
    view.phase("starting Ray")
    view.close()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_a_terminal_that_failed_for_a_moment_gets_its_panel_back() -> None:
    file = Flaky()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = LiveView("panel", 5, console, clock=Clock())
    file.broken = True
    view.phase("starting Ray")
    time.sleep(0.6)  # longer than the panel is left as it is
    file.broken = False
    deadline = time.monotonic() + 20
    while "starting Ray" not in file.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = file.getvalue()
    view.close()
    assert "starting Ray" in shown


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 40))
def test_a_sparkline_fits_its_width_and_shows_lowest_and_highest(values: list[float], width: int) -> None:
    text = sparkline(values, width)
    assert len(text) == min(width, len(values))
    if len(set(values)) > 1 and len(values) <= width:
        assert text[values.index(min(values))] == "▁"
        assert text[values.index(max(values))] == "█"
