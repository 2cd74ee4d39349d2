"""`explorer=vllm_server` as a user runs it: a server that knows of us or not, and one that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import Run, launch, start
from tests.e2e.test_healing import LENGTH, assert_the_same_explorers, strike
from tests.explorer.helpers import ARCHITECTURE
from tests.vllm.servers import PLUG_IN, RealServer, serving
from trinity_sync.models.architecture import make_model

KEY = "sk-of-the-real-server"
WAYS = {"plain": (), "plug-in": (*PLUG_IN, "--api-key", KEY)}

CASES = [("plain", "checkpoint"), ("plain", "memory"), ("plug-in", "checkpoint"), ("plug-in", "memory")]

pytestmark = pytest.mark.all  # whole runs; servers of both kinds are tried by tests/vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 7, tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def server(model: Path, tmp_path: Path, way: str) -> Iterator[RealServer]:
    with serving(model, tmp_path / "server.log", *WAYS[way]) as made:
        yield made


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", KEY)  # a server without a key does not look at it


def overrides(server: RealServer, *more: str) -> list[str]:
    chosen = ["explorer=vllm_server", f"explorer.url={server.url}", "explorer.key_env=SERVERS_KEY"]
    return [*chosen, f"model.path={server.model}", *more]


def assert_right(run: Run, mode: str, *, stale: bool = False) -> None:
    assert run.code == 0, run.output
    loads = run.events("load")
    assert loads
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    assert {publish["mode"] for publish in run.events("publish")} == {mode}
    # another model's log-probs would be some tenths off, those of stale samples a little
    limit = 0.2 if stale else 0.05
    assert max(line["rollout_corr/log_prob_abs_diff"] for line in run.lines("metrics.jsonl")) < limit


@pytest.mark.parametrize(("way", "mode"), CASES, ids="-".join)
def test_a_run_completes_with_equal_digests_at_trainer_and_explorer(
    tmp_path: Path, server: RealServer, mode: str
) -> None:
    run = launch(tmp_path / "run", *overrides(server, f"sync={mode}"))
    assert_right(run, mode)
    assert not run.events("fault")


@pytest.mark.parametrize("way", WAYS)
def test_samples_of_a_free_run_are_trained_on(tmp_path: Path, server: RealServer) -> None:
    free = ("trainer.schedule=free", "sync.max_staleness=1", "trainer.steps=30")
    assert_right(launch(tmp_path / "run", *overrides(server, *free)), "memory", stale=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_killed_costs_the_explorer_which_waits_for_it_to_come_back(
    tmp_path: Path, server: RealServer
) -> None:
    steps = ("trainer.steps=12", "checkpoint.interval=0", "explorer.max_restarts=1")
    started = start(tmp_path / "run", *overrides(server, *steps))

    started.wait_for_line("step 4/12")
    server.kill()
    server.start(wait=False)
    run = started.finish()
    assert_right(run, "memory")
    assert [event["where"] for event in run.events("fault")] == ["explorer-0"]


@pytest.mark.parametrize("way", WAYS)
def test_the_explorer_lives_on_and_gives_the_server_the_versions_of_the_next_attempt(
    tmp_path: Path, server: RealServer
) -> None:
    started = start(tmp_path / "run", *overrides(server, *LENGTH))
    strike(started, "trainer-rank-1")
    run = started.finish()
    assert_right(run, "memory")
    assert_the_same_explorers(run, ["explorer-0"])


def test_a_server_that_is_not_there_is_said(tmp_path: Path, model: Path) -> None:
    nobody = RealServer(model, tmp_path / "server.log")
    run = launch(tmp_path / "run", *overrides(nobody, "cluster.start_timeout_s=60"))
    assert run.code == 1
    assert f"the vLLM server at {nobody.url} did not come up" in " ".join(run.output.split())
