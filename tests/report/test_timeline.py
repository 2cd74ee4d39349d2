from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_activity import AT, event, step
from trinity_sync.report import timeline as module
from trinity_sync.report.run_charts import held, step_parts
from trinity_sync.report.run_data import Run
from trinity_sync.report.timeline import _WORDS, _kind, spans, timeline
from trinity_sync.tracking.events import GenerateEvent, event_step

MIRRORED = {"step": 3, "url": "s3://x", "state": "copied", "total_s": 990.0, "bytes": 1}


def run(steps: int, explorers: int = 1, slow: int | None = None, **record: Any) -> Run:
    """Steps of a second each, of which the explorers generate for a half; one may take nine more."""
    metrics, events, at = [], [], 0.0
    for number in range(1, steps + 1):
        took = 10.0 if number == slow else 1.0
        at += took
        metrics.append(step(number, at, generate=0.5, train=took - 0.5, step=took))
        for index in range(explorers):
            fields = {"step": number, "explorer": f"explorer-{index}", "version": number - 1}
            events.append(event("generate", at, **fields, began=AT + at - took, total_s=0.5))
            events.append(event("load", at, version=number, explorer=f"explorer-{index}", total_s=0.1, paused_s=0.05))
    return Run(path=Path("x"), metrics=metrics, events=events, record={"started": AT, **record})


def drawn(found: Run) -> str:
    picture = timeline(found)
    assert picture is not None
    return str(picture)


def titles(found: Run) -> list[str]:
    return re.findall(r"<h3>(.*)</h3>", drawn(found))


def test_each_lane_has_its_bars_with_their_values() -> None:
    page = drawn(run(2))
    for words in (
        "trainer: wait for samples, step 1: 500 ms",
        "trainer: train, step 2: 500 ms",
        "explorer-0: generate, step 2, version 1: 500 ms",
        "explorer-0: load, version 2: 100 ms",
        "explorer-0: pause, version 2: 50 ms",
    ):
        assert f"<title>{words}</title>" in page
    assert re.findall(r'class="who">([^<]*)<', page) == ["trainer", "explorer-0"]
    assert re.findall(r'class="small">([^<]*)<', page) == ["50% busy", "60% busy"]
    assert "waits for samples, loads or a validation</li>" in page
    assert "commits it</li>" not in page


def test_the_texts_of_short_steps_do_not_touch() -> None:
    ends = [*range(1, 11), 15]
    short = Run(
        path=Path("x"),
        metrics=[step(n, at, train=1.0, step=5.0 if at == 15 else 1.0) for n, at in enumerate(ends, 1001)],
        record={"started": AT},
    )
    places = [float(x) for x in re.findall(r'<text x="([^"]*)" y="[^"]*">step ', drawn(short))]
    assert len(places) > 3
    assert min(after - before for before, after in pairwise(places)) > 70


def test_every_bar_lies_within_the_picture_and_its_lane() -> None:
    page = drawn(run(40, explorers=3, slow=20))
    pictures = page.split("<svg viewBox=")[1:]
    sizes = [tuple(map(int, re.findall(r"\d+", picture)[2:4])) for picture in pictures]
    for (width, height), picture in zip(sizes, pictures, strict=True):
        bars = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="18"', picture)
        for x, y, wide in (map(float, bar) for bar in bars):
            assert 118 <= x <= x + wide <= width
            assert 22 <= y <= y + 18 <= height - 38


def test_a_short_run_is_shown_whole() -> None:
    assert titles(run(12)) == ["All steps"]


