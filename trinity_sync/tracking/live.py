"""The live view: how a run shows itself while it goes on. The recorder feeds it.

On a terminal a panel that is redrawn, elsewhere a plain line now and then. It only ever looks: whatever goes wrong in
it is logged once and the run goes on.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Concatenate, Literal, ParamSpec

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trinity_sync.tracking import jsonl, units

logger = logging.getLogger(__name__)

Mode = Literal["auto", "panel", "line", "off"]

_NAMED_EXPLORERS = 4
_SHOWN_FAULTS = 20
_TIMED_STEPS = 20
_SPARK_WIDTH = 32
_BAR_WIDTH = 24
_UNICODE_RAMP = "▁▂▃▄▅▆▇█"
_ASCII_RAMP = "_.-~=+*#"

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
    """Shows phases, steps and events of a run. Any thread may call; nothing is raised.

    Args:
        mode: ``panel`` (redrawn), ``line`` (plain lines), ``off``, or ``auto``: panel on a terminal, line elsewhere.
        total_steps: the last step, None if the run is open.
        console: where to show; standard output by default.
        title, subtitle: the run's name, and what stands beside it.
        start_step: the step the run starts after.
        clock: gives seconds, for elapsed times and the rate of steps.
        interval_s: in line mode, seconds after which a step is shown again (each tenth of the way always is).

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        total_steps: int | None = None,
        console: Console | None = None,
        *,
        title: str = "",
        subtitle: str = "",
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = 15.0,
    ) -> None:
        if mode not in ("auto", "panel", "line", "off"):
            raise ValueError(f"a live view is auto, panel, line or off, not {mode!r}")
        self.console = console or Console()
        animated = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode = mode if mode != "auto" else "panel" if animated else "line"
        self._total, self._title, self._subtitle = total_steps, title, subtitle
        self._clock, self._interval = clock, interval_s
        self._unicode = (self.console.encoding or "").lower().startswith("utf")
        self._lock = threading.RLock()
        self._warned = False
        self._began = clock()
        self._phases: list[tuple[str, float]] = []
        self._start_step = self._step = start_step
        self._stepped: float | None = None
        self._durations: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._rewards: list[float] = []
        self._metrics: jsonl.Record = {}
        self._published: jsonl.Record = {}
        self._loaded: jsonl.Record = {}
        self._loaded_versions: dict[str, int] = {}
        self._committed: tuple[jsonl.Record, float] | None = None
        self._saving: int | None = None
        self._faults: list[str] = []
        self._spoken = -math.inf
        self._spoken_tenth = 0
        self._live: Live | None = None
        if self.mode == "panel":
            self._open_panel()

    @_never_raises
    def phase(self, text: str) -> None:
        """Say what the run is busy with outside of its steps, such as ``starting Ray``."""
        with self._lock:
            self._phases.append((text, self._clock()))
            self._say(text)
        self._repaint()

    @_never_raises
    def step(self, metrics: jsonl.Record) -> None:
        """Take the metrics of a completed step; `step` must be among them."""
        with self._lock:
            now = self._clock()
            if self._stepped is not None:
                # The first step is no measure: it has the start-up in it.
                self._durations.append(now - self._stepped)
            self._stepped, self._step, self._metrics = now, jsonl.metrics_step(metrics) or 0, dict(metrics)
            reward = units.finite(metrics.get("reward/mean"))
            if reward is not None:
                self._rewards.append(reward)
            if self.mode == "line" and self._is_time_to_speak(now):
                self._spoken = now
                self._say(self._step_line())
        self._repaint()

    @_never_raises
    def event(self, event: jsonl.Record) -> None:
        """Take an event as it stands in events.jsonl."""
        step = jsonl.event_step(event)
        with self._lock:
            match event["event"]:
                case "publish":
                    self._published = dict(event)
                case "load":
                    self._loaded = dict(event)
                    if step is not None:
                        self._loaded_versions[str(event["explorer"])] = step
                case "commit":
                    self._committed = dict(event), self._clock()
                    if self._saving is not None and step is not None and self._saving <= step:
                        self._saving = None
                case "fault":
                    self._faults.append(f"{_one_line(event['where'])}: {_one_line(event['error'])}")
                    if len(self._faults) <= _SHOWN_FAULTS:
                        self._say(f"fault in {self._faults[-1]}")
        self._repaint()

    @_never_raises
    def saving(self, step: int) -> None:
        """Say that a checkpoint is being written. Its commit ends that, or the commit of a later one."""
        with self._lock:
            self._saving = step
        self._repaint()

    @_never_raises
    def close(self) -> None:
        """Take the panel away and give the terminal back; closing twice is fine."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def render(self) -> RenderableType:
        """Render the panel as it stands now."""
        with self._lock:
            body = self._steps_body() if self._stepped is not None else self._phases_body()
            head = Text.assemble((self._title or "trinity-sync", "bold"))
            if self._subtitle:
                head.append(f" {self._dot} {self._subtitle}")
            return Panel(
                body,
                title=head,
                title_align="left",
                subtitle=Text(units.elapsed(self._clock() - self._began)),
                subtitle_align="right",
                border_style="dim",
                width=min(self.console.width, 100),
            )

    # The panel.

    @property
    def _dot(self) -> str:
        return "·" if self._unicode else "|"

    def _phases_body(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        ends = [begin for _, begin in self._phases[1:]] + [self._clock()]
        for index, ((text, begin), end) in enumerate(zip(self._phases, ends, strict=False)):
            done = index < len(self._phases) - 1
            mark = ("✓" if self._unicode else "+") if done else ("…" if self._unicode else ".")
            table.add_row(
                Text(mark, style="green" if done else "cyan"),
                Text(text, style="dim" if done else "bold"),
                Text(units.elapsed(end - begin), style="dim"),
            )
        return table if self._phases else Text("starting")

    def _steps_body(self) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="bold", width=9, no_wrap=True)
        table.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
        table.add_row("step", self._progress())
        if self._rewards:
            table.add_row("reward", self._reward())
        table.add_row("versions", Text(self._versions()))
        table.add_row("sync", Text(self._sync_times()))
        table.add_row("save", Text(self._save()))
        if self._faults:
            table.add_row("faults", Text(f"{len(self._faults)}, last in {self._faults[-1]}", style="yellow"))
        if self._phases and self._phases[-1][1] > (self._stepped or 0.0):
            table.add_row("now", Text(self._phases[-1][0]))
        return table

    def _progress(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        pace = f"{units.seconds(statistics.median(self._durations))} each" if self._durations else ""
        if self._total is None:
            row.add_row(Text(str(self._step)), Text(pace))
        else:
            done = min(_BAR_WIDTH, _BAR_WIDTH * self._step // max(self._total, 1))
            full, rest = ("━", "─") if self._unicode else ("#", "-")
            bar = Text.assemble((full * done, "cyan"), (rest * (_BAR_WIDTH - done), "dim"))
            left = self._left()
            if left is not None:
                pace = f"{units.elapsed(left)} left {self._dot} {pace}"
            row.add_row(Text(f"{self._step}/{self._total}"), bar, Text(pace))
        return row

    def _reward(self) -> Text:
        text = Text(f"{units.number(self._rewards[-1]):<8}")
        ramp = _UNICODE_RAMP if self._unicode else _ASCII_RAMP
        text.append(sparkline(self._rewards, _SPARK_WIDTH, ramp), style="cyan")
        recent = self._rewards[-10:]
        text.append(f"  mean of {len(recent)}: {units.number(sum(recent) / len(recent))}", style="dim")
        return text

    def _versions(self) -> str:
        parts = [f"newest {self._published['version']}" if self._published else "none published"]
        if len(self._loaded_versions) <= _NAMED_EXPLORERS:
            parts += [f"{name} {version}" for name, version in sorted(self._loaded_versions.items())]
        else:
            counts = sorted(Counter(self._loaded_versions.values()).items(), reverse=True)
            parts += [f"{count} explorers at {version}" for version, count in counts[:3]]
        stale = units.finite(self._metrics.get("staleness/mean"))
        parts += [f"staleness {units.number(stale)}"] if stale is not None else []
        return f" {self._dot} ".join(parts)

    def _sync_times(self) -> str:
        parts = []
        if self._published:
            parts.append(f"blocked {units.seconds(units.finite(self._published.get('blocked_s')))}")
            parts.append(f"publish {units.seconds(units.finite(self._published.get('total_s')))}")
        if self._loaded:
            parts.append(f"load {units.seconds(units.finite(self._loaded.get('total_s')))}")
        if self._published and self._published.get("bytes_moved") is not None:
            parts.append(f"{units.size(units.finite(self._published['bytes_moved']))} moved")
        return f" {self._dot} ".join(parts) or "nothing yet"

    def _save(self) -> str:
        parts = []
        if self._committed is not None:
            commit, at = self._committed
            ago = units.seconds(max(1.0, round(self._clock() - at)))
            parts.append(f"step {commit['step']}, {ago} ago, took {units.seconds(units.finite(commit.get('total_s')))}")
            parts.append(units.size(units.finite(commit.get("bytes"))))
        if self._saving is not None:
            parts.append(f"writing step {self._saving}")
        return f" {self._dot} ".join(parts) or "nothing yet"

    # Plain lines.

    def _is_time_to_speak(self, now: float) -> bool:
        tenth = 10 * self._step // self._total if self._total else 0
        first = self._spoken == -math.inf
        due = first or now - self._spoken >= self._interval or tenth > self._spoken_tenth
        if due:
            self._spoken_tenth = tenth
        return due

    def _step_line(self) -> str:
        parts = [f"step {self._step}" + (f"/{self._total}" if self._total is not None else "")]
        if self._rewards:
            parts.append(f"reward {units.number(self._rewards[-1])}")
        loss = units.finite(self._metrics.get("loss"))
        parts += [f"loss {units.number(loss)}"] if loss is not None else []
        if self._published:
            steps = sorted(set(self._loaded_versions.values()))
            spread = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}" if steps else ""
            parts.append(f"version {self._published['version']}" + (f" (explorers at {spread})" if spread else ""))
            parts.append(f"blocked {units.seconds(units.finite(self._published.get('blocked_s')))}")
        parts += [f"saved {self._committed[0]['step']}"] if self._committed is not None else []
        left = self._left()
        parts += [f"{units.elapsed(left)} left"] if left else []
        return ", ".join(parts)

    def _left(self) -> float | None:
        if self._total is None or not self._durations:
            return None
        return statistics.median(self._durations) * max(0, self._total - self._step)

    def _say(self, text: str) -> None:
        """Print one line in line mode; nothing in the others, where the panel shows the same."""
        if self.mode != "line":
            return
        line = f"[{units.elapsed(self._clock() - self._began):>11}] {_one_line(text, limit=500)}"
        if not self._unicode:
            line = line.encode("ascii", "replace").decode()
        # Straight to the file: rich would wrap the line at the width of a terminal that is not there.
        with self._lock:
            self.console.file.write(line + "\n")
            self.console.file.flush()

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
        if not self._warned:
            self._warned = True
            logger.warning(
                "the live view cannot be drawn, the run goes on without it: %s: %s", type(error).__name__, error
            )


class _Display(Live):
    """The panel on the terminal. Redrawn by a thread of rich's, which an output that breaks does not end."""

    def __init__(self, view: LiveView) -> None:
        super().__init__(get_renderable=view.render, console=view.console, transient=True)
        self._view = view

    def refresh(self) -> None:
        try:
            super().refresh()
        except Exception as error:
            self._view._broken(error)


def sparkline(values: Sequence[float], width: int, ramp: str = _UNICODE_RAMP) -> str:
    """Draw the course of `values` in at most `width` characters of `ramp` (lowest to highest), each the mean of its
    share.
    """
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(ramp) - 1
    return "".join(ramp[round((mean - low) / span * top) if span else top // 2] for mean in means)


def _one_line(text: object, limit: int = 200) -> str:
    """Make a text of others fit for one line: no line breaks, no control characters, not endless."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."
