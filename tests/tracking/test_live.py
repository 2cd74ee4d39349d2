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
from trinity_sync.tracking.events import Event
from trinity_sync.tracking.live import LiveView, knows_unicode, sparkline
from trinity_sync.tracking.run_state import RunState


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
    state = RunState(total, began=clock())
    return LiveView("line", state, Console(file=file, width=80), clock=clock, **other), clock, file


def panel_text(view: LiveView, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(view.render())
    file.seek(0)
    return file.read()


def ascii_console() -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)


event = synthetic.event


def phase(what: str) -> Event:
    return event("phase", what=what)


def fed(view: LiveView, clock: Clock, last: int = 10, **more: Any) -> None:
    for step in range(1, last + 1):
        clock.pass_(2)
        view.take(event("publish", **synthetic.publish(step)))
        view.take(event("load", **synthetic.load(step)))
        view.take(event("load", **synthetic.load(step - 1, "explorer-1")))
        view.take({"step": step, "reward/mean": step / 10, "loss": 0.5, "staleness/mean": 0.25, **more})


def terminal(height: int = 25, **environ: str) -> Console:
    """A terminal of 80 columns."""
    environ = {"TERM": "xterm", **environ}
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=height, _environ=environ)


def off_view(console: Console | None = None, total: int | None = 20) -> tuple[LiveView, Clock]:
    clock = Clock()
    state = RunState(total, title="run", began=clock())
    return LiveView("off", state, console or synthetic.quiet_console(), clock=clock), clock


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
    view.take(phase("starting\x1b[31m Ray\r\nnow"))
    fed(view, clock)
    view.take(event("fault", where="a\x07", error="b\nc\x1b[2J"))
    view.close()
    assert all(line.isprintable() for line in file.getvalue().splitlines())
    assert len(file.getvalue().splitlines()) == file.getvalue().count("\n")


def test_a_phase_is_a_line_with_the_time_it_began() -> None:
    view, clock, file = line_view()
    view.take(phase("starting Ray"))
    clock.pass_(3.25)
    view.take(phase("loading the trainer"))
    assert [line.strip("[ ") for line in file.getvalue().splitlines()] == [
        "0.0 s] starting Ray",
        "3.2 s] loading the trainer",
    ]


