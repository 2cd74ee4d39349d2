"""The script of the pages, in a browser: values on hover, on a tap, and by the arrow keys."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tracking import synthetic
from trinity_sync.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.all, pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")]

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1200,2600"),
)
FIND = (
    "const found = name => [...document.querySelectorAll('figure > svg')].find(svg => svg.ariaLabel.startsWith(name));"
)
AT = """const at = (svg, x, y, kind) => { const box = svg.getBoundingClientRect();
  const place = { clientX: box.x + box.width * x, clientY: box.y + box.height * y, bubbles: true };
  (document.elementFromPoint(place.clientX, place.clientY) || svg).dispatchEvent(new PointerEvent(kind, place)); };"""
PRESS = "const press = (svg, key) => svg.dispatchEvent(new KeyboardEvent('keydown', { key }));"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(synthetic.whole_run(tmp_path_factory.mktemp("outputs") / "run"))


def after(page: Path, folder: Path, script: str) -> str:
    """What stands beside the pointer, a line each, after this has been done."""
    copy = folder / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{FIND}{AT}{PRESS}{script}</script></body>"))
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r'<div class="tip"([^>]*)>([^<]*)</div>', done.stdout)
    assert found is not None, done.stderr
    return "" if "hidden" in found[1] else html.unescape(found[2])


def test_a_chart_says_the_values_of_all_curves_at_the_pointer(page: Path, tmp_path: Path) -> None:
    text = after(page, tmp_path, "at(found('Mean reward'), 0.5, 0.5, 'pointermove')").splitlines()
    number = int(text[0].removeprefix("step "))
    assert 25 < number < 35
    assert text[1] == f"each step: {synthetic.metrics(number)['reward/mean']:.4g}"
    assert text[2].startswith("mean of the last 10 steps: ")


def test_a_level_curve_says_the_value_of_the_step_itself(page: Path, tmp_path: Path) -> None:
    text = after(page, tmp_path, "at(found('Version held'), 0.5, 0.5, 'pointerdown')").splitlines()
    number = int(text[0].removeprefix("step "))
    assert text[1:] == [f"{who}: {number - 1}" for who in ("the trainer", "explorer-0", "explorer-1")]


def test_the_arrow_keys_go_from_step_to_step_and_escape_ends_it(page: Path, tmp_path: Path) -> None:
    keys = "const svg = found('Loss'); svg.focus(); for (const _ of [1, 2, 3]) press(svg, 'ArrowRight');"
    number = 3
    assert after(page, tmp_path, keys).splitlines() == [
        f"step {number}",
        f"training: {synthetic.metrics(number)['loss']:.4g}",
    ]
    assert after(page, tmp_path, f"{keys} press(svg, 'Escape');") == ""


def test_a_bar_says_what_it_is(page: Path, tmp_path: Path) -> None:
    lane = "at(found('Who did what when'), 0.2, 0.21, 'pointermove')"
    assert re.fullmatch(r"trainer: (train|wait for samples), step \d+: \S+ m?s", after(page, tmp_path, lane))
    bar = "const svg = found('Seconds of each part'); svg.focus(); press(svg, 'ArrowRight');"
    assert re.fullmatch(r"step 1: \w+ .*s", after(page, tmp_path, bar))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    clock = synthetic.Clock()
    with synthetic.recording(tmp_path / "run", clock) as recorder:
        for version in (1, 2, 3):
            clock.pass_(2.5)
            recorder.event(synthetic.event("load", **synthetic.load(version, "<img src=x onerror=alert(1)>|9 9")))
            recorder.metrics(version, synthetic.metrics(version))
    page = write_report(tmp_path / "run")
    text = after(page, tmp_path, "at(found('Version held'), 0.9, 0.5, 'pointermove')")
    assert "<img src=x onerror=alert(1)>|9 9: 2" in text.splitlines()
