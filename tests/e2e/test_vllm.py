"""`explorer=vllm` as a user runs it: every backend with every sync mode, two processes a model, deaths, learning."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from tests.e2e.runs import ROOT, Run, kill_at, launch, start
from tests.e2e.test_healing import LENGTH, assert_healed, assert_the_same_explorers, strike

BACKENDS, MODES = ("fsdp2", "megatron"), ("checkpoint", "memory", "nccl")
VLLM = ("explorer=vllm",)

CASES = [*itertools.product(BACKENDS, MODES, [1]), ("fsdp2", "memory", 2), ("fsdp2", "nccl", 2)]


def assert_sampled_as_trained(run: Run) -> None:
    """What vLLM computed with is what the trainer holds: log-probs of another model's would be some tenths off."""
    differences = [line["rollout_corr/log_prob_abs_diff"] for line in run.lines("metrics.jsonl")]
    assert max(differences) < 0.05


@pytest.mark.all  # tests/vllm tries the modes with the same workers
@pytest.mark.parametrize(("backend", "mode", "processes"), CASES)
def test_a_run_completes_with_equal_digests_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, backend: str, mode: str, processes: int
) -> None:
    run = launch(tmp_path / "run", *VLLM, f"backend={backend}", f"sync={mode}", f"explorer.tp={processes}")
    run.assert_the_same_weights_everywhere([0, 1, 2, 3], [2, 3], 1)
    assert_sampled_as_trained(run)


@pytest.mark.all
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(["model.lora.rank=8", "sync.what=merged"], id="lora"),
        pytest.param(
            [
                *("model.architecture.model_type=qwen3_moe", "+model.architecture.num_experts=4"),
                *("+model.architecture.num_experts_per_tok=2", "+model.architecture.moe_intermediate_size=64"),
            ],
            id="experts",
        ),
    ],
)
def test_a_merged_adapter_and_experts_are_rolled_out(tmp_path: Path, model: list[str]) -> None:
    run = launch(tmp_path / "run", *VLLM, *model)
    assert run.code == 0, run.output
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    assert not run.events("fault")
    assert_sampled_as_trained(run)


@pytest.mark.all
def test_samples_of_two_explorers_in_a_free_run_are_trained_on(tmp_path: Path) -> None:
    free = ("trainer.schedule=free", "sync.max_staleness=1", "explorer.replicas=2", "trainer.steps=80")
    run = launch(tmp_path / "run", *VLLM, *free)
    assert run.code == 0, run.output
    assert {made["explorer"] for made in run.events("generate")} == {"explorer-0", "explorer-1"}
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))


@pytest.mark.all
@pytest.mark.parametrize("on_update", ["keep", "abort"])
def test_versions_are_taken_while_samples_are_made(tmp_path: Path, on_update: str) -> None:
    """Few at a time, so that making them takes longer than a step."""
    free = ("trainer.schedule=free", "sync.max_staleness=4", "explorer.batch_size=16", "task.response_length=48")
    run = launch(tmp_path / "run", *VLLM, *free, f"explorer.on_update={on_update}", "trainer.steps=8", small=False)
    assert run.code == 0, run.output
    loads = run.events("load")
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    assert not run.events("fault")
    lines = run.lines("metrics.jsonl")
    mixed = sum(line["samples/mixed"] for line in lines)
    assert mixed > 0 if on_update == "keep" else mixed == 0
    made = [(one["began"], one["began"] + one["total_s"]) for one in run.events("generate")]
    assert any(began < load["began"] < ended for load in loads for began, ended in made)


@pytest.mark.all
@pytest.mark.parametrize("mode", ["memory", "nccl"])
def test_an_engine_lives_on_when_its_run_has_lost_a_rank(tmp_path: Path, mode: str) -> None:
    settings = (*VLLM, *LENGTH, f"sync={mode}", "explorer.tp=2")
    undisturbed = launch(tmp_path / "undisturbed", *settings)
    started = start(tmp_path / "run", *settings)
    strike(started, "trainer-rank-1")
    assert_healed(run := started.finish(), undisturbed, started.process.pid, "trainer rank 1 died")
    assert_the_same_explorers(run, ["explorer-0"])
    assert_sampled_as_trained(run)


def processes_of(run: Run) -> list[psutil.Process]:
    """vLLM's processes below the run's explorer, its engine core first."""
    below = psutil.Process(run.pid_of("explorer-0")).children(recursive=True)
    return sorted((one for one in below if one.name().startswith("VLLM")), key=lambda one: "Core" not in one.name())


