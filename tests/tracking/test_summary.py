from __future__ import annotations

import io
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.tracking import synthetic
from trinity_sync.tracking.run_end import lay_out, render_summary
from trinity_sync.tracking.summary import copies_taken, kept_checkpoints, mismatches, spread, summarise, wall_seconds

EXAMPLES = {"publish": synthetic.publish, "load": synthetic.load, "commit": synthetic.commit}


def event(name: str, **fields: Any) -> Any:
    example = EXAMPLES[name](1) if name in EXAMPLES else {}
    return synthetic.event(name, **{"attempt": 0, "time": 1.0, **example, **fields})


def metrics(rewards: list[float | None]) -> list[dict[str, Any]]:
    return [{"step": step, "attempt": 0, "time": 1.0, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]


def test_first_and_last_reward_are_means_of_ten_steps() -> None:
    summary = summarise(metrics([float(step) for step in range(1, 31)]), [], "completed", 9.0)
    assert (summary["reward_first"], summary["reward_last"], summary["steps"]) == (5.5, 25.5, 30)


@pytest.mark.parametrize(("steps", "first", "last", "each"), [(12, 3.5, 9.5, 6), (3, 1.0, 3.0, 1), (1, 1.0, 1.0, 1)])
def test_the_means_at_both_ends_of_a_short_run_do_not_overlap(
    tmp_path: Path, steps: int, first: float, last: float, each: int
) -> None:
    summary = summarise(metrics([float(step) for step in range(1, steps + 1)]), [], "completed", 9.0)
    assert (summary["reward_first"], summary["reward_last"], summary["mean_steps"]) == (first, last, each)
    words = f"means of the first and last {each} steps" if each > 1 else "the first and the last step"
    assert f"({words})" in " ".join(shown(summary, tmp_path).split())


def test_the_main_figure_of_a_run_without_rewards_is_its_loss(tmp_path: Path) -> None:
    lines = [{"step": step, "attempt": 0, "time": 1.0, "loss": 4.0 / step} for step in (1, 2, 3, 4)]
    text = shown(summarise(lines, [], "completed", 9.0), tmp_path)
    assert "loss         3 → 1.167 (means of the first and last 2 steps)\n" in text
    assert "versions" not in text


def test_steps_without_a_reward_count_for_none() -> None:
    summary = summarise(metrics([None, 1.0, None, 3.0]), [], "completed", 9.0)
    assert (summary["reward_first"], summary["reward_last"]) == (1.0, 3.0)


def test_a_run_without_anything_has_a_summary() -> None:
    summary = summarise([], [], "failed", None)
    assert (summary["steps"], summary["reward_last"], summary["digests"]) == (0, None, {})
    assert summary["sync"]["publish"]["blocked_s"] == {"median": None, "p95": None}
    assert summary["checkpoint"]["latest"] is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_median_and_p95_are_numpys(values: list[float]) -> None:
    found = spread(values)
    assert found["median"] == pytest.approx(np.percentile(values, 50))
    assert found["p95"] == pytest.approx(np.percentile(values, 95))


def test_times_and_bytes_are_of_publishes_loads_and_commits() -> None:
    events = [
        event("publish", version=1, blocked_s=1.0, total_s=4.0, bytes_full=100, bytes_moved=100),
        event("publish", version=2, blocked_s=3.0, total_s=6.0, bytes_full=100, bytes_moved=20, encoding="delta"),
        event("load", version=1, explorer="explorer-1", total_s=2.0, paused_s=0.5),
        event("load", version=2, explorer="explorer-0", total_s=4.0, paused_s=None),
        event("commit", step=2, blocked_s=0.1, total_s=7.0, bytes=500),
    ]
    summary = summarise([], events, "completed", 1.0)
    sync = summary["sync"]
    assert sync["publish"]["blocked_s"]["median"] == 2.0
    assert sync["publish"]["total_s"]["median"] == 5.0
    assert sync["load"]["total_s"]["median"] == 3.0
    assert sync["load"]["paused_s"]["median"] == 0.5
    assert (sync["bytes_full"], sync["bytes_moved"]) == (100, 60)
    assert (sync["mode"], sync["encoding"], sync["versions"], sync["loads"]) == ("memory", "delta", 2, 2)
    assert sync["explorers"] == ["explorer-0", "explorer-1"]
    assert summary["checkpoint"]["bytes"] == 500
    assert summary["checkpoint"]["total_s"]["median"] == 7.0


@pytest.mark.parametrize(
    ("published", "told"),
    [(["full"], "full"), (["full", "delta"], "delta"), (["full", "delta", "full"], "full"), ([], None)],
    ids=str,
)
def test_the_encoding_of_a_run_is_that_of_most_versions(published: list[str], told: str | None) -> None:
    """The first version of all is full."""
    events = [event("publish", version=number, encoding=encoding) for number, encoding in enumerate(published)]
    assert summarise([], events, "completed", 1.0)["sync"]["encoding"] == told


def deltas(version: int, **other: Any) -> Any:
    fields = {"bytes_full": 1_000, "encoding": "delta", "changed": 0.01, "encode_s": 0.5, "changed_ppm": {"0": 10_000}}
    return event("publish", version=version, **{**fields, **other})


def applied(version: int, nbytes: int = 20, apply_s: float = 0.2) -> Any:
    return event("load", version=version, bytes=nbytes, apply_s=apply_s, total_s=9.0)


def test_deltas_pay_below_the_rate_at_which_they_take_as_long_as_full_versions() -> None:
    events = [deltas(1), deltas(2, encode_s=0.7), deltas(3, encode_s=0.6)]
    loads = [applied(1), applied(2, 10, 0.1), applied(3, 30, 0.3)]
    found = summarise([], [*events, *loads], "completed", 1.0)["deltas"]
    assert found is not None
    assert (found["bytes"], found["encode_s"], found["apply_s"]) == (20, 0.6, 0.2)
    assert found["pays_below"] == pytest.approx((1_000 - 20) / 0.8)


def test_loads_with_a_full_version_do_not_count_for_deltas() -> None:
    events = [deltas(1), applied(1), applied(1, 1_020, 3.0), event("load", version=1, bytes=1_000)]
    found = summarise([], events, "completed", 1.0)["deltas"]
    assert found is not None
    assert (found["bytes"], found["apply_s"]) == (20, 0.2)


def test_a_run_with_full_versions_has_no_figures_of_deltas() -> None:
    events = [event("publish", version=1, bytes_full=100), event("load", version=1, bytes=100)]
    assert summarise([], events, "completed", 1.0)["deltas"] is None


def test_deltas_of_an_earlier_release_have_no_times_and_no_layers() -> None:
    events = [deltas(1, encode_s=None, changed_ppm=None), event("load", version=1, bytes=20)]
    found = summarise([], events, "completed", 1.0)["deltas"]
    assert found == {"bytes": None, "encode_s": None, "apply_s": None, "pays_below": None, "by_layer": {}}


def test_changes_by_layer_are_means_over_the_thirds_of_a_run() -> None:
    events = [deltas(version, changed_ppm={"0": 1000 * version, "others": 0}) for version in range(1, 8)]
    found = summarise([], events, "completed", 1.0)["deltas"]
    assert found is not None
    assert found["by_layer"] == {
        "1-2": {"0": 0.0015, "others": 0},
        "3-4": {"0": 0.0035, "others": 0},
        "5-7": {"0": 0.006, "others": 0},
    }


def test_a_version_that_is_published_again_counts_once_by_layer() -> None:
    events = [deltas(1), deltas(2), deltas(2, changed_ppm={"0": 500})]
    found = summarise([], events, "completed", 1.0)["deltas"]
    assert found is not None
    assert found["by_layer"] == {"1": {"0": 0.01}, "2": {"0": 0.0005}}


def test_digests_are_those_published_else_those_committed() -> None:
    events = [
        event("publish", version=10, digest="a"),
        event("commit", step=10, digest="a"),
        event("commit", step=9, digest="b"),
        event("publish", version=8, digest=None),
    ]
    assert summarise([], events, "completed", 1.0)["digests"] == {"9": "b", "10": "a"}


def test_a_load_of_other_weights_than_the_published_is_found() -> None:
    wrong = event("load", version=1, digest="other")
    events = [
        event("publish", version=1, digest="a"),
        event("load", version=1, digest="a"),
        wrong,
        event("load", version=1, digest=None),
    ]
    assert mismatches(events) == [wrong]
    assert summarise([], events, "completed", 1.0)["sync"]["mismatched"] == 1


def test_versions_of_another_size_after_a_resume_have_digests_of_their_own() -> None:
    events = [
        event("publish", version=1, digest="adapter", bytes_full=10),
        event("load", version=1, digest="adapter"),
        other := event("publish", version=2, digest="b", bytes_full=10),
        event("publish", version=1, digest="merged", bytes_full=99),
        event("load", version=1, digest="merged"),
        event("publish", version=2, digest="c", bytes_full=10),
    ]
    assert mismatches(events) == [other]


def test_a_run_at_its_own_pace_says_what_became_of_its_samples(tmp_path: Path) -> None:
    lines = [
        {
            **line,
            "samples/dropped": 16.0,
            "samples/waited_s": 0.5,
            "samples/mixed": 3.0,
            "staleness/mean": lag,
            "staleness/max": 2 * lag,
        }
        for line, lag in zip(metrics([0.1, 0.2]), (0.5, 1.0), strict=True)
    ]
    summary = summarise(lines, [event("skip", version=1, reason="r")], "completed", 1.0)
    assert summary["samples"] == {
        "dropped": 32,
        "waited_s": 1.0,
        "mixed": 6,
        "staleness_mean": 0.75,
        "staleness_max": 2.0,
    }
    assert summary["sync"]["skipped"] == 1
    text = " ".join(shown(summary, tmp_path).split())
    assert "32 dropped as over-stale, explorers waited 1 s; staleness 0.750 on average, 2 at most" in text


def test_skipped_updates_are_counted() -> None:
    lines = [{**line, "updates/skipped": count} for line, count in zip(metrics([0.1, 0.2]), (1.0, 2.0), strict=True)]
    assert summarise([*lines, *metrics([0.3])], [], "completed", 1.0)["skipped_updates"] == 3


def test_responses_that_could_not_be_judged_are_counted_and_told(tmp_path: Path) -> None:
    lines = [{**line, "reward/failed": count} for line, count in zip(metrics([0.1, 0.2]), (5.0, 4.0), strict=True)]
    summary = summarise([*lines, *metrics([0.3])], [], "completed", 1.0)
    assert summary["failed_rewards"] == 9
    assert "9 responses could not be judged: see events.jsonl" in shown(summary, tmp_path)
    assert "judged" not in shown(summarise(metrics([0.3]), [], "completed", 1.0), tmp_path)


def test_a_run_says_how_far_its_samplers_were_from_the_trainer() -> None:
    names = ("kl", "k3_kl", "log_prob_abs_diff", "log_prob_abs_diff_max")
    lines = [
        {**line, **{f"rollout_corr/{name}": value for name, value in zip(names, values, strict=True)}}
        for line, values in zip(metrics([0.1, 0.2]), ((-0.5, 0.25, 0.5, 3.0), (1.0, 0.75, 1.0, 2.0)), strict=True)
    ]
    found = summarise([*lines, *metrics([0.3])], [], "completed", 1.0)["mismatch"]
    assert found == {"kl": 0.25, "k3_kl": 0.5, "log_prob_abs_diff": 0.75, "log_prob_abs_diff_max": 3.0}
    assert set(summarise(metrics([0.1]), [], "completed", 1.0)["mismatch"].values()) == {None}


def test_a_run_in_lockstep_says_nothing_of_samples(tmp_path: Path) -> None:
    summary = summarise(metrics([0.1]), [], "completed", 1.0)
    assert summary["samples"]["dropped"] is None
    assert "dropped" not in shown(summary, tmp_path)


def test_what_was_pruned_is_not_kept_unless_it_was_saved_again() -> None:
    events = [
        event("commit", step=1),
        event("commit", step=2, kind="state_dict"),
        event("commit", step=3),
        event("prune", step=1, reason="r", freed_bytes=1),
        event("prune", step=3, reason="r", freed_bytes=1),
        event("commit", step=3),
    ]
    assert [commit.step for commit in kept_checkpoints(events)] == [2, 3]
    checkpoint = summarise([], events, "completed", 1.0)["checkpoint"]
    assert (checkpoint["kept"], checkpoint["latest"], checkpoint["pruned"]) == ([2, 3], 3, 2)


def test_only_a_full_checkpoint_is_one_to_resume_from() -> None:
    assert summarise([], [event("commit", step=2, kind="state_dict")], "failed", 1.0)["checkpoint"]["latest"] is None


def test_wall_time_is_that_of_all_attempts_and_a_killed_one_lasts_until_its_last_line() -> None:
    record = {
        "attempts": [
            {"attempt": 0, "started": 100.0, "ended": 110.0},
            {"attempt": 1, "started": 200.0, "ended": None},
            {"attempt": 2, "started": 300.0, "ended": 301.0},
        ]
    }
    assert (
        wall_seconds(record, [{"attempt": 1, "time": 205.0}], [synthetic.event("save", step=1, attempt=1, time=207.0)])
        == 18.0
    )


def shown(summary: dict[str, Any], folder: Path, *, width: int = 80, **other: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_summary(summary, folder, **other), crop=False)
    return console.file.getvalue()


def test_the_closing_text_says_how_it_went_and_what_to_do_next(tmp_path: Path) -> None:
    events = [event("publish", version=1), event("load", version=1), event("commit", step=1)]
    text = shown(summarise(metrics([0.25]), events, "completed", 61.0), tmp_path, total_steps=2)
    assert text.startswith("completed: 1 of 2 steps in 1 min 01 s\n")
    for words in (
        "0.250 → 0.250",
        "1 published (memory), 1 load by 1 explorer",
        "step 1 kept (1 saved)",
        str(tmp_path),
    ):
        assert words in text
    assert f"next         trinity-sync ckpt list {tmp_path}\n" in text


def test_a_failed_run_that_can_be_resumed_says_the_command_whole_on_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("long name " * 12)
    text = shown(summarise([], [event("commit", step=1)], "failed", 1.0), folder, error="rank 1 died")
    assert f"trinity-sync resume '{folder}'\n" in text
    assert "rank 1 died\n" in text


def test_a_run_without_a_checkpoint_is_not_told_to_resume(tmp_path: Path) -> None:
    assert "trinity-sync report" in shown(summarise([], [], "failed", 1.0), tmp_path)


def test_a_folder_below_the_working_directory_is_shown_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "folder       outputs/a\n" in shown(summarise([], [], "failed", 1.0), tmp_path / "outputs" / "a")


@given(st.text(max_size=200), st.integers(10, 100))
def test_no_text_puts_control_characters_into_the_layout(text: str, width: int) -> None:
    lines = lay_out([("name", text), ("folder", text)], width)
    assert not any(unicodedata.category(char)[0] == "C" for line in lines for piece in line for char in piece)


def test_a_command_keeps_blanks_of_other_kinds() -> None:
    command = "trinity-sync resume '日本\u3000語\xa0'"
    assert lay_out([("next", f"{command}\n")], 20) == [("next  ", f"{command} ")]


def test_copies_are_of_the_speed_beside_the_version_and_of_the_median_load() -> None:
    metrics = [{"step": step, "memcpy_gb_s": speed} for step, speed in ((1, 2.0), (2, 4.0))]
    events = [
        synthetic.event(kind, version=version, total_s=seconds, bytes_full=1e9)
        for kind, version, seconds in (
            ("publish", 0, 9.0),
            ("load", 0, 9.0),
            ("publish", 1, 0.5),
            *(("load", 1, seconds) for seconds in (1.0, 7.0, 0.5)),
            ("publish", 2, 0.25),
            ("load", 2, 0.25),
        )
    ]
    assert copies_taken(metrics, events) == pytest.approx([3.0, 2.0])
    shapes = summarise([{**line, "model/share": 0.5} for line in metrics], events, "completed", 1.0)["shapes"]
    assert shapes is not None
    assert shapes["copies"] == pytest.approx(2.5)
