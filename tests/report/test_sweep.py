"""The page, the table and the JSON of a sweep over modes and seeds."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.report.test_report import Page
from tests.tracking import synthetic
from trinity_sync.report import load, render_json, render_table, write_report
from trinity_sync.report.figures import COLUMNS
from trinity_sync.report.run_data import Sweep

MODES = {"checkpoint": 2.5, "memory": 1.0, "nccl": 1.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three modes, of which one is slow and two are a tie, with two seeds each, of which one learns later."""
    path = tmp_path_factory.mktemp("multirun") / "copy-digits" / "today"
    jobs = [(mode, pace, seed) for mode, pace in MODES.items() for seed in (0, 1)]
    for number, (mode, pace, seed) in enumerate(jobs):
        synthetic.whole_run(
            path / str(number),
            total=50,
            overrides=["trainer.steps=50", f"sync={mode}", f"seed={seed}"],
            mode=mode,
            seed=seed,
            pace=pace * (1 + 0.05 * seed),
            late=3 * seed,
        )
    return path


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Sweep:
    found = load(folder)
    assert isinstance(found, Sweep)
    return found


@pytest.fixture(scope="module")
def values(sweep: Sweep) -> dict:
    return json.loads(render_json(sweep))


def test_seeds_are_one_row_and_each_job_has_its_own(sweep: Sweep) -> None:
    text = Page(write_report(sweep)).text
    assert "the same in all: trainer.steps=50" in text
    assert re.search(r"0 1 sync=checkpoint 2 seeds ✓ completed 50/50 ", text)
    assert re.search(r"2 3 sync=memory 2 seeds ✓ completed 50/50 .* ≈ 2 min 08 s ± 3\.\d+ s ", text)
    assert re.search(r"Jobs Each by itself .* 5 sync=nccl seed=1 ✓ completed 50/50 ", text)
    assert text.count("What the columns say") == 1


def test_the_page_says_what_is_a_tie_and_whether_digests_agree(sweep: Sweep) -> None:
    text = Page(write_report(sweep)).text
    assert "★ best of its column, ≈ not distinguishable from it. Not distinguishable: the difference" in text
    assert "Digests agree 6 jobs in 2 sets, 102 versions" in text
    assert "digests agree" not in text
    assert "Best last reward 0.921 not distinguishable" in text


def test_digests_that_differ_stand_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    events = tmp_path / "copy" / "2" / "events.jsonl"
    events.write_text(events.read_text().replace(synthetic.digest(30), "f00d"))
    page = write_report(tmp_path / "copy")
    words = f"digests differ: version 30 is {synthetic.digest(30)} in job 0, f00d in job 2"
    assert f'<section class="card wide error"><p>{words}</p></section>' in page.read_text()
    assert words in render_table(tmp_path / "copy", 200)


def test_each_chart_has_a_mean_and_a_band_per_row(sweep: Sweep) -> None:
    page = write_report(sweep).read_text()
    assert re.findall(r'role="img" aria-label="(Mean [^"]*)"', page) == [
        "Mean reward by step",
        "Mean reward by training time",
    ]
    assert (page.count("<polyline"), page.count("<polygon")) == (6, 6)
    assert "sync=nccl (2 seeds)" in page


def test_the_table_of_the_terminal_says_the_same(sweep: Sweep) -> None:
    text = render_table(sweep, 120)
    assert all(line.isprintable() and len(line) <= 120 for line in text.splitlines())
    assert re.search(r"^2,3 +sync=memory +completed +50/50 .* =4\.\d+ ms", text, re.MULTILINE)
    assert "digests agree: 6 jobs in 2 sets, 102 versions" in text
    assert "* best of its column, = not distinguishable from it." in text


def test_a_row_of_the_sweep_is_a_block_on_a_phone_in_which_each_figure_has_its_title(sweep: Sweep) -> None:
    page = write_report(sweep).read_text()
    assert page.count('<table class="stacked">') == page.count('<div class="scroll">') == 4
    cells = re.findall(r'<td class="num[^"]*"([^>]*)>', page)
    assert cells
    assert all('data-title="' in cell for cell in cells)
    phone = page.partition("@media (max-width: 560px)")[2].partition("@media")[0]
    assert ".stacked tr { display: grid;" in phone
    assert "content: attr(data-title)" in phone