def ended(process: psutil.Process) -> bool:
    """Whether a process is gone, be it that nobody has asked yet how it ended."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.all
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_of_vllm_that_is_killed_costs_its_explorer_which_is_started_again(
    tmp_path: Path, processes: int
) -> None:
    """Of two workers one; else the engine core, in which the only worker is."""
    steps = ("trainer.steps=12", "checkpoint.interval=0", "explorer.max_restarts=1")
    started = start(tmp_path / "run", *VLLM, *steps, f"explorer.tp={processes}")
    below: list[psutil.Process] = []

    def victim(run: Run) -> int:
        below.extend(processes_of(run))
        return below[-1].pid

    kill_at(started, "step 4/12", victim)
    run = started.finish()
    assert run.code == 0, run.output
    assert [event["where"] for event in run.events("fault")] == ["explorer-0"]
    assert all(load["digest"] == run.digests[load["version"]] for load in run.events("load"))
    assert len(below) >= processes
    assert all(map(ended, below))


@pytest.mark.all
def test_a_model_that_vllm_cannot_run_is_refused_by_its_own_words(tmp_path: Path) -> None:
    heads = launch(tmp_path / "heads", *VLLM, "model.architecture.head_dim=24")
    assert heads.code == 2
    assert "cannot run a model with heads of 24 on a CPU; it knows 32, 64" in " ".join(heads.output.split())
    memory = launch(tmp_path / "memory", *VLLM, "explorer.engine.max_num_batched_tokens=1")
    assert memory.code == 2
    assert re.search(r"explorer=vllm cannot run model\.path=.*max_num_batched_tokens", " ".join(memory.output.split()))
    unknown = launch(tmp_path / "unknown", *VLLM, "explorer.engine.max_sequences=1")
    assert unknown.code == 2
    assert "explorer.engine.max_sequences is not an argument" in unknown.output


@pytest.mark.all
def test_the_reward_rises(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "live=line", *VLLM, "trainer.steps=80", "checkpoint.interval=0", small=False)
    assert run.code == 0, run.output
    rewards = [line["reward/mean"] for line in run.lines("metrics.jsonl")]
    assert sum(rewards[-10:]) / 10 > 0.5 > 0.2 > sum(rewards[:10]) / 10


PUBLISHER = """
import sys, time
from pathlib import Path
import ray
from safetensors.torch import load_file
from trinity_sync.sync import Synchronizer, SynchronizerConfig

ray.init(address="auto", log_to_driver=False)
synchronizer = Synchronizer.get_actor(SynchronizerConfig(timeout_s=300), namespace="theirs")
print("up", flush=True)
for step, path in enumerate(sys.argv[1:]):
    synchronizer.set_model_state_dict(load_file(Path(path) / "model.safetensors"), step)
    sys.stdin.readline()
synchronizer.set_trainer_status("stopped")
sys.stdin.readline()
"""


@pytest.mark.all
def test_the_program_of_the_page_takes_versions_of_somebody_elses_trainer(tmp_path: Path) -> None:
    from tests.explorer.helpers import ARCHITECTURE
    from tests.local_ray import running
    from trinity_sync.models.architecture import make_model

    page = (ROOT / "docs/explorers.md").read_text()
    [program] = re.findall(r"```python\n(import asyncio.*?)```", page, re.DOTALL)
    models = [str(make_model(ARCHITECTURE, seed, tmp_path / str(seed))) for seed in range(2)]
    # compiling takes longer than all the rest on a CPU
    eager = program.replace('load_format="dummy"', 'load_format="dummy", enforce_eager=True')
    (tmp_path / "program.py").write_text(eager)
    with running():
        environment = os.environ | {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        trainer = subprocess.Popen([sys.executable, "-c", PUBLISHER, *models], **pipes)  # type: ignore[call-overload]
        assert trainer.stdout.readline() == "up\n"
        own = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), models[0], "theirs"],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
            text=True,
            env=environment,
        )
        told = []
        for _ in models:
            told.append(next(line.split()[0] for line in own.stdout if re.match(r"\d+ [\[(]", line)))
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        assert own.wait(120) == 0, (tmp_path / "stderr").read_text()
        trainer.stdin.write("\n")
        trainer.stdin.close()
        assert trainer.wait(60) == 0
    assert told == ["0", "1"]
