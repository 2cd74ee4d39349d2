from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tracking import synthetic
from tests.tracking.synthetic import Clock
from trinity_sync.errors import ConfigError
from trinity_sync.report import render_json, render_table, write_report
from trinity_sync.report.figures import COLUMNS
from trinity_sync.report.run_charts import step_parts
from trinity_sync.report.run_data import Run, load, smooth, steps_to
from trinity_sync.tracking import units

VOID = {"meta"}
NO_TEXT = {"style", "script"}


class Page(HTMLParser):
    """A page taken apart: its text, its links, its elements; fails where they do not close in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.feed(path.read_text().replace("<wbr>", ""))
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in NO_TEXT:
            self.words.append(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.whole_run(tmp_path_factory.mktemp("outputs") / "run")


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """A run that lost an explorer, was resumed, loaded wrong weights once and failed; its texts try to be markup."""
    clock = Clock()
    synthetic.hydra(tmp_path, ["sync=memory", "name='<b>x</b>'"], name='"<b>x</b>"')
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 25)
        recorder.fault("explorer-1", "<script>alert(1)</script>")
        recorder.finish("interrupted")
    with synthetic.recording(tmp_path, clock, resumed_from=20) as recorder:
        recorder.event(synthetic.event("load", **synthetic.load(20, "explorer-0", digest="deadbeef" * 4)))
        synthetic.steps(recorder, clock, 21, 30)
        recorder.finish("failed", "rank 1 & its <memory>")
    return tmp_path


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "multirun" / "lr" / "2026-02-01_10-00"
    for job, (lr, total) in enumerate([("1e-3", 60), ("3e-3", 12)]):
        overrides = [f"trainer.lr={lr}", "sync=memory"]
        synthetic.whole_run(folder / str(job), total=total, overrides=overrides, report=write_report)
    synthetic.hydra(folder / "10", ["trainer.lr=9", "sync=memory"])
    return folder


def test_the_page_tells_each_healing_of_a_run(tmp_path: Path) -> None:
    clock = Clock()
    synthetic.hydra(tmp_path, ["sync=memory"])
    with synthetic.recording(tmp_path, clock) as recorder:
        synthetic.steps(recorder, clock, 1, 5)
        fields = {"died": "trainer rank 1 died", "resumed_from": 4, "lost": 3, "total_s": 9.5, "kept": "explorer-0"}
        recorder.event(synthetic.event("heal", **fields))
    text = Page(write_report(tmp_path)).text
    assert "Steps done again" in text
    assert "trainer rank 1 died explorer-0 step 4 3 9.5 s" in " ".join(text.split())


def test_the_page_needs_nothing_from_elsewhere(finished: Path) -> None:
    page = Page(write_report(finished))
    assert not {"link", "img", "iframe"} & set(page.elements)
    assert page.addresses == []
    assert (finished / "report.html").read_text().replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "url(" not in (finished / "report.html").read_text()


def test_the_page_lies_in_the_folder_and_is_returned(finished: Path) -> None:
    assert write_report(finished) == finished / "report.html"


def test_the_page_says_what_was_run_and_how_it_went(finished: Path) -> None:
    text = Page(write_report(finished)).text
    for words in (
        "copy_digits",
        "✓ completed",
        "backend fsdp2 on 2 ranks",
        "sync memory",
        "explorers 2 of hf",
        "seed 7",
        "wall 2 min 30 s",
        "Steps 60 of 60",
        "0.9 at step 48",
        "Versions 61",
        "120 loads by 2 explorers",
        "Digests all match",
        "Mismatch 3.00e-05 nats a token (k3); log-probs differ by 5.00e-03, 0.020 at most",
        "Peak, trainer 9.4 GB",
        "Samples Of step 60 (32 at most",
        "12<b>= 21& 1 0.700 4 59",
        "... 0.250 -0.700 4 cut 58 (0–1) , 59 (1–4)",
        "pruned: keep_last n=2: two newer ones (3.7 GB freed)",
        "✓ explorer-0",
        "No fault was reported.",
        "python launch.py sync=memory",
        "again: 60",
    ):
        assert words in text


def test_responses_that_could_not_be_judged_are_a_figure_of_the_page(tmp_path: Path) -> None:
    synthetic.whole_run(tmp_path, total=3)
    assert "Failed rewards" not in Page(write_report(tmp_path)).text
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) | {"reward/failed": 2.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").unlink()
    assert "Failed rewards 6 responses that could not be judged" in Page(write_report(tmp_path)).text


def test_every_chart_is_drawn(finished: Path) -> None:
    labels = re.findall(r'role="img" aria-label="([^"]*)"', write_report(finished).read_text())
    assert labels == [
        "Mean reward by step",
        "Loss by step",
        "Staleness by step",
        "Mismatch by step",
        "Seconds of each part of a step",
        "Who did what when: The last 12 of 60 steps",
        "Version held by each explorer by step",
        "Seconds of each publish and load by version",
        "Bytes of each version",
        "Seconds of each checkpoint by step",
    ]


def change(run: Path, values: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write other values into the lines of metrics.jsonl."""
    lines = [values(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


LEARNT = {
    **{"val/reward/mean": "Validation", "reference/k3_kl": "KL", "actor/kl_loss": "KL", "grad_norm": "Gradient norm"},
    **{"response_length/mean": "Response length", "response_length/truncated": "Truncated and flat"},
    **{"reward/flat_groups": "Truncated and flat", "actor/pg_clipfrac": "Clip fraction"},
    **{"actor/entropy_loss": "Entropy", "lr": "Learning rate", "staleness/mean": "Staleness"},
}


def test_all_that_was_learned_comes_before_time_memory_and_sync(tmp_path: Path) -> None:
    run = synthetic.whole_run(tmp_path, total=4)
    change(run, lambda line: {**line, **{name: line["step"] / (7 + len(name)) for name in LEARNT}})
    titles = re.findall(r"<h2>([^<]*)</h2>", write_report(run).read_text())
    assert titles[0] == "Reward"
    assert set(titles[: titles.index("Where a step&#39;s time goes")]) >= set(LEARNT.values())


def test_constant_metrics_share_a_card(tmp_path: Path) -> None:
    run = synthetic.whole_run(tmp_path, total=4)
    change(run, lambda line: {**line, "lr": 0.001, "actor/pg_clipfrac": 0})
    words = "Constant Clip fraction by step: 0 throughout, from step 1 to 4. Learning rate by step: 0.001 throughout"
    assert words in Page(write_report(run)).text


def test_the_tile_of_the_validation_names_the_best(tmp_path: Path) -> None:
    run = synthetic.whole_run(tmp_path, total=4)
    change(run, lambda line: {**line, "val/reward/mean": line["step"] % 3 / 4})
    assert "Validation 0.250 from 0.250; best 0.500 at step 2" in Page(write_report(run)).text


def test_figures_of_sync_checkpoints_and_memory_fold(finished: Path) -> None:
    page = write_report(finished).read_text()
    (folded,) = re.findall(
        r"<summary>Figures of sync, checkpoints and memory</summary>(.*?)</details>", page, re.DOTALL
    )
    for label in ("Blocked by publish", "Peak, trainer"):
        assert page.count(f"<dt>{label}</dt>") == folded.count(f"<dt>{label}</dt>") == 1
    assert "<dt>Reward</dt>" in page.replace(folded, "")


def test_the_header_names_model_task_algorithm_and_rate(tmp_path: Path) -> None:
    run = synthetic.whole_run(tmp_path, total=2)
    config = run / ".hydra" / "config.yaml"
    more = "task:\n  path: gsm8k/train.jsonl\nmodel:\n  path: /models/Qwen3-0.6B\n  lora:\n    rank: 16\n"
    written = config.read_text().replace("algorithm:\n", "algorithm:\n  kind: grpo\n")
    config.write_text(written.replace("lr: 0.001", "lr: 0.001\n  lr_scheduler: cosine") + more)
    page = write_report(run)
    assert "<title>copy_digits, gsm8k, Qwen3-0.6B: completed</title>" in page.read_text()
    assert "model Qwen3-0.6B, LoRA of rank 16 task gsm8k algorithm grpo rate 0.001, cosine backend" in Page(page).text


def test_a_resumed_run_says_when_it_was_first_started(troubled: Path) -> None:
    text = Page(write_report(troubled)).text
    first, second = (json.loads((troubled / "run.json").read_text())["attempts"][at]["started"] for at in (0, 1))
    assert f"started {units.moment(first)} resumed {units.moment(second)} from step 20" in text


def test_the_main_figure_of_a_supervised_run_is_its_loss(tmp_path: Path) -> None:
    clock = Clock()
    synthetic.hydra(tmp_path, ["algorithm=sft"])
    with synthetic.recording(tmp_path, clock) as recorder:
        for step in (1, 2, 3, 4):
            recorder.metrics(step, {"loss": 4 / step, "val/loss": 5 / step, "timing/step": 1.0})
        recorder.finish("completed")
    text = Page(write_report(tmp_path)).text
    assert "Steps 4 of 60 1 s each, median Loss 1.167 mean of 2 steps, from 3 Validation loss 1.250" in text
    for words in ("Reward", "explorers 2", "Versions", "sync memory", "Samples"):
        assert words not in text


def test_no_chart_is_wider_than_a_phone(finished: Path) -> None:
    page = write_report(finished).read_text()
    assert set(re.findall(r'<svg viewBox="0 0 (\d+) 250"', page)) == {"560"}


def test_a_name_of_the_command_and_of_the_overrides_is_broken_at_its_joints(tmp_path: Path) -> None:
    synthetic.hydra(tmp_path, ["task.validation.path=other.jsonl"])
    with synthetic.recording(tmp_path, Clock()) as recorder:
        recorder.finish("completed")
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "command": "run trainer.lr=1"}))
    page = write_report(tmp_path).read_text()
    assert "<code>run trainer.<wbr>lr=<wbr>1</code>" in page
    assert "<code>task.<wbr>validation.<wbr>path=<wbr>other.<wbr>jsonl</code>" in page


