"""A retention policy, a sync mode and a backend of a package outside the tree, `tests/guest`, in one real run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.runs import ROOT, SMALL, Run, resume, start
from trinity_sync.config.user_record import FILE

GUEST = ROOT / "tests" / "guest"
BYTES_PER_S = 2**20
OWN = (
    *("retention=[keep_best_of_each]", "retention.policies.keep_best_of_each.window=2"),
    *("sync=paced", "sync.mb_per_s=1", "backend=wrapped", "backend.unit_params=5000"),
    *("trainer.steps=4", "checkpoint.interval=1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Four steps. Who resumes them finds the package, too."""
    folder = tmp_path_factory.mktemp("guest") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(GUEST), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
        arguments = ("--config-dir", str(GUEST / "conf"), *SMALL, *OWN, f"hydra.run.dir={folder}")
        run = start(folder, *arguments, command=[str(ROOT / "launch.py")]).finish()
        assert run.code == 0, run.output
        yield run


def best_of_each(run: Run) -> set[int]:
    """Steps with the largest reward of each two, of equals the newer."""
    rated = [(line["reward/mean"], line["step"]) for line in run.lines("metrics.jsonl")]
    return {max(rated[first : first + 2])[1] for first in range(0, len(rated), 2)}


@pytest.mark.all
def test_all_three_are_at_work(run: Run) -> None:
    assert set(run.manifests) == best_of_each(run) | {4}
    assert {event["reason"] for event in run.events("prune")} == {"not kept by KeepBestOfEach"}
    assert {event["mode"] for event in run.events("publish")} == {"paced"}
    loads = run.events("load")
    # the second half of the bytes, that of the second rank, waits until the first has had its time
    assert len(loads) == 5
    assert min(load["total_s"] - load["bytes"] * 0.4 / BYTES_PER_S for load in loads) > 0


@pytest.mark.all  # tests/cli asks the same of a run that is a stand-in
def test_a_resume_runs_them_only_where_they_are_allowed(run: Run) -> None:
    before = run.manifests
    (run.folder / ".hydra" / FILE).unlink()  # as of a run that somebody else has begun
    refused = resume(run.folder)
    assert refused.code == 2
    assert "backend._target_ is guest.backend.WrappedOption in the saved settings" in refused.output
    assert "add --allow-target guest" in refused.output
    assert refused.manifests == before
    resumed = resume(run.folder, "trainer.steps=6", "--allow-target", "guest")
    assert resumed.code == 0, resumed.output
    assert set(resumed.manifests) == best_of_each(resumed) | {6}
    assert {event["mode"] for event in resumed.events("publish")} == {"paced"}