def test_json_has_rows_jobs_and_digests(values: dict) -> None:
    assert values.keys() == {"path", "common", "columns", "tie", "rows", "jobs", "digests"}
    assert list(values["columns"]) == [column.key for column in COLUMNS]
    row = values["rows"][1]
    assert row.keys() == {"settings", "jobs", "seeds", "completed", "figures", "reward_by_step", "reward_by_wall_s"}
    assert (row["settings"], row["jobs"], row["seeds"], row["completed"]) == (["sync=memory"], ["2", "3"], [0, 1], 2)
    assert row["figures"]["blocked_s"].keys() == {"value", "low", "high", "least", "most", "count", "error", "mark"}
    assert [row["figures"]["blocked_s"]["mark"] for row in values["rows"]] == [None, "tie", "tie"]
    assert [len(point) for point in row["reward_by_step"]] == [4] * 50
    job = values["jobs"][3]
    assert (job["job"], job["seed"], job["status"], job["steps"], job["total_steps"]) == ("3", 1, "completed", 50, 50)
    assert "p95" in job["figures"]["load_s"]
    assert "p5" in job["figures"]["samples_per_s"]
    assert values["digests"] == {
        **{"agree": True, "jobs": 6, "sets": 2, "versions": 102, "differs": None},
        "text": "digests agree: 6 jobs in 2 sets, 102 versions",
    }


def test_the_documentation_names_every_key_of_the_json(values: dict) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    known = set(re.findall(r"`(\w+)`", page))
    for part in (values, values["columns"]["load_s"], values["columns"], values["rows"][0], values["jobs"][0]):
        assert part.keys() <= known
    assert values["jobs"][0]["figures"]["load_s"].keys() | values["digests"].keys() | {"mark"} <= known


def test_the_json_of_a_run_is_its_summary(folder: Path) -> None:
    assert json.loads(render_json(folder / "0")) == json.loads((folder / "0" / "summary.json").read_text())


def test_a_sweep_of_one_job_compares_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "0", tmp_path / "sweep" / "0")
    text = Page(write_report(tmp_path / "sweep")).text
    assert "★" not in text
    assert "≈" not in text


@pytest.mark.all
def test_a_page_of_fifty_runs_of_a_thousand_steps_has_a_bearable_size_and_takes_no_more_for_each_run(
    tmp_path: Path,
) -> None:
    first = synthetic.whole_run(tmp_path / "sweep" / "0", total=1000, overrides=["trainer.lr=0", "seed=0"])
    for number in range(1, 50):
        copy = shutil.copytree(first, tmp_path / "sweep" / str(number))
        (copy / ".hydra" / "overrides.yaml").write_text(f"- trainer.lr={number}\n- seed={number % 2}\n")
    few = tmp_path / "few"
    for number in range(10):
        shutil.copytree(tmp_path / "sweep" / str(number), few / str(number))

    def page_of(folder: Path) -> tuple[Path, float]:
        started = time.process_time()
        found = load(folder)
        page = write_report(found)
        render_table(found, 120)
        return page, time.process_time() - started

    page_of(few)  # imports, and templates
    (_, of_ten), (page, of_fifty) = page_of(few), page_of(tmp_path / "sweep")
    assert of_fifty < 3 * 5 * of_ten
    assert page.stat().st_size < 8_000_000


def test_a_sweep_of_rates_says_nothing_of_digests(tmp_path: Path) -> None:
    for number in (0, 1):
        run = synthetic.whole_run(tmp_path / str(number), total=3, overrides=[f"trainer.lr={number}"])
        config = run / ".hydra" / "config.yaml"
        config.write_text(config.read_text().replace("lr: 0.001", f"lr: {number}"))
    assert "igests" not in Page(write_report(tmp_path)).text
    assert "igests" not in render_table(tmp_path, 200)


def test_a_sweep_of_supervised_runs_compares_their_losses(tmp_path: Path) -> None:
    for number in (0, 1):
        synthetic.hydra(tmp_path / str(number), [f"trainer.lr={number}"])
        with synthetic.recording(tmp_path / str(number), synthetic.Clock()) as recorder:
            for step in range(1, 9):
                recorder.metrics(step, {"loss": 2.0 - number + 0.01 * (step % 2), "timing/step": 1.0})
            recorder.finish("completed")
    page = write_report(tmp_path)
    assert re.search(
        r"Best last loss 1\.005 1: trainer\.lr=1 .* 1 trainer\.lr=1 ✓ completed 8/60 ★ 1\.005", Page(page).text
    )
    assert 'aria-label="Mean loss by step"' in page.read_text()
    assert "Reproduce the best, 1: trainer.lr=1: trinity-sync reproduce" in Page(page).text


def test_no_key_is_broken_in_mid_word(tmp_path: Path) -> None:
    for number in (1, 2):
        overrides = [f"sync.max_staleness={number}", f"algorithm.rollout_correction.rollout_is_threshold={number}"]
        synthetic.whole_run(tmp_path / str(number), total=2, overrides=overrides)
    page = write_report(tmp_path).read_text()
    assert '<code class="whole">sync.<wbr>max_staleness=<wbr>1</code>' in page
    assert "<code>algorithm.<wbr>rollout_correction.<wbr>rollout_is_threshold=<wbr>1</code>" in page