def test_no_two_curves_of_the_reward_have_the_same_colour(finished: Path) -> None:
    page = write_report(finished).read_text()
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page, re.DOTALL)
    assert legend is not None
    assert len(set(re.findall(r'stroke="([^"]*)"', legend[1]))) == 2


def test_the_texts_of_a_run_are_never_markup(troubled: Path) -> None:
    page = Page(write_report(troubled))
    assert page.elements.count("script") == 1
    assert "memory" not in page.elements
    assert "<script>alert(1)</script>" in page.text
    assert "rank 1 & its <memory>" in page.text
    assert "<b>x</b>" in page.text


def test_a_failed_run_says_why_and_shows_its_attempts(troubled: Path) -> None:
    text = Page(write_report(troubled)).text
    assert "✕ failed" in text
    assert "Why it ended rank 1 & its <memory>" in text
    assert re.search(r"Attempts .* 0 ❚❚ interrupted the beginning .* 1 ✕ failed step 20", text)
    assert "resumed" in text


def test_weights_that_are_not_the_published_ones_stand_at_the_top_and_in_the_table(troubled: Path) -> None:
    text = Page(write_report(troubled)).text
    assert "explorer-0 loaded version 20: deadbeefdeadbeef" in text
    assert "✕ explorer-0" in text
    assert "Digests 1 wrong" in text


