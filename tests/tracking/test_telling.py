"""The lines of driver.log, as a user reads them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tracking import synthetic
from tests.tracking.test_recorder import EXAMPLES
from trinity_sync.tracking.events import EVENTS
from trinity_sync.tracking.run_end import event_text, step_text

LINES: list[tuple[str, dict[str, Any], str]] = [
    (
        "generate",
        {"step": 4, "explorer": "explorer-1", "version": 3, "began": 1.0, "total_s": 0.5},
        "explorer-1 generated for step 4 with version 3 in 500 ms",
    ),
    ("phase", {"what": "starting Ray"}, "starting Ray"),
    ("save", {"step": 3}, "checkpoint of step 3 started"),
    (
        "rows",
        {"rows": 5000, "too_long": 12, "longest": 2048, "policy": "filter"},
        "5000 rows read, the longest of 2048 tokens; 12 too long (task.too_long=filter)",
    ),
    (
        "publish",
        {"version": 12, "mode": "memory", "bytes_moved": 1_200_000_000, "total_s": 0.19, "blocked_s": 0.0013}
        | {"encoding": "full", "bytes_full": 1, "digest": "ab12"},
        "version 12 published by memory: 1.2 GB in 190 ms, trainer blocked 1.3 ms, digest ab12",
    ),
    (
        "load",
        {"version": 12, "explorer": "explorer-0", "total_s": 0.15, "paused_s": 0.1, "bytes": 5000, "digest": None},
        "explorer-0 loaded version 12: 5 kB in 150 ms, paused 100 ms",
    ),
    (
        "skip",
        {"version": 3, "reason": "every slot was being read"},
        "version 3 not published: every slot was being read",
    ),
    (
        "skipped_update",
        {"step": 12, "count": 2},
        "step 12: 2 of its updates skipped: the gradient is not finite",
    ),
    (
        "failed_rewards",
        {"step": 12, "count": 2, "error": "the reward function f failed"},
        "step 12: 2 responses could not be judged; first error: the reward function f failed",
    ),
    (
        "agreement",
        {"step": 1, "explorer": "explorer-0", "tokens": 358, "mean": 0.0053696, "largest": 0.0176663, "bound": 0.06},
        "step 1: log-probs of explorer-0 and of the trainer differ by 0.00537 on average, 0.0177 at most, over 358 "
        "tokens (0.06 allowed)",
    ),
    (
        "filled_batch",
        {"step": 12, "count": 3, "drawn": 40},
        "step 12: 3 of its prompts have equal rewards, because too few of the 40 answered prompts have different ones "
        "(algorithm.filter_groups)",
    ),
    (
        "heal",
        {"died": "trainer rank 1 died", "resumed_from": 4, "lost": 3, "total_s": 9.5},
        "went on after step 4, 3 steps done again, 9.5 s to the next step: trainer rank 1 died",
    ),
    (
        "heal",
        {"died": "the agent died", "resumed_from": 4, "lost": 0, "total_s": 9.5, "kept": "explorer-0, explorer-1"},
        "went on after step 4, 0 steps done again, 9.5 s to the next step, 2 explorers lived on: the agent died",
    ),
    ("all_rejected", {"step": 12}, "step 12: nothing trained: rollout_rs rejected all of its tokens"),
    (
        "commit",
        {"step": 12, "kind": "full", "bytes": 5_000_000, "total_s": 3.1, "blocked_s": 0.02, "digest": "ab12"},
        "checkpoint of step 12 committed (full): 5 MB after 3.1 s, trainer blocked 20 ms, digest ab12",
    ),
    (
        "prune",
        {"step": 4, "reason": "not kept by keep_last", "freed_bytes": 5_000_000},
        "checkpoint of step 4 deleted by retention: not kept by keep_last; 5 MB freed",
    ),
    (
        "mirror",
        {"step": 12, "url": "s3://bucket/run", "state": "copied", "bytes": 5_000_000, "total_s": 2.0},
        "checkpoint of step 12 copied to s3://bucket/run: 5 MB in 2 s",
    ),
    (
        "mirror",
        {"step": 12, "url": "s3://b", "state": "skipped", "bytes": 0, "total_s": 0.0, "reason": "retention took it"},
        "checkpoint of step 12 not copied to s3://b: retention took it",
    ),
    ("fault", {"where": "explorer-0", "error": "it died"}, "fault in explorer-0: it died"),
    (
        "fault",
        {"where": "retention", "error": "no (a.py:3)", "traceback": "T\nE"},
        "fault in retention: no (a.py:3)\nT\nE",
    ),
]


@pytest.mark.parametrize(("name", "fields", "line"), LINES)
def test_an_event_is_told_in_plain_words(name: str, fields: dict[str, Any], line: str) -> None:
    assert event_text(synthetic.event(name, time=0.0, attempt=0, **fields)) == line


def test_each_kind_of_event_has_a_line_here() -> None:
    assert {name for name, _, _ in LINES} == set(EVENTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_event_without_what_it_need_not_have_is_told(name: str) -> None:
    told = event_text(synthetic.event(name, **EXAMPLES[name]))
    assert "None" not in told
    assert "\n" not in told


def test_a_step_is_told_with_its_figures_and_where_its_seconds_went() -> None:
    values = {"reward/mean": 0.5, "loss": 0.25, "timing/generate": 0.2, "timing/step": 1.5, "lr": 1e-3}
    assert step_text(7, values) == "step 7 done in 1.5 s (generate 200 ms): reward 0.500, loss 0.250"
    assert step_text(7, {}) == "step 7 done"
    assert step_text(7, {"loss": float("nan")}) == "step 7 done"
