"""Whole runs one after the other in two programs: Ray and its processes take longer to start than such a run takes. One
is killed and resumed and ends as one that was never interrupted, one has an adapter, one goes at its own pace, three
have vLLM, one is refused and one is interrupted. Any two of mode, encoding, explorer and backend meet in one of them.
Others of their kind are in `test_resume`, `test_lora`, `test_free`, `test_vllm`, `test_deltas`, `test_agreement` and
`test_faults`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.e2e import test_agreement as agreement
from tests.e2e import test_faults as faults
from tests.e2e import test_free as free
from tests.e2e import test_lora as lora
from tests.e2e.runs import LIMIT_S, SMALL, Run, ends_of, initial_digest, start_in_one_program
from tests.e2e.test_vllm import assert_sampled_as_trained
from tests.pages import ROOT, missing, sessions
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.cli import main as cli

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all runs

# At the checkpoint of step 10, from which the killed run goes on, the explorers hold version 9.
SETTINGS = (
    "backend=fsdp2",
    "sync=nccl",
    "sync.encoding=delta",
    "backend.ranks=2",
    "explorer.replicas=1",
    "trainer.steps=20",
    "checkpoint.interval=5",
    "sync.interval=3",
    "sync.max_staleness=2",
    "trainer.lr_scheduler=cosine",
    "seed=7",
)
ROOMY = "cluster.num_cpus=8"
"""As many as any of the runs needs, so that the next one takes the Ray of the one before."""
DELTA = ("sync.encoding=delta", "trainer.lr=1e-5")
FULL = "sync.encoding=full"
ONE_RANK = ("explorer=vllm", "backend.ranks=1")
VLLM = {
    "vllm-checkpoint": (*ONE_RANK, "backend=megatron", "sync=checkpoint", FULL),
    "vllm-memory": (*ONE_RANK, "backend=fsdp2", "sync=memory", FULL),
    "vllm-nccl": (*ONE_RANK, "backend=fsdp2", "sync=nccl", *DELTA),
}
HAS_VLLM = find_spec("vllm") is not None
BEGUN = {
    "adapter": (*lora.SHORT, *DELTA),
    "free": (*free.FREE, "backend=megatron", "sync=memory", "trainer.steps=12", "checkpoint.interval=5", *DELTA),
    **(VLLM if HAS_VLLM else {}),
    "refused": (*agreement.SHARP, *agreement.LOST_ROPE),
    "interrupted": (*faults.LONG_ENOUGH, "backend=megatron", "sync=nccl", FULL),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run without an interruption and one whose program was killed with SIGKILL once step 10 was saved.
    Step 15 waits for the save of step 10.
    """
    folder = tmp_path_factory.mktemp("short")
    begin = ["run", *SMALL, *SETTINGS, ROOMY]
    started = start_in_one_program([(folder / "uninterrupted", begin), (folder / "killed", begin)])
    started.wait_for_file("checkpoints/global_step_10/manifest.json", 2 * LIMIT_S)
    os.killpg(started.process.pid, signal.SIGKILL)
    assert started.finish().code == -signal.SIGKILL
    assert Run(folder / "uninterrupted", 0, "").record["status"] == "completed"
    return folder


@pytest.fixture(scope="module")
def ended(killed: Path) -> tuple[dict[str, Run], int, Path]:
    """Runs by name, the last one interrupted by a Ctrl-C; the process id of their program, and where its Ray was."""
    agreement.put_lost_rope(killed)
    again = ["resume", str(killed / "killed")]
    commands = {"resumed": (killed / "killed", again), "completed": (killed / "killed", again)}
    commands |= {name: (killed / name, ["run", *SMALL, *chosen, ROOMY]) for name, chosen in BEGUN.items()}
    started = start_in_one_program([*commands.values()])
    ray_folder = faults.interrupt(started)
    runs = ends_of(started, [*commands.values()])
    return dict(zip(commands, runs, strict=True)), started.process.pid, ray_folder


@pytest.fixture(scope="module")
def runs(ended: tuple[dict[str, Run], int, Path]) -> dict[str, Run]:
    return ended[0]


@pytest.fixture(scope="module")
def uninterrupted(killed: Path) -> Run:
    return Run(killed / "uninterrupted", 0, "")


@pytest.fixture(scope="module")
def resumed(runs: dict[str, Run]) -> Run:
    return runs["resumed"]


@pytest.mark.all
def test_the_same_weights_have_the_same_digest_at_trainer_explorer_and_checkpoint(uninterrupted: Run) -> None:
    uninterrupted.assert_the_same_weights_everywhere([*range(0, 20, 3), 20], [*range(5, 21, 5)], explorers=1)