def test_loads_of_one_version_may_lack_a_time_and_a_digest(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event("publish", **synthetic.publish(1)))
        recorder.event(synthetic.event("load", **synthetic.load(1, "explorer-0", paused_s=None, digest=None)))
        recorder.event(synthetic.event("load", **synthetic.load(1, "explorer-1")))
        recorder.event(synthetic.event("load", **synthetic.load(0, "explorer-1")))
    assert re.search(r"explorer-0 \S+ ms \(not checked\), ✓ explorer-1", Page(write_report(tmp_path)).text)


def test_deltas_say_their_codec_and_what_changed(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event("publish", **synthetic.publish(0)))
        for version, changed in ((1, 0.007), (2, 0.012)):
            fields = synthetic.publish(version, codec="class_gap", changed=changed)
            recorder.event(synthetic.event("publish", **fields))
    page = write_report(tmp_path)
    assert 'aria-label="Share of the elements that each version changed"' in page.read_text()
    text = Page(page).text
    assert "memory, full " in text
    assert "memory, delta (class_gap, 0.7 % changed)" in text


@pytest.fixture
def by_deltas(tmp_path: Path) -> Path:
    """Seven versions of 1 GB, of which a delta of 20 MB takes 0.6 s to encode and 0.2 s to apply."""
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event("publish", **synthetic.publish(0, bytes_full=10**9)))
        for version in range(1, 8):
            shares = {"embeddings": 0, **{str(layer): 1000 * version + 500 * layer for layer in range(12)}, "<b>": 40}
            made = {"codec": "class_gap", "changed": 0.007, "bytes_full": 10**9, "encode_s": 0.6, "changed_ppm": shares}
            recorder.event(synthetic.event("publish", **synthetic.publish(version, **made)))
            taken = synthetic.load(version, bytes=20_000_000, apply_s=0.2)
            recorder.event(synthetic.event("load", **taken))
    return tmp_path