def test_of_a_long_run_the_last_steps_are_shown_and_those_around_the_slowest() -> None:
    assert titles(run(100, slow=50)) == [
        "The last 12 of 100 steps",
        "Around step 50, the slowest of the others: 10 s, a median step 1 s",
    ]
    page = drawn(run(100, slow=50))
    assert [number in page for number in ("step 48:", "step 49:", "step 51:", "step 52:", "step 88:", "step 89:")] == [
        False, True, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("slow", [None, 1, 95])
def test_a_slow_step_that_is_the_first_or_shown_already_is_not_shown_again(slow: int | None) -> None:
    assert titles(run(100, slow=slow)) == ["The last 12 of 100 steps"]


def test_a_large_run_stays_light_and_says_what_is_left_out() -> None:
    page = drawn(run(200, explorers=64, slow=50))
    assert len(page) < 400_000
    assert page.count('class="who"') == 2 * (1 + 12)
    assert "52 more explorers are in the trace." in page


def test_an_older_run_says_what_it_cannot_show() -> None:
    older = run(3)
    older.events = [event for event in older.events if not isinstance(event, GenerateEvent)]
    assert "This run did not note when explorers generated" in drawn(older)


def test_the_clock_counts_from_the_beginning_of_the_run() -> None:
    found = run(3, started=AT - 3600)
    assert "1:00:01" in drawn(found)
    assert "1.0 s" not in drawn(found)


def later(event: Any, seconds: float) -> Any:
    began = {"began": event.began + seconds} if event.began is not None else {}
    return replace(event, time=event.time + seconds, **began)


def test_no_picture_spans_the_time_between_two_attempts() -> None:
    day = 86400.0
    found = run(20, slow=9)
    found.metrics = [line | {"time": line["time"] + day * (line["step"] >= 10)} for line in found.metrics]
    found.events = [later(event, day) if (event_step(event) or 0) >= 10 else event for event in found.events]
    found.record["started"] = AT + day
    assert titles(found) == [
        "The last 11 of 20 steps",
        "Around step 9, the slowest of the others: 10 s, a median step 1 s",
    ]
    page = drawn(found)
    assert [number in page for number in ("step 8:", "step 9:", "step 10:", "step 20:")] == [True] * 4
    assert max(float(wide) for wide in re.findall(r'width="([\d.]+)" height="18"', page.split("<h3>")[2])) > 100


def test_ticks_are_told_exactly() -> None:
    assert [mark for mark in ("2.5 s", "5.0 s", "7.5 s", "10.0 s") if f">{mark}<" not in drawn(run(6, slow=6))] == []


def test_a_run_that_has_no_step_yet_shows_what_there_is() -> None:
    found = run(0)
    assert timeline(found) is None
    found.events = [event("load", 1, version=0, explorer="explorer-0", total_s=0.5, paused_s=0.1)]
    assert titles(found) == ["All of it"]


def test_a_validation_before_the_first_step_is_no_step() -> None:
    found = run(3)
    start = {"attempt": 0, "step": 0, "time": AT, "val/reward/mean": 0.5, "timing/validate": 0.25}
    found = replace(found, metrics=[start, *found.metrics])
    assert titles(found) == ["All steps"]
    assert "trainer: wait for a validation, step 0: 250 ms" in drawn(found)
    assert titles(replace(found, metrics=[start, *run(13).metrics])) == ["The last 12 of 13 steps"]
    assert step_parts(found)[0] == [1.0, 2.0, 3.0]
    found.events = [event("load", 1, version=0, explorer="explorer-0", total_s=0.5, paused_s=0.1)]
    assert ">-" not in held(found)  # a version below zero


def test_no_two_kinds_of_bars_have_the_same_colour() -> None:
    style = files("trinity_sync.report").joinpath("templates/style.css").read_text()
    kinds = {_kind(what) for what in _WORDS} | {"other"}
    fills = {kind: re.findall(rf"svg \.{kind} {{ ([^}}]*) }}", style) for kind in kinds}
    assert all(fills.values())
    assert len({str(fill) for fill in fills.values()}) == len(kinds)


@pytest.mark.parametrize("slow", [None, 2, 50, 87, 88, 89, 99])
@pytest.mark.parametrize("attempts", [1, 2])
def test_spans_that_no_window_shows_are_not_needed(
    slow: int | None, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(100, explorers=3, slow=slow, **({"started": AT + 95.5} if attempts == 2 else {}))
    found.events = [event("commit", 0.5, step=0, total_s=0.1), *found.events, event("mirror", 999, **MIRRORED)]
    few = len(list(module._shown(found)))
    page = drawn(found)
    everything = list(spans(found.metrics, found.events))
    monkeypatch.setattr(module, "_shown", lambda run: everything)
    assert drawn(found) == page
    assert few < len(everything) / 2