def test_a_resumed_run_ends_with_the_same_digests(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.digests == uninterrupted.digests
    assert resumed.manifests[20]["digest"] == uninterrupted.manifests[20]["digest"]


def test_a_resumed_run_has_the_same_metrics(uninterrupted: Run, resumed: Run) -> None:
    def figures(run: Run) -> list[tuple[float, ...]]:
        names = ("step", "reward/mean", "loss", "lr", "staleness/mean")
        return [tuple(line[name] for name in names) for line in run.lines("metrics.jsonl")]

    assert [line[0] for line in figures(resumed)] == list(range(1, 21))
    assert figures(resumed) == figures(uninterrupted)


def test_a_resume_is_a_new_attempt_of_the_same_run(uninterrupted: Run, resumed: Run) -> None:
    assert resumed.record["attempt"] == 1
    assert resumed.record["status"] == "completed"
    assert resumed.record["config_digest"] == uninterrupted.record["config_digest"]
    steps = {line["step"]: line["attempt"] for line in resumed.lines("metrics.jsonl")}
    assert steps == {step: int(step > 10) for step in range(1, 21)}


@pytest.mark.all
def test_a_resumed_run_is_reproduced_as_one_whole(resumed: Run) -> None:
    """Its first steps: the learning rate goes by all of them."""
    resumed.assert_reproduced("--steps", "6")


def test_the_tour_exports_what_a_run_has_left(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of `docs/tour.md` that need a real run and start none; `test_tour.py` has them all."""
    shutil.copytree(uninterrupted.folder, tmp_path / "outputs" / "first")
    monkeypatch.chdir(tmp_path)
    (session,) = (of for of in sessions(ROOT / "docs" / "tour.md") if all("ckpt" in command.words for command in of))
    assert [cli.main(command.words[1:]) for command in session] == [0, 0]
    assert missing(session[0].output, capsys.readouterr().out) is None


def test_a_completed_run_goes_on_with_more_steps_only(runs: dict[str, Run]) -> None:
    assert runs["completed"].code == 2
    assert "has reached step 20 of trainer.steps=20" in runs["completed"].output


def test_the_adapter_is_the_same_at_trainer_explorer_and_checkpoint(runs: dict[str, Run]) -> None:
    lora.assert_the_same_adapter_everywhere(runs["adapter"])


def test_a_free_run_trains_within_the_bound_and_never_on_a_wrong_label(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["free"]
    free.assert_sound(run, 12)
    assert run.digests[0] == initial_digest(run.folder)
    run.assert_what_is_saved_is_what_was_published(last=12)
    run.assert_timed()
    assert {load["explorer"] for load in run.events("load")} <= {"explorer-0", "explorer-1"}
    assert sorted(run.manifests) == [10, 12]
    assert not run.events("fault")
    assert run.summary["samples"]["dropped"] is not None
    # What was copied for the explorers while the ranks trained on is what was saved.
    exported = export_checkpoint(run.folder / "checkpoints" / "global_step_10", tmp_path / "exported-10")
    assert exported.digest == exported.checked == run.digests[10]


@pytest.mark.parametrize("name", ["adapter", "free", *(["vllm-nccl"] if HAS_VLLM else [])])
def test_versions_travel_as_deltas(runs: dict[str, Run], name: str) -> None:
    """Through the checkpoint folder, and out of memory. The killed run takes them with `sync=nccl`."""
    first, *others = runs[name].events("publish")
    assert [first["encoding"], *{event["encoding"] for event in others}] == ["full", "delta"]
    assert not runs[name].events("fault")
    assert any("apply_s" in load for load in runs[name].events("load"))


def test_another_function_at_the_explorers_is_refused_with_both_figures(runs: dict[str, Run]) -> None:
    run = runs["refused"]
    assert run.code == 2, run.output
    assert "error: explorer-0 and the trainer do not compute the same of version 0: their log-probs of " in run.output
    assert "where 0.1 on average is allowed (mean log-prob" in run.output
    agreement.assert_refused(run)


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
@pytest.mark.parametrize("name", VLLM)
def test_vllm_has_the_weights_of_trainer_and_checkpoint(runs: dict[str, Run], name: str) -> None:
    runs[name].assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], explorers=1)
    assert_sampled_as_trained(runs[name])


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_any_two_of_mode_encoding_explorer_and_backend_meet_in_a_run(runs: dict[str, Run]) -> None:
    """Whose explorers have loaded what the trainer has published."""
    options = {"mode": 3, "encoding": 2, "explorer": 2, "backend": 2}
    rows = []
    for run in (run for name, run in runs.items() if name != "refused"):
        cfg = OmegaConf.load(run.folder / ".hydra" / "config.yaml")
        rows.append((cfg.sync.mode, cfg.sync.encoding, cfg.explorer.kind, cfg.backend.strategy))
        loads = run.events("load")
        assert loads
        assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    for first, second in itertools.combinations(range(len(options)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert len(met) == [*options.values()][first] * [*options.values()][second], met


def test_a_ctrl_c_ends_a_run_cleanly(ended: tuple[dict[str, Run], int, Path]) -> None:
    runs, pid, ray_folder = ended
    faults.assert_interrupted(runs["interrupted"], pid, ray_folder)