def test_the_layers_that_change_are_drawn_for_each_third_of_a_run(by_deltas: Path) -> None:
    page = write_report(by_deltas)
    written = page.read_text()
    assert 'aria-label="Share of each layer&#x27;s elements that changed" data-x="layer"' in written
    text = Page(page).text
    assert "versions 1-2, embeddings 0, <b> 0.004" in text
    assert "versions 3-4" in text
    assert "versions 5-7" in text
    assert 'data-values="0 0.15|1 0.2|2 0.25|' in written


def test_the_page_tells_the_link_below_which_deltas_pay(by_deltas: Path) -> None:
    words = "Deltas pay over a link of less than 1.23 GB/s: a delta has 20 MB instead of 1 GB, and takes 600 ms to"
    assert words in Page(write_report(by_deltas)).text


def test_the_json_of_a_run_has_its_layers_and_the_link_below_which_deltas_pay(by_deltas: Path) -> None:
    found = json.loads(render_json(by_deltas))["deltas"]
    assert found["pays_below"] == pytest.approx(0.98e9 / 0.8)
    assert found["by_layer"]["5-7"]["11"] == pytest.approx(0.0115)


@pytest.mark.parametrize("odd", [{"9" * 400: 5}, {"": 5}, {"others": 5}, {}])
def test_a_page_is_made_whatever_the_layers(tmp_path: Path, odd: dict[str, int]) -> None:
    with synthetic.recording(tmp_path) as recorder:
        fields = synthetic.publish(1, codec="sparse", changed=0.5, encode_s=0.0, changed_ppm=odd)
        recorder.event(synthetic.event("publish", **fields))
    assert "delta (sparse" in Page(write_report(tmp_path)).text


def test_deltas_of_an_earlier_release_have_neither_layers_nor_a_link(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event("publish", **synthetic.publish(1, codec="sparse", changed=0.5)))
        recorder.event(synthetic.event("load", **synthetic.load(1, bytes=5)))
    text = Page(write_report(tmp_path)).text
    assert "delta (sparse" in text
    assert "by layer" not in text
    assert "Deltas pay" not in text


def test_totals_of_a_step_are_no_part_of_it(finished: Path) -> None:
    run = load(finished)
    assert isinstance(run, Run)
    steps, parts = step_parts(run)
    assert list(parts) == ["generate", "train", "publish", "save"]
    assert len(steps) == len(parts["save"]) == 60