def test_quick_steps_are_shown_at_each_tenth_of_the_way() -> None:
    view, clock, file = line_view(total=100, interval_s=1e9)
    for step in range(1, 101):
        clock.pass_(0.1)
        view.take({"step": step})
    shown = [int(line.split("step ")[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert shown == [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_slow_steps_are_shown_once_per_interval() -> None:
    view, clock, file = line_view(total=100_000, interval_s=10)
    for step in range(1, 13):
        clock.pass_(4)
        view.take({"step": step})
    assert [line.split("step ")[1].split("/")[0] for line in file.getvalue().splitlines()] == ["1", "4", "7", "10"]


def test_a_line_says_step_reward_versions_and_the_time_left() -> None:
    view, clock, file = line_view(total=20)
    fed(view, clock)
    last = file.getvalue().splitlines()[-1]
    for words in ("step 10/20", "reward 1", "version 10 (explorers at 9-10)", "20.0 s left"):
        assert words in last


def test_a_line_says_throughput_queue_and_faults_where_there_are_any() -> None:
    view, clock, file = line_view(total=20)
    whole(view, clock)
    view.take({"step": 11, "batch/samples": 512.0, **synthetic.queued()})
    clock.pass_(1)
    view.take({"step": 20})
    last = file.getvalue().splitlines()[-1]
    for words in ("samples/s", "tokens/s", "saved 10", "1 fault"):
        assert words in last
    assert "64 samples ready" in file.getvalue()


def test_a_view_that_comes_late_begins_with_where_the_run_stands() -> None:
    view, clock, file = line_view(total=20)
    state = RunState(100, began=clock() - 60)
    for step in range(1, 31):
        state.take({"step": step, "time": clock() - 60 + step}, 0.0)
    state.take(event("fault", where="explorer-1", error="died", time=clock() - 30), 0.0)
    view.show(state, label="job 3: ")
    view.take({"step": 31})
    assert [line.partition("] ")[2] for line in file.getvalue().splitlines()] == [
        "job 3: 1 fault so far, the newest 30 s ago: explorer-1: died",
        "job 3: step 30/100, 1 fault, 1 min 10 s left",
    ]


def test_endless_faults_do_not_flood_the_lines() -> None:
    view, _, file = line_view()
    for index in range(1000):
        view.take(event("fault", where="explorer-0", error=str(index)))
    lines = file.getvalue().splitlines()
    assert len(lines) < 50
    assert "further ones are counted" in lines[-1]


def test_the_panel_shows_phases_until_the_first_step() -> None:
    view, clock = off_view()
    view.take(phase("starting Ray"))
    clock.pass_(2)
    view.take(phase("loading the trainer"))
    clock.pass_(0.5)
    text = panel_text(view)
    assert "  2.0 s  starting Ray\n" in text
    assert "  0.5 s  loading the trainer\n" in text


def whole(view: LiveView, clock: Clock, last: int = 10) -> None:
    """All that a run can show."""
    fed(view, clock, last, **{"batch/samples": 512.0, "batch/tokens": 1536.0, **synthetic.queued()})
    view.take(event("commit", **synthetic.commit(10)))
    clock.pass_(4)
    view.take(event("save", step=20))
    view.take(event("fault", where="explorer-1", error="died\nand came back"))
    clock.pass_(3)


FIGURES = (
    ("step", "10/20", "20.0 s left", "2 s each"),
    ("reward", "1", "mean of 10: 0.550", "loss 0.500"),
    ("rate", "256 samples/s", "768 tokens/s"),
    ("versions", "newest 10", "explorer-0 at 10", "explorer-1 at 9 (1 behind)", "staleness 0.250"),
    ("sync", "blocked 2.91 ms", "publish 153 ms", "load 210 ms", "61 MB moved"),
    ("save", "step 10, 7 s ago", "took 1.9 s", "3.7 GB", "writing step 20"),
    ("queue", "64 samples ready", "30 dropped", "explorers waited 200 ms", "2 explorers alive"),
    ("faults", "1, newest 3 s ago", "explorer-1: died and came back"),
)


def test_the_panel_shows_where_the_run_stands() -> None:
    view, clock = off_view()
    whole(view, clock)
    lines = [" ".join(line.split()) for line in panel_text(view, 200).splitlines()]
    assert lines == ["run", *(f"{row[0]} {' · '.join(row[1:])}" for row in drawn(lines)), "after 27.0 s"]


def drawn(lines: list[str]) -> list[tuple[str, ...]]:
    """`FIGURES`, with what stands between the first two of a row where something is drawn there."""
    found = []
    for label, first, *rest in FIGURES:
        line = next(line for line in lines if line.startswith(f"{label} "))
        drawing = [mark for mark in line.split() if set(mark) <= set("━─▁▂▃▄▅▆▇█")]
        found.append((label, " ".join([first, *drawing, *rest[:1]]), *rest[1:]) if drawing else (label, first, *rest))
    return found


@pytest.mark.parametrize("bordered", [False, True])
@pytest.mark.parametrize("width", [18, 30, 40, 60, 80, 100, 200])
def test_no_figure_is_cut_however_narrow_the_terminal(width: int, bordered: bool) -> None:
    view, clock = off_view(terminal() if bordered else None)
    whole(view, clock)
    text = panel_text(view, width)
    assert max(len(line) for line in text.splitlines()) <= min(width, 100)
    words = " ".join(text.replace("│", " ").split())
    for label, *figures in FIGURES:
        for figure in (label, *figures):
            assert figure in words, figure


def test_the_panel_leaves_room_for_the_sign_of_ctrl_c() -> None:
    view, clock = off_view(terminal())
    whole(view, clock)
    assert {len(line) for line in panel_text(view, 60).splitlines()} == {58}


def test_a_terminal_of_60_columns_has_each_figure_in_one_piece() -> None:
    view, clock = off_view(terminal())
    whole(view, clock)
    lines = panel_text(view, 60).splitlines()
    for figure in (figure for row in FIGURES for figure in row):
        assert any(figure in line for line in lines), figure


def test_bars_and_curves_are_drawn_where_there_is_room() -> None:
    view, clock = off_view()
    whole(view, clock)
    assert [any(mark in panel_text(view, width) for mark in "━▁") for width in (40, 60, 100)] == [False, True, True]


def test_a_low_terminal_keeps_what_matters_most_and_says_what_it_lacks() -> None:
    clock = Clock()
    view = LiveView("panel", RunState(20, title="run", began=clock()), terminal(height=9), clock=clock)
    try:
        whole(view, clock)
        text = panel_text(view, 60)
    finally:
        view.close()
    assert len(text.splitlines()) <= 9
    for words in ("10/20", "reward", "faults", "explorer-1: died and came back", "no room: sync"):
        assert words in text
    assert "moved" not in text


def test_a_long_fault_takes_some_lines_and_has_a_sign_where_it_is_cut() -> None:
    view, clock = off_view()
    fed(view, clock)
    view.take(event("fault", where="explorer-1", error=" ".join(map(str, range(1000)))))
    text = panel_text(view, 60)
    assert len(text.splitlines()) < 16
    assert "…\n" in text


def test_the_panel_says_that_a_run_went_on_by_itself() -> None:
    view, clock = off_view()
    for step in (2, 4):
        view.take(event("heal", died=f"rank {step} died", resumed_from=step, lost=3, total_s=9.5))
    fed(view, clock, last=5)
    text = panel_text(view, 100)
    for words in ("2 times", "went on after step 4", "3 steps done again", "9.5 s to the next step", "rank 4 died"):
        assert words in text


def test_a_line_says_that_a_run_went_on_by_itself() -> None:
    view, _, file = line_view()
    view.take(event("heal", died="rank 1 died", resumed_from=4, lost=1, total_s=9.5))
    assert "went on after step 4, 1 step done again, 9.5 s to the next step" in file.getvalue()


def test_a_run_that_stands_still_says_for_how_long() -> None:
    view, clock = off_view()
    fed(view, clock)
    clock.pass_(9)
    assert "no step for" not in panel_text(view)
    clock.pass_(60)
    assert "no step for 1 min 09 s" in panel_text(view)


def test_supervised_learning_shows_its_loss() -> None:
    view, clock = off_view()
    for step in range(1, 4):
        clock.pass_(1)
        view.take({"step": step, "loss": 0.5 / step})
    assert "loss  0.167" in " ".join(panel_text(view).split("\n")).replace("    ", "")
    assert "versions" not in panel_text(view)


def test_a_commit_ends_the_save_that_it_was_for() -> None:
    view, clock = off_view()
    fed(view, clock)
    view.take(event("save", step=10))
    view.take(event("commit", **synthetic.commit(10)))
    assert "writing" not in panel_text(view)


def test_many_explorers_are_counted_by_version() -> None:
    view, clock = off_view()
    fed(view, clock)
    for index in range(60):
        view.take(event("load", **synthetic.load(9 if index < 5 else 10, f"explorer-{index}")))
    assert "55 explorers at 10 · 5 explorers at 9 (1 behind)" in panel_text(view)


def test_explorers_at_many_versions_are_all_counted() -> None:
    view, clock = off_view()
    fed(view, clock)
    for index in range(10):
        view.take(event("load", **synthetic.load(index + 1, f"explorer-{index}")))
    text = panel_text(view, 200)
    assert "1 explorer at 8 (2 behind)" in text
    assert "7 older, down to 1 (9 behind)" in text


@pytest.mark.parametrize("width", [10, 25, 40, 80, 200])
def test_the_panel_keeps_to_its_width(width: int) -> None:
    view, clock = off_view(terminal())
    fed(view, clock)
    view.take(event("fault", where="x" * 90, error="y" * 900))
    view.take(event("load", **synthetic.load(9, "e" * 150)))
    assert max(len(line) for line in panel_text(view, width).splitlines()) <= min(width, 100)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    console = ascii_console()
    view, clock = off_view(console)
    view.take(phase("starting Ray"))
    view.take(phase("loading the trainer"))
    assert panel_text(view, encoding="ascii").isascii()
    fed(view, clock)
    text = panel_text(view, encoding="ascii")
    assert text.isascii()
    assert "################----------------" in text


@pytest.mark.parametrize(
    ("environ", "unicode"),
    [
        ({}, True),
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": ""}, True),
        ({"LANG": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),  # as Python sets it
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, True),
        ({"LANG": "C", "LC_ALL": "C.UTF-8"}, True),
        ({"LANG": "C.UTF-8", "LC_ALL": "POSIX"}, False),
    ],
)
def test_the_locale_tells_whether_a_terminal_knows_unicode(environ: dict[str, str], unicode: bool) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert knows_unicode(console, environ) is unicode


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_left_out_where_none_are_wanted(no_color: bool) -> None:
    console = terminal(**({"NO_COLOR": "1"} if no_color else {}))
    view, clock = off_view(console)
    whole(view, clock)
    console.print(view.render())
    written = console.file
    assert isinstance(written, io.StringIO)
    assert ("\x1b[33m" in written.getvalue()) is not no_color


def test_a_terminal_that_is_made_narrower_is_drawn_over_in_full() -> None:
    console = terminal()
    view = LiveView("panel", RunState(5, title="run"), console, clock=Clock())
    written = console.file
    assert isinstance(written, io.StringIO)

    def ups() -> int:
        before = written.tell()
        view.take(phase("again"))
        return written.getvalue()[before:].count("\x1b[1A")

    try:
        ups()
        usual = ups()
        console.width = 40  # each line of 80 columns now takes two
        narrowed = ups()
    finally:
        view.close()
    assert narrowed >= 2 * usual


def test_text_without_an_ascii_form_does_not_stop_the_lines() -> None:
    console = ascii_console()
    view = LiveView("line", RunState(2), console, clock=Clock())
    view.take(phase("é starts"))
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
    view = LiveView("line", RunState(5), Console(file=Broken()), clock=Clock())
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            view.take(phase("starting"))
            view.take({"step": step})
        view.close()
    assert [record.message for record in caplog.records] == [
        "the live view cannot be drawn, the run goes on without it: BrokenPipeError: [Errno 32] Broken pipe"
    ]


@pytest.mark.parametrize("mode", ["panel", "line", "off"])
def test_what_it_does_not_understand_is_swallowed(mode: Any) -> None:
    view = LiveView(mode, RunState(5), synthetic.quiet_console(), clock=Clock())
    view.take({})
    view.take({"step": "?"})
    view.take({})
    view.take(event("load"))
    view.take(event("publish", version=None, blocked_s="soon"))
    view.take({"step": 1, "reward/mean": "good", "staleness/mean": None})
    view.close()
    view.close()


def test_closing_a_panel_gives_the_terminal_back() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = LiveView("panel", RunState(5), console, clock=Clock())
    view.take(phase("starting Ray"))
    view.close()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_a_terminal_that_failed_for_a_moment_gets_its_panel_back() -> None:
    file = Flaky()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = LiveView("panel", RunState(5), console, clock=Clock())
    file.broken = True
    view.take(phase("starting Ray"))
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


def test_a_clock_that_is_set_back_does_not_silence_the_lines() -> None:
    view, clock, file = line_view(total=None)
    view.take({"step": 1, "loss": 0.5})
    clock.pass_(-86_400)
    view.take({"step": 2, "loss": 0.5})
    view.take({"step": 3, "loss": 0.5})
    assert [line.split("] ")[1].split(",")[0] for line in file.getvalue().splitlines()] == ["step 1", "step 2"]


def test_a_curve_of_a_long_run_is_drawn_from_some_of_its_values() -> None:
    class Values(list[float]):
        looked = 0

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            self.looked += len(found) if isinstance(place, slice) else 1
            return found

    values = Values(float(index) for index in range(100_000))
    assert sparkline(values, 8) == "▁▂▃▄▅▆▇█"
    assert values.looked <= 8 * 256
