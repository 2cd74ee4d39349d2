"""The live view: how a run shows itself while it goes on. The recorder feeds it, or who watches the run's files.

On a terminal a panel that is redrawn, elsewhere a plain line now and then. It only ever looks: whatever goes wrong in
it is logged once and the run goes on.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Concatenate, Literal, ParamSpec

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment

from trinity_sync.tracking import units
from trinity_sync.tracking.console import PlainConsole
from trinity_sync.tracking.jsonl import Record
from trinity_sync.tracking.run_panel import RunPanel, one_line, rate_cells
from trinity_sync.tracking.run_state import RunState

logger = logging.getLogger(__name__)

Mode = Literal["auto", "panel", "line", "off"]

_SHOWN_FAULTS = 20
_ASCII_LOCALES = ("C", "POSIX")

P = ParamSpec("P")


def _never_raises(
    method: Callable[Concatenate[LiveView, P], None],
) -> Callable[Concatenate[LiveView, P], None]:
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
        state: the run as it stands; from now on only this view feeds it.
        console: where to show; standard output by default.
        clock: gives Unix seconds.
        interval_s: in line mode, seconds after which a step is shown again (each tenth of the way always is).

    Attributes:
        console, mode: as given, or found out.
        failure: what went wrong when it last showed something; None: nothing.

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
        """Show another run from now on, and in line mode say at once where it stands.

        Args:
            state: of that run; None: there is none.
            label: what its lines begin with.
            above: makes what stands above its panel.
        """
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
    def take(self, line: Record) -> None:
        """Take a line as it stands in metrics.jsonl or events.jsonl."""
        with self._lock:
            now = self._clock()
            step = self._state.stepped
            self._state.take(line, now)
            match line.get("event"):
                case "phase":
                    self._say(str(line.get("what")))
                case "fault":
                    self._say_fault()
                case None if self._state.stepped != step and self.mode == "line" and self._is_time_to_speak(now):
                    self._say_step(now)
        self._repaint()

    @_never_raises
    def say(self, text: str) -> None:
        """Print one line in line mode, of more than the run that is shown; nothing in the others."""
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
        # a clock that was set back must not have it wait until that moment comes again
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
            self._say(f"{_SHOWN_FAULTS} faults so far; further ones are counted here, and told in events.jsonl")

    def _say(self, text: str) -> None:
        self._print(f"{self._label}{text}")

    def _print(self, text: str) -> None:
        if self.mode != "line":
            return
        line = f"[{units.elapsed(self._clock() - self._state.began):>11}] {one_line(text, limit=500)}"
        if not self._unicode:
            line = line.encode("ascii", "replace").decode()
        # Straight to the file: rich would wrap the line at the width of a terminal that is not there.
        self.console.file.write(line + "\n")
        self.console.file.flush()
        self.failure = None

    # The machinery.

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
    """The panel on the terminal. Redrawn by a thread of rich's, which an output that breaks does not end."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._drawn: list[int] = []  # columns of each line that stands on the terminal
        super().__init__(get_renderable=self._noted, console=view.console, transient=True)

    def refresh(self) -> None:
        try:
            super().refresh()
            self._view.failure = None
        except Exception as error:
            self._view._broken(error)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Go back first on a terminal that was made narrower: it has broken the lines that stand there."""
        width = max(1, self.console.width)
        more = sum(max(0, -(-drawn // width) - 1) for drawn in self._drawn)
        up: tuple[tuple[ControlType, int], ...] = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        return [Control(*up * more), *super().process_renderables(renderables)]

    def _noted(self) -> RenderableType:
        return _Noted(self._view.render(), self._drawn)


class _Noted:
    """Something to draw, of which is noted how wide its lines are."""

    def __init__(self, drawing: RenderableType, widths: list[int]) -> None:
        self._drawing, self._widths = drawing, widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._drawing, options, pad=False)
        self._widths[:] = [Segment.get_line_length(line) for line in lines]
        for line in lines:
            yield from line
            yield Segment.line()


def step_line(state: RunState) -> str:
    """Say in one line where a run stands after a step."""
    parts = [f"step {state.step}" + (f"/{state.total_steps}" if state.total_steps is not None else "")]
    if state.rewards:
        parts.append(f"reward {units.number(state.rewards[-1])}")
    loss = units.finite(state.metrics.get("loss"))
    parts += [f"loss {units.number(loss)}"] if loss is not None else []
    parts += rate_cells(state)
    if state.newest is not None:
        held = sorted(set(state.held.values()))
        spread = str(held[0]) if len(held) == 1 else f"{held[0]}-{held[-1]}" if held else ""
        parts.append(f"version {state.newest}" + (f" (explorers at {spread})" if spread else ""))
        parts.append(f"blocked {units.seconds(units.finite(state.published.get('blocked_s')))}")
    ready = units.finite(state.metrics.get("samples/ready"))
    parts += [f"{ready:.0f} samples ready"] if ready is not None else []
    parts += [f"saved {state.committed['step']}"] if state.committed else []
    parts += [units.plural(state.faults, "fault")] if state.faults else []
    parts += [f"{units.elapsed(state.left_s)} left"] if state.left_s else []
    return ", ".join(parts)


def knows_unicode(console: Console, environ: Mapping[str, str]) -> bool:
    """Whether a terminal can be shown more than ASCII, by its encoding and by the user's locale.

    In the locale C, Python encodes as UTF-8 all the same, and sets LC_CTYPE for it.
    """
    if not (console.encoding or "").lower().startswith("utf"):
        return False
    if environ.get("LC_ALL"):
        return environ["LC_ALL"] not in _ASCII_LOCALES
    by_python = environ.get("LC_CTYPE", "") in ("", "C.UTF-8", "C.utf8", "UTF-8", *_ASCII_LOCALES)
    return not (by_python and environ.get("LANG") in _ASCII_LOCALES)