def test_the_smallest_of_many_parts_are_one() -> None:
    run = Run(path=Path("x"), metrics=[{"step": 1, **{f"timing/{n}": float(n) for n in range(1, 12)}}])
    _, parts = step_parts(run)
    assert list(parts) == ["11", "10", "9", "8", "7", "6", "5", "4 others"]
    assert parts["4 others"] == [1.0 + 2.0 + 3.0 + 4.0]


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    assert smooth([(1.0, 2.0), (2.0, None), (3.0, 4.0), (4.0, 6.0)], window=2) == [
        (1.0, 2.0),
        (2.0, 2.0),
        (3.0, 3.0),
        (4.0, 5.0),
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0] * 12, 10), ([1.0] * 9, None), ([0.0] * 10 + [1.0] * 10, 19), ([], None)]
)
def test_a_target_is_reached_by_the_mean_of_ten_steps(rewards: list[float], expected: int | None) -> None:
    metrics = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    assert steps_to(Run(path=Path("x"), metrics=metrics)) == expected


def test_a_run_that_still_goes_on_is_running_and_one_that_nobody_holds_is_not(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path) as recorder:
        synthetic.steps(recorder, Clock(), 1, 3)
        assert "▶ running" in Page(write_report(tmp_path)).text
        killed = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(killed)
    text = Page(write_report(tmp_path)).text
    assert "❚❚ interrupted" in text
    assert "no process holds the folder" in text


def test_a_run_that_never_started_has_a_page(tmp_path: Path) -> None:
    synthetic.hydra(tmp_path, ["sync=memory"])
    text = Page(write_report(tmp_path)).text
    for words in ("○ not started", "There is no run.json", "No step has recorded a reward.", "Overrides: sync=memory"):
        assert words in text


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    with synthetic.recording(tmp_path):
        text = Page(write_report(tmp_path)).text
    for words in ("No step has recorded a reward.", "No checkpoint has been committed.", "Digests not checked"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "nonsense\n{}\n"),
        ("events.jsonl", "nonsense\n{}\n"),
        ("events.jsonl", '{"event": "publish"}\n{"event": "load", "version": 1}\n{"event": "dance"}\n{"no": 1}\n'),
        ("metrics.jsonl", '{"loss": 1}\n{"step": 1, "reward/mean": "high", "timing/a": null}\n'),
        ("run.json", "[]"),
        ("run.json", '{"attempt": 0, "attempts": null, "packages": null, "git": null}'),
        ("summary.json", "{"),
        ("summary.json", '{"peak_memory": {"driver": [1]}}'),
        ("run.json", '{"attempt": 0, "attempts": [{"attempt": 0, "resumed_from": "x"}]}'),
        ("events.jsonl", '{"event": "commit", "step": 1, "bytes": {}, "blocked_s": "x", "total_s": [], "time": []}\n'),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}\n"),
        ("samples.jsonl", "nonsense\n{}\n"),
        ("samples.jsonl", '{"step": 1}\n{"step": 1, "spans": [1]}\n{"step": "x", "spans": []}\n{"spans": null}\n'),
        ("samples.jsonl", '{"step": 1, "spans": [], "reward": "high", "tokens": [], "text": 5}\n'),
        (".hydra/config.yaml", "a: ${oc.nothing:x}\nb: ${missing}\n"),
        (".hydra/config.yaml", "a: [\n"),
        (".hydra/config.yaml", "- 1\n"),
        (".hydra/overrides.yaml", "a: [\n"),
    ],
)
@pytest.mark.few(6)
def test_a_damaged_file_costs_only_its_own_part(tmp_path: Path, name: str, content: str) -> None:
    synthetic.whole_run(tmp_path, total=12)
    (tmp_path / name).write_text(content)
    text = Page(write_report(tmp_path)).text
    assert "Environment" in text
    assert render_table(tmp_path, 80)


def test_what_could_not_be_read_is_named(tmp_path: Path) -> None:
    synthetic.whole_run(tmp_path, total=2)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    words = "metrics.jsonl could not be read and is left out"
    assert words in Page(write_report(tmp_path)).text
    assert words in " ".join(render_table(tmp_path, 80).split())


def test_thousands_of_versions_make_a_page_of_bearable_size(tmp_path: Path) -> None:
    clock = Clock()
    with synthetic.recording(tmp_path, clock) as recorder:
        for version in range(3000):
            recorder.event(synthetic.event("publish", **synthetic.publish(version)))
    page = write_report(tmp_path)
    assert page.stat().st_size < 1_500_000
    assert "The 2600 older ones are in events.jsonl." in Page(page).text


