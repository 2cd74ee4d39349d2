"""The live view of a run: a panel on a terminal, single lines elsewhere.

The recorder and `trinity-sync watch` feed it. Its errors are logged once and never end the run.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Concatenate, Literal, ParamSpec

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType, Segment
from rich.text import Text

from trinity_sync.tracking import units
from trinity_sync.tracking.console import PlainConsole
from trinity_sync.tracking.events import FaultEvent, HealEvent, LogLine, PhaseEvent
from trinity_sync.tracking.run_end import healed_text
from trinity_sync.tracking.run_state import RunState

logger = logging.getLogger(__name__)

Mode = Literal["auto", "panel", "line", "off"]

_SHOWN_FAULTS = 20
_ASCII_LOCALES = ("C", "POSIX")

P = ParamSpec("P")


def _never_raises(method: Callable[Concatenate[LiveView, P], None]) -> Callable[Concatenate[LiveView, P], None]:
    @functools.wraps(method)
    def guarded(self: LiveView, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._broken(error)

    return guarded


class LiveView:
    """Shows a run: phases, steps and events. Any thread may call; nothing is raised.

    Args:
        mode: ``panel`` (redrawn), ``line`` (plain lines), ``off``, or ``auto``: panel on a terminal, line elsewhere.
        state: the run's state; from now on only this view feeds it.
        console: the output; standard output by default.
        clock: returns Unix seconds.
        interval_s: in line mode, seconds between lines of steps (each tenth of the steps has one too).

    Attributes:
        failure: the error of the last drawing; None: it worked.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        state: RunState | None = None,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.time,
        interval_s: float = 15.0,
    ) -> None:
        if mode not in ("auto", "panel", "line", "off"):
            raise ValueError(f"a live view is auto, panel, line or off, not {mode!r}")
        self.console = console or PlainConsole()
        animated = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode = mode if mode != "auto" else "panel" if animated else "line"
        self.failure: Exception | None = None
        self._clock, self._interval = clock, interval_s
        self._unicode = knows_unicode(self.console, os.environ)
        self._lock = threading.RLock()
        self._warned = False
        self._live: Live | None = None
        self._above: Callable[[], RenderableType] | None = None
        self._take_over(state or RunState(began=clock()), "")
        self._shown = True
        if self.mode == "panel":
            self._open_panel()

    @_never_raises
    def show(
        self, state: RunState | None, *, label: str = "", above: Callable[[], RenderableType] | None = None
    ) -> None:
        """Switch to another run; line mode prints its state at once."""
        with self._lock:
            self._above, self._shown = above, state is not None
            state = state or RunState(began=self._state.began)
            self._take_over(state, label)
            if state.fault is not None:
                ago = units.seconds(max(0.0, round(self._clock() - state.fault.at)))
                self._say(f"{units.plural(state.faults, 'fault')} so far, the newest {ago} ago: {state.fault}")
            if state.stepped is not None:
                self._say_step(self._clock())
            elif state.phases:
                self._say(state.phases[-1][0])
        self._repaint()

    @_never_raises
    def take(self, line: LogLine) -> None:
        """Take an event or a line of metrics.jsonl."""
        with self._lock:
            now = self._clock()
            step = self._state.stepped
            self._state.take(line, now)
            match line:
                case PhaseEvent():
                    self._say(line.what)
                case FaultEvent():
                    self._say_fault()
                case HealEvent():
                    self._say(healed_text(line))
                case Mapping() if self._state.stepped != step and self.mode == "line" and self._is_time_to_speak(now):
                    self._say_step(now)
        self._repaint()

    @_never_raises
    def say(self, text: str) -> None:
        """Print one line in line mode only, about other runs than the shown one."""
        with self._lock:
            self._print(text)

    @_never_raises
    def close(self) -> None:
        """Take the panel away and give the terminal back; closing twice is fine."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def render(self) -> RenderableType:
        """Render the panel as it stands now."""
        with self._lock:
            above = [] if self._above is None else [self._above()]
            height = self.console.height if self.mode == "panel" else None
            if height is not None and above:
                height = max(1, height - len(self.console.render_lines(above[0])))
            if not self._shown:
                return Group(*above)
            bordered = self.console.is_terminal
            panel = RunPanel(self._state, self._clock(), unicode=self._unicode, bordered=bordered, height=height)
            return Group(*above, panel) if above else panel

    # Plain lines.

    def _take_over(self, state: RunState, label: str) -> None:
        self._state, self._label = state, label
        self._spoken = -math.inf
        self._spoken_tenth = 0

    def _is_time_to_speak(self, now: float) -> bool:
        tenth = self._tenth()
        # a clock that was set back must not delay the next line
        return not 0 <= now - self._spoken < self._interval or tenth > self._spoken_tenth

    def _tenth(self) -> int:
        total = self._state.total_steps
        return 10 * self._state.step // total if total else 0

    def _say_step(self, now: float) -> None:
        self._spoken, self._spoken_tenth = now, self._tenth()
        self._say(step_line(self._state))

    def _say_fault(self) -> None:
        state = self._state
        if state.fault is None or state.faults > _SHOWN_FAULTS:
            return
        self._say(f"fault: {state.fault}")
        if state.faults == _SHOWN_FAULTS:
            self._say(f"{_SHOWN_FAULTS} faults so far; further ones are counted here and listed in events.jsonl")

    def _say(self, text: str) -> None:
        self._print(f"{self._label}{text}")

    def _print(self, text: str) -> None:
        if self.mode != "line":
            return
        line = f"[{units.elapsed(self._clock() - self._state.began):>11}] {one_line(text, limit=500)}"
        if not self._unicode:
            line = line.encode("ascii", "replace").decode()
        # Written to the file itself: rich would wrap the line at the width of a missing terminal.
        self.console.file.write(line + "\n")
        self.console.file.flush()
        self.failure = None

    # The panel.

    @_never_raises
    def _open_panel(self) -> None:
        self._live = _Display(self)
        self._live.start()

    @_never_raises
    def _repaint(self) -> None:
        live = self._live
        if live is not None:
            live.refresh()

    def _broken(self, error: Exception) -> None:
        self.failure = error
        if not self._warned:
            self._warned = True
            logger.warning(
                "the live view cannot be drawn, the run goes on without it: %s: %s", type(error).__name__, error
            )


class _Display(Live):
    """The panel on the terminal, redrawn by a thread of rich; a broken output does not end that thread."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._drawn: list[int] = []  # columns of each line on the terminal
        super().__init__(get_renderable=self._noted, console=view.console, transient=True)

    def refresh(self) -> None:
        try:
            super().refresh()
            self._view.failure = None
        except Exception as error:
            self._view._broken(error)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Move further up on a terminal that became narrower: it has broken the lines of the panel."""
        width = max(1, self.console.width)
        more = sum(max(0, -(-drawn // width) - 1) for drawn in self._drawn)
        up: tuple[tuple[ControlType, int], ...] = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        return [Control(*up * more), *super().process_renderables(renderables)]

    def _noted(self) -> RenderableType:
        return _WidthRecorder(self._view.render(), self._drawn)


class _WidthRecorder:
    """A drawing that notes the widths of its lines."""

    def __init__(self, drawing: RenderableType, widths: list[int]) -> None:
        self._drawing, self._widths = drawing, widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._drawing, options, pad=False)
        self._widths[:] = [Segment.get_line_length(line) for line in lines]
        for line in lines:
            yield from line
            yield Segment.line()


def step_line(state: RunState) -> str:
    """Describe the state of a run after a step in one line."""
    parts = [f"step {state.step}" + (f"/{state.total_steps}" if state.total_steps is not None else "")]
    if state.rewards:
        parts.append(f"reward {units.number(state.rewards[-1])}")
    loss = units.finite(state.metrics.get("loss"))
    parts += [f"loss {units.number(loss)}"] if loss is not None else []
    parts += rate_cells(state)
    if state.published is not None:
        versions = sorted(set(state.held.values()))
        spread = str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}" if versions else ""
        parts.append(f"version {state.published.version}" + (f" (explorers at {spread})" if spread else ""))
        parts.append(f"blocked {units.seconds(state.published.blocked_s)}")
    ready = units.finite(state.metrics.get("samples/ready"))
    parts += [f"{ready:.0f} samples ready"] if ready is not None else []
    parts += [f"saved {state.committed.step}"] if state.committed else []
    parts += [units.plural(state.faults, "fault")] if state.faults else []
    parts += [f"{units.elapsed(state.left_s)} left"] if state.left_s else []
    return ", ".join(parts)


def knows_unicode(console: Console, environ: Mapping[str, str]) -> bool:
    """Return whether a terminal shows more than ASCII, by its encoding and by the user's locale.

    In the locale C, Python encodes as UTF-8 nevertheless, and sets LC_CTYPE for that.
    """
    if not (console.encoding or "").lower().startswith("utf"):
        return False
    if environ.get("LC_ALL"):
        return environ["LC_ALL"] not in _ASCII_LOCALES
    by_python = environ.get("LC_CTYPE", "") in ("", "C.UTF-8", "C.utf8", "UTF-8", *_ASCII_LOCALES)
    return not (by_python and environ.get("LANG") in _ASCII_LOCALES)


# The panel: a `RunState` laid out for a terminal of any width and height.


_WIDEST = 100
_BORDERED_FROM = 50  # columns
_ECHO = 2  # columns for the ^C that a terminal writes after the panel: it must not begin a line
_NARROWEST = 12
_NAMED_EXPLORERS = 4
_SHOWN_VERSIONS = 3
_FAULT_LINES = 3
_SAMPLED = 256  # values of a run behind one character of a curve
_DRAWN = (32, 24, 16, 8)
_LEAST_FIRST = ("now", "sync", "queue", "save", "rate", "reward", "versions", "healed", "faults")
"""The order in which a low terminal drops rows."""

UNICODE_RAMP = "▁▂▃▄▅▆▇█"
ASCII_RAMP = "_.-~=+*#"

Drawing = Callable[[int], Text]
"""Draws in a number of columns."""


@dataclass(frozen=True, kw_only=True)
class LiveRow:
    """A row of the panel: a label and cells; lines break between cells. `drawing`: drawn after the first cell where
    there is room. `most`: the largest number of lines; None: no limit.
    """

    label: str
    cells: Sequence[str]
    drawing: Drawing | None = None
    style: str = ""
    most: int | None = None


class RunPanel:
    """A run as rich prints it; a copy of the state at this time. `height` in lines, None: no limit."""

    def __init__(
        self, state: RunState, now: float, *, unicode: bool = True, bordered: bool = True, height: int | None = None
    ) -> None:
        self._marks = ("·", "…") if unicode else ("|", "...")
        self._box = box.ROUNDED if unicode else box.ASCII
        self._bordered, self._height = bordered, height
        self._title, self._subtitle = one_line(state.title) or "trinity-sync", one_line(state.subtitle)
        self._elapsed = units.elapsed(now - state.began)
        rows = _step_rows if state.stepped is not None else _phase_rows
        self._rows = list(rows(state, now, unicode))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bordered = self._bordered and options.max_width >= _BORDERED_FROM
        width = min(options.max_width - _ECHO if bordered else options.max_width, _WIDEST)
        rows = list(self._rows)
        lines = self._lines(rows, width, bordered)
        if bordered and self._too_high(lines, bordered):
            bordered, width = False, min(options.max_width, _WIDEST)
            lines = self._lines(rows, width, bordered)
        dropped: list[str] = []
        while self._too_high(lines, bordered) and len(rows) > 1:
            found = [row for label in _LEAST_FIRST for row in rows if row.label == label]
            rows.remove(found[0] if found else rows[0])
            dropped.append(found[0].label if found else "")
            lines = self._lines(rows, width, bordered)
        if any(dropped):
            lines[-1] = Text(f"no room: {', '.join(filter(None, dropped))}", style="dim")
        if not bordered:
            for line in lines:
                line.truncate(width)
                yield line
            return
        yield Panel(
            Text("\n").join(lines),
            title=self._head(),
            title_align="left",
            subtitle=Text(self._elapsed),
            subtitle_align="right",
            border_style="dim",
            box=self._box,
            width=width,
        )

    def _too_high(self, lines: Sequence[Text], bordered: bool) -> bool:
        return self._height is not None and len(lines) + 2 * bordered > self._height

    def _head(self) -> Text:
        head = Text(self._title, style="bold")
        if self._subtitle:
            head.append(f" {self._marks[0]} {self._subtitle}", style="not bold")
        return head

    def _lines(self, rows: Sequence[LiveRow], width: int, bordered: bool) -> list[Text]:
        """Lay all rows out, without a border together with the border's texts."""
        room = width - 4 if bordered else width
        lines = [] if bordered else self._fold(self._head(), room)
        if bordered and cell_len(self._head().plain) > width - 6:
            lines += self._fold(self._head(), room)
        indent = max(cell_len(row.label) for row in rows) + 2
        for row in rows:
            lines += self._row(row, indent, room)
        return lines if bordered else [*lines, Text(f"after {self._elapsed}", style="dim")]

    def _row(self, row: LiveRow, indent: int, width: int) -> list[Text]:
        two_columns = width - indent >= _NARROWEST
        room = width - indent if two_columns else width
        lines = self._flow(row.cells, room)
        if row.most is not None and len(lines) > row.most:
            lines = lines[: row.most]
            mark = self._marks[1]
            lines[-1] = f"{lines[-1][: room - len(mark)]}{mark}"
        texts = [Text(line, style=row.style) for line in lines]
        if not two_columns:
            return [Text(row.label, style="bold"), *texts]
        if len(lines) == 1:
            texts = [self._drawn(row, room) or texts[0]]
        labels = [row.label, *[""] * (len(texts) - 1)]
        return [Text.assemble((f"{label:<{indent}}", "bold"), text) for label, text in zip(labels, texts, strict=True)]

    def _drawn(self, row: LiveRow, room: int) -> Text | None:
        """Return the line of a row with its drawing; None where there is no room for that."""
        first, rest = row.cells[0], f" {self._marks[0]} ".join(row.cells[1:])
        left = room - cell_len(first) - cell_len(rest) - 4
        size = next((size for size in _DRAWN if size <= left), None)
        if size is None or row.drawing is None:
            return None
        return Text.assemble((f"{first}  ", row.style), row.drawing(size), (f"  {rest}", row.style))

    def _flow(self, cells: Sequence[str], room: int) -> list[str]:
        """Fill lines with cells, and break cells that are longer than a line."""
        lines: list[str] = []
        for cell in cells:
            for index, piece in enumerate(_wrapped(cell, room)):
                joined = f"{lines[-1]} {self._marks[0]} {piece}" if lines and not index else None
                if joined is not None and cell_len(joined) <= room:
                    lines[-1] = joined
                else:
                    lines.append(piece)
        return lines

    def _fold(self, text: Text, room: int) -> list[Text]:
        return [Text(line, style="bold") for line in _wrapped(text.plain, room)]


