"""verl's PPO program as a whole, `verl.trainer.main_ppo`, with our checkpoints and our weight sync, on CPUs."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.chat_models import make_chat_model
from tests.verl_programs.ppo_rollout import NAME, VERSIONS
from tests.verl_programs.programs import PLUGIN, Program
from tests.verl_programs.test_ray import END_S, MODULES, ON_CPU, events
from tests.verl_programs.test_sft import assert_whole
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import MANIFEST, step_dir
from trinity_sync.checkpoint.folder.lock import has_no_monitor
from trinity_sync.checkpoint.memory_states import states_path
from trinity_sync.integrations.verl.vendor import CALLBACK, MEMORY_INTERVAL, SHM_DIR

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(find_spec("transfer_queue") is None, reason="verl's V1 trainer needs TransferQueue"),
]

STEPS = 6


class Ppo(Program):
    """`verl.trainer.main_ppo` with verl's V1 trainer, a rollout of its own and one rank of FSDP2."""

    def logged(self) -> dict[int, dict[str, float]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["data"] for line in lines}

    def _command(self) -> list[str]:
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        return [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"),
            f"data.train_files={self.folder}/train.parquet",
            f"data.val_files={self.folder}/train.parquet",
            *("data.train_batch_size=4", "data.dataloader_num_workers=0"),
            *("data.max_prompt_length=64", "data.max_response_length=8"),
            f"actor_rollout_ref.model.path={self.folder}/model",
            "actor_rollout_ref.model.use_remove_padding=False",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "actor_rollout_ref.hybrid_engine=False",
            *(f"{actor}.strategy=fsdp2", f"{actor}.optim.lr=1e-3"),
            *(f"{actor}.use_torch_compile=False", f"{actor}.fsdp_config.use_torch_compile=False"),
            *(f"{actor}.ppo_mini_batch_size=4", f"{actor}.ppo_micro_batch_size_per_gpu=4"),
            *(f"{rollout}.name={NAME}", f"{rollout}.n=2", f"{rollout}.agent.num_workers=1"),
            *(f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.tensor_model_parallel_size=1"),
            f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
            f"{rollout}.checkpoint_engine.backend=trinity",
            f"{rollout}.checkpoint_engine.custom_backend_module={PLUGIN[MODULES]}",
            f"+{rollout}.checkpoint_engine.engine_kwargs.trinity.mode=memory",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={Path(__file__).parent / 'ppo_reward.py'}",
            *("trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async"),
            "trainer.v1.separate_async.parameter_sync_step=1",
            *("trainer.device=cpu", "trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
            *("trainer.total_epochs=10", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1"),
            *("trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=[console,file]"),
            f"trainer.default_local_dir={self.checkpoints}",
            f"trainer.checkpoint_callback_class={CALLBACK}",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            *("ray_kwargs.ray_init.num_cpus=12", "+ray_kwargs.ray_init.include_dashboard=False"),
            f"hydra.run.dir={self.folder}/hydra",
        ]


def prepare(folder: Path) -> None:
    make_chat_model(folder / "model")
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{n}="}],
            "reward_model": {"style": "rule", "ground_truth": f"{n}"},
            "extra_info": {"index": n},
        }
        for n in range(100, 116)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")


def assert_moved(program: Program, steps: range) -> None:
    """The rollout was given what is in the checkpoints of these steps."""
    for step in steps:
        moved = torch.load(program.folder / f"versions/version_{step}.pt")
        file = step_dir(program.checkpoints, step) / "actor/model_world_size_1_rank_0.pt"
        saved = torch.load(file, weights_only=False)
        assert len(saved) > 0
        for name, tensor in saved.items():
            assert torch.equal(moved[name], tensor.to_local().bfloat16()), name


def test_a_killed_program_goes_on_and_the_rollout_has_the_weights_of_each_step(tmp_path: Path) -> None:
    """verl logs with a keyword that `logging` refuses where there is no hybrid engine, so it may not log that."""
    prepare(tmp_path)
    versions = tmp_path / "versions"
    environment = {
        **PLUGIN,
        MODULES: f"{ON_CPU},tests.verl_programs.ppo_rollout,{PLUGIN[MODULES]}",
        VERSIONS: str(versions),
        "VERL_LOGGING_LEVEL": "WARN",
    }
    program = Ppo(folder=tmp_path, environment=environment, ranks=1)
    with program.started() as running:
        committed = step_dir(program.checkpoints, 2) / MANIFEST
        running.wait_until(
            lambda: committed.exists() and (versions / "version_2.pt").exists(), "commit and version of step 2"
        )
        # Its end here is a SIGKILL of the driver, of Ray and of all workers.
    assert has_no_monitor(program.checkpoints, END_S)
    newest = max(info.step for info in catalog.scan(program.checkpoints) if info.kind is not None)
    assert 2 <= newest < STEPS
    assert_whole(program.checkpoints, [*range(1, newest + 1)])
    assert_moved(program, range(1, 3))
    shutil.rmtree(versions)
    assert program.run() == 0, program.said()
    assert f"trinity-sync: resuming from {step_dir(program.checkpoints, newest)}" in program.said()
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [*range(1, STEPS + 1)])
    assert_moved(program, range(newest, STEPS + 1))
    recorded = [step for event, step in events(program) if event == "commit"][:-1]
    # The program records a commit after the monitor has made it: a kill in between costs the event, never the step.
    assert recorded in ([*range(1, STEPS)], [step for step in range(1, STEPS) if step != newest])
    logged = program.logged()
    assert sorted(logged) == [*range(newest + 1, STEPS + 1)]
    assert {data["weight_sync/mode_memory"] for data in logged.values()} == {1}


class PpoInMemory(Ppo):
    """With one checkpoint on disk, of the last step."""

    def _command(self) -> list[str]:
        return [*super()._command(), "trainer.save_freq=100"]


def test_a_killed_program_goes_on_from_its_state_in_memory(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "shm").mkdir()
    versions = tmp_path / "versions"
    environment = {
        **PLUGIN,
        MODULES: f"{ON_CPU},tests.verl_programs.ppo_rollout,{PLUGIN[MODULES]}",
        VERSIONS: str(versions),
        "VERL_LOGGING_LEVEL": "WARN",
        MEMORY_INTERVAL: "1",
        SHM_DIR: str(tmp_path / "shm"),
    }
    program = PpoInMemory(folder=tmp_path, environment=environment, ranks=1)
    memory = states_path(program.checkpoints, tmp_path / "shm")
    with program.started() as running:
        running.wait_until((step_dir(memory, 2) / MANIFEST).exists, "state of step 2")
    assert has_no_monitor(memory, END_S)
    assert has_no_monitor(program.checkpoints, END_S)
    newest = max(info.step for info in catalog.scan(memory) if info.kind is not None)
    assert 2 <= newest < STEPS
    assert_whole(program.checkpoints, [])
    assert program.run() == 0, program.said()
    assert f"trinity-sync: resuming from {step_dir(program.checkpoints, newest)}" in program.said()
    assert has_no_monitor(program.checkpoints, END_S)
    assert_whole(program.checkpoints, [newest, STEPS])
    assert_moved(program, range(newest, newest + 1))
    assert sorted(program.logged()) == [*range(newest + 1, STEPS + 1)]
    assert not memory.exists()