@pytest.mark.parametrize("inside", ["", "file.txt"])
def test_a_folder_without_a_run_is_a_configuration_error(tmp_path: Path, inside: str) -> None:
    if inside:
        (tmp_path / inside).write_text("")
    for function in (write_report, render_table):
        with pytest.raises(ConfigError, match="neither a run"):
            function(tmp_path)


def test_what_is_no_folder_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        write_report(tmp_path / "none")


def test_a_sweep_compares_its_runs_by_what_differs(sweep: Path) -> None:
    page = Page(write_report(sweep))
    text = page.text
    assert "the same in all: sync=memory" in text
    assert "Runs 3 2 completed" in text
    assert re.search(r"0 trainer\.lr=1e-3 ✓ completed 60/60 ★ 0\.956 ± 0\.010 48 2 min 30 s", text)
    assert re.search(r"1 trainer\.lr=3e-3 ✓ completed 12/12 0\.\d+ ± \S+ - 29\.8 s", text)
    assert re.search(r"10 trainer\.lr=9 ○ not started 0/60", text)
    assert "10: There is no run.json" in text


def test_a_sweep_without_the_target_has_no_tile_of_it(sweep: Path, tmp_path: Path) -> None:
    assert "Fewest steps to 0.9 48" in Page(write_report(sweep)).text
    synthetic.whole_run(tmp_path / "short" / "0", total=12, overrides=["sync=memory"])
    assert "Fewest steps" not in Page(write_report(tmp_path / "short")).text


def test_a_sweep_links_the_pages_that_there_are(sweep: Path) -> None:
    assert Page(write_report(sweep)).addresses == ["0/report.html", "1/report.html"] * 2


def test_a_sweep_lays_the_reward_curves_over_each_other(sweep: Path) -> None:
    page = write_report(sweep).read_text()
    assert page.count("<polyline") == 2 * 2  # by step, and by wall time
    assert "0: trainer.lr=1e-3" in page


def test_the_table_of_a_run_is_plain_text(finished: Path) -> None:
    text = render_table(finished, 80)
    assert all(line.isprintable() for line in text.splitlines())
    for words in ("completed, 60 of 60 steps", "0.083 -> 0.956", "steps 50, 60 kept", "peak, trainer"):
        assert words in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.few(2)
def test_the_table_of_a_sweep_keeps_to_the_width_and_to_its_main_columns(sweep: Path, width: int) -> None:
    lines = render_table(sweep, width).splitlines()
    (command,) = (line for line in lines if line.startswith("trinity-sync reproduce "))
    assert command.endswith("/0"), "a command stays whole"
    assert max(len(line) for line in lines if line != command) <= max(width, 71)
    assert lines[0].split()[:5] == ["Job", "Overrides", "Status", "Steps", "Reward"]
    assert re.findall(r"^(\d+) ", "\n".join(lines), re.MULTILINE) == ["0", "1", "10"]


def test_a_wide_table_has_every_column_and_the_spreads(sweep: Path) -> None:
    head, _, job, spreads, *_ = render_table(sweep, 300).splitlines()
    absent = {"loss", "validation", "validation_loss"}
    assert [column.key for column in COLUMNS if column.title not in head] == sorted(absent)
    assert "=4.04 ms" in job
    assert "p95 5.98 ms" in spreads
    assert "p5 13.5" in spreads
    assert "Pause" not in render_table(sweep, 180)
    assert "p95 5.98 ms" not in render_table(sweep, 100)


def test_the_report_has_the_rows_of_the_task(tmp_path: Path) -> None:
    rows = {"rows": 5000, "too_long": 12, "longest": 2048, "policy": "filter"}
    with synthetic.recording(tmp_path) as recorder:
        recorder.event(synthetic.event("rows", **rows))
    assert json.loads(render_json(tmp_path))["rows"] == rows


def test_the_summary_on_disk_and_the_page_agree(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    run = load(finished)
    assert isinstance(run, Run)
    assert run.summary == summary
