"""Actor and critic of verl under Ray, on CPUs, saved and loaded by verl's V1 PPO trainer.

verl's: the worker groups and their engines, `_save_checkpoint` and `_load_checkpoint` of the trainer with the callback,
the data loader. The test's: the loop around them, what is learned (no rollouts), and where it dies: `DIE` is a place
and a step, such as ``critic 4``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import ray
import torch
from omegaconf import OmegaConf
from tensordict.tensorclass import NonTensorData
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

STEPS, SAVE_EVERY, BATCH, LENGTH = 6, 2, 4, 12

SETTINGS = {
    "use_remove_padding": False,
    "use_dynamic_bsz": False,
    "max_token_len_per_gpu": 512,
    "micro_batch_size_per_gpu": 2,
    "temperature": 1.0,
    "global_batch_size": BATCH,
    "pad_mode": "no_padding",
    "pad_token_id": 0,
    "update_lr_scheduler": True,
}


def value_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, object]]:
    """Values are to be 1."""
    return ((model_output["values"].values() - 1) ** 2).mean(), {}


def group(model: str, model_type: str, ranks: int) -> Any:
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=model, use_remove_padding=False, override_config={"attn_implementation": "eager"}
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", use_torch_compile=False),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=STEPS),
        checkpoint_config=CheckpointConfig(),
    )
    pool = RayResourcePool(process_on_nodes=[ranks])
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(TrainingWorker), config=config),
        device_name="cpu",
    )


def batch_of(numbers: list[int]) -> Any:
    rows = [torch.arange(number, number + LENGTH) % 50 + 5 for number in numbers]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    data = tensordict_utils.get_tensordict(
        tensor_dict={
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(LENGTH) for _ in rows]),
            "loss_mask": nested([torch.ones(LENGTH) for _ in rows]),
        },
        non_tensor_dict=SETTINGS,
    )
    tensordict_utils.assign_non_tensor(data, global_token_num=NonTensorData([LENGTH] * len(rows)))
    return data


def die(place: str, step: int, *processes: int) -> None:
    if os.environ.get("DIE") == f"{place} {step}":
        for pid in processes or (os.getpid(),):
            psutil.Process(pid).send_signal(signal.SIGKILL)


def run(folder: Path, ranks: int) -> None:
    ray.init(num_cpus=2 * ranks, include_dashboard=False)
    actor = group(str(folder / "model"), "language_model", ranks)
    critic = group(str(folder / "model"), "value_model", ranks)
    # While the workers start; what is not installed is not used where all is in step.
    sys.modules.setdefault("transfer_queue", MagicMock())
    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for made, loss in ((actor, partial(sft_loss, config=None)), (critic, value_loss)):
        made.set_loss_fn(loss_fn=loss)
        made.reset()
    of_critic = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in critic.workers])

    generator = torch.Generator().manual_seed(1)
    loader = StatefulDataLoader(
        list(range(40)), batch_size=BATCH, shuffle=True, generator=generator, collate_fn=list, num_workers=0
    )
    config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(folder / "checkpoints"),
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "del_local_ckpt_after_load": False,
                "checkpoint_callback_class": os.environ.get("CALLBACK"),
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {}}},
        }
    )
    callback = build_checkpoint_callback(config)
    trainer = SimpleNamespace(
        config=config, use_critic=True, trainer_mode="sync", actor_rollout_wg=actor, train_dataloader=loader
    )

    def save_critic(*args: Any, **kwargs: Any) -> None:
        die("critic", trainer.global_steps, *of_critic)
        critic.save_checkpoint(*args, **kwargs)
        die("data", trainer.global_steps)

    def on_save(**kwargs: Any) -> None:
        die("tracker", trainer.global_steps)
        callback.on_save(**kwargs)

    trainer.critic_wg = SimpleNamespace(save_checkpoint=save_critic, load_checkpoint=critic.load_checkpoint)
    trainer.checkpoint_callback = SimpleNamespace(on_save=on_save)

    PPOTrainer._load_checkpoint(trainer)
    with (folder / "metrics.jsonl").open("w") as log:
        for numbers in loader:
            trainer.global_steps += 1
            losses = {
                name: tensordict_utils.get(one.train_batch(batch_of(numbers)).get(), "metrics")["loss"]
                for name, one in (("actor", actor), ("critic", critic))
            }
            log.write(json.dumps({"step": trainer.global_steps, "numbers": numbers, **losses}) + "\n")
            log.flush()
            if trainer.global_steps % SAVE_EVERY == 0:
                PPOTrainer._save_checkpoint(trainer)
            if trainer.global_steps == STEPS:
                return


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