def _wrapped(text: str, room: int) -> list[str]:
    """Break a text into lines; characters may take two columns each."""
    if cell_len(text) <= room:
        return [text]
    wide = cell_len(text) > len(text)
    return textwrap.wrap(text, max(1, room // 2 if wide else room), break_on_hyphens=False)


def _phase_rows(state: RunState, now: float, unicode: bool) -> Iterator[LiveRow]:
    done, doing = ("✓", "…") if unicode else ("+", ".")
    for index, (what, begin) in enumerate(state.phases):
        last = index == len(state.phases) - 1
        end = now if last else state.phases[index + 1][1]
        took = f"{units.elapsed(end - begin):>7}"
        yield LiveRow(
            label=doing if last else done, cells=[f"{took}  {one_line(what)}"], style="bold" if last else "dim"
        )
    if not state.phases:
        yield LiveRow(label="now", cells=["starting"])
    if state.fault is not None:
        yield _faults(state, now)


def _step_rows(state: RunState, now: float, unicode: bool) -> Iterator[LiveRow]:
    yield _step(state, now, unicode)
    ramp = UNICODE_RAMP if unicode else ASCII_RAMP
    if state.rewards:
        recent = state.rewards[-10:]
        cells = [
            units.number(state.rewards[-1]),
            f"mean of {len(recent)}: {units.number(sum(recent) / len(recent))}",
            *([f"loss {units.number(state.losses[-1])}"] if state.losses else []),
        ]
        yield LiveRow(label="reward", cells=cells, drawing=_curve(state.rewards, ramp))
    elif state.losses:
        yield LiveRow(label="loss", cells=[units.number(state.losses[-1])], drawing=_curve(state.losses, ramp))
    rates = rate_cells(state)
    if rates:
        yield LiveRow(label="rate", cells=rates)
    if state.rewards or state.published is not None:  # a supervised run publishes none
        yield LiveRow(label="versions", cells=list(_versions(state)))
        yield LiveRow(label="sync", cells=list(_sync(state)) or ["nothing yet"])
    yield LiveRow(label="save", cells=list(_save(state, now)) or ["nothing yet"])
    queue = list(_queue(state))
    if queue:
        yield LiveRow(label="queue", cells=queue)
    if state.fault is not None:
        yield _faults(state, now)
    if state.healed is not None:
        cells = [units.plural(state.heals, "time"), *healed_text(state.healed).split(", "), one_line(state.healed.died)]
        yield LiveRow(label="healed", cells=cells, most=1 + _FAULT_LINES)
    if state.busy is not None:
        yield LiveRow(label="now", cells=[one_line(state.busy)])


def _step(state: RunState, now: float, unicode: bool) -> LiveRow:
    cells = [str(state.step)]
    drawing: Drawing | None = None
    if state.total_steps is not None:
        cells = [f"{state.step}/{state.total_steps}"]
        share = min(1.0, state.step / max(state.total_steps, 1))
        full, rest = ("━", "─") if unicode else ("#", "-")

        def drawing(size: int) -> Text:
            done = int(size * share)
            return Text.assemble((full * done, "cyan"), (rest * (size - done), "dim"))

    if state.left_s is not None:
        cells.append(f"{units.elapsed(state.left_s)} left")
    if state.pace_s is not None:
        cells.append(f"{units.seconds(state.pace_s)} each")
    stalled = state.stalled_s(now)
    if stalled is not None:
        cells.append(f"no step for {units.elapsed(stalled)}")
    return LiveRow(label="step", cells=cells, drawing=drawing)


def _versions(state: RunState) -> Iterator[str]:
    newest = state.newest
    yield f"newest {newest}" if newest is not None else "none published"
    if len(state.held) <= _NAMED_EXPLORERS:
        for name, version in sorted(state.held.items()):
            yield f"{one_line(name)} at {version}{_lag(state, version)}"
    else:
        counts = sorted(Counter(state.held.values()).items(), reverse=True)
        for version, count in counts[:_SHOWN_VERSIONS]:
            yield f"{units.plural(count, 'explorer')} at {version}{_lag(state, version)}"
        older = counts[_SHOWN_VERSIONS:]
        if older:
            last = older[-1][0]
            yield f"{sum(count for _, count in older)} older, down to {last}{_lag(state, last)}"
    stale = units.finite(state.metrics.get("staleness/mean"))
    if stale is not None:
        yield f"staleness {units.number(stale)}"


def _lag(state: RunState, version: int) -> str:
    behind = state.behind(version)
    return f" ({behind} behind)" if behind else ""


def rate_cells(state: RunState) -> list[str]:
    """Describe the samples and tokens trained on per second, where known."""
    rates = ((state.samples_per_s, "samples/s"), (state.tokens_per_s, "tokens/s"))
    return [f"{units.rate(value)} {unit}" for value, unit in rates if value is not None]


def _sync(state: RunState) -> Iterator[str]:
    published = state.published
    if published is not None:
        yield f"blocked {units.seconds(published.blocked_s)}"
        yield f"publish {units.seconds(published.total_s)}"
    if state.loaded is not None:
        yield f"load {units.seconds(state.loaded.total_s)}"
    if published is not None and published.bytes_moved is not None:
        yield f"{units.size(published.bytes_moved)} moved"


def _save(state: RunState, now: float) -> Iterator[str]:
    commit = state.committed
    if commit is not None:
        yield f"step {commit.step}, {units.seconds(max(1.0, round(now - state.committed_at)))} ago"
        yield f"took {units.seconds(commit.total_s)}"
        yield units.size(commit.bytes)
    if state.saving is not None:
        yield f"writing step {state.saving}"


def _queue(state: RunState) -> Iterator[str]:
    """Describe the queue between explorers and trainer of a free run."""
    ready, waited, alive = (
        units.finite(state.metrics.get(f"samples/{name}")) for name in ("ready", "waited_s", "explorers")
    )
    if ready is None:
        return
    yield f"{ready:.0f} samples ready"
    yield f"{state.dropped:.0f} dropped"
    if waited is not None:
        yield f"explorers waited {units.seconds(waited)}"
    if alive is not None:
        yield f"{units.plural(int(alive), 'explorer')} alive"


def _faults(state: RunState, now: float) -> LiveRow:
    assert state.fault is not None
    ago = units.seconds(max(0.0, round(now - state.fault.at)))
    return LiveRow(
        label="faults",
        cells=[f"{state.faults}, newest {ago} ago", one_line(state.fault, 1000)],
        style="yellow",
        most=1 + _FAULT_LINES,
    )


def _curve(values: Sequence[float], ramp: str) -> Drawing:
    return lambda size: Text(sparkline(values, size, ramp).ljust(size), style="cyan")


def sparkline(values: Sequence[float], width: int, ramp: str = UNICODE_RAMP) -> str:
    """Draw values in at most `width` characters of `ramp` (lowest to highest), each the mean of its share.

    Long shares are sampled: the view draws often.
    """
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    shares = (values[a : b : -(-(b - a) // _SAMPLED)] for a, b in pairwise(edges))
    means = [sum(share) / len(share) for share in shares]
    low, span = min(means), max(means) - min(means)
    top = len(ramp) - 1
    return "".join(ramp[round((mean - low) / span * top) if span else top // 2] for mean in means)


def one_line(text: object, limit: int = 200) -> str:
    """Fit a text of other programs into one line: no line breaks, no control characters, a limited length."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."
