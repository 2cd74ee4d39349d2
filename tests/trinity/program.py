"""A Trinity-RFT program, once per mode and schedule, on our classes or on Trinity-RFT's own::

    TRINITY_TEST_CLASSES=ours PYTHONPATH=FOLDER-OF-TRINITY-RFT:. python -m tests.trinity.program FOLDER memory-fixed ...

Writes what trainer and explorer did as JSON, a file for each scenario. See `stand_ins`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from trinity.common.config import Config
from trinity.common.constants import SyncMethod, SyncStyle

from tests import local_ray
from tests.trinity.stand_ins import LoopExplorer, LoopTrainer, Synchronizer
from tests.trinity.steps import STEPS

LIMIT = 300.0
"""Of each call; the processes of a scenario import torch and Trinity-RFT, which takes a busy machine minutes."""


def config_of(scenario: str, folder: Path) -> Config:
    method, style = scenario.split("-", 1)
    config = Config()
    config.ray_namespace = config.synchronizer.ray_namespace = f"trinity/{scenario}"
    config.checkpoint_job_dir = str(folder)
    config.monitor.monitor_type, config.monitor.cache_dir = "tensorboard", str(folder / "monitor")
    config.synchronizer.sync_method = SyncMethod(method)
    config.synchronizer.sync_style = SyncStyle(style)
    config.synchronizer.explorer_sync_interval = config.synchronizer.trainer_sync_interval = 1
    config.synchronizer.explorer_world_size = 1
    config.synchronizer.sync_timeout = 60
    config.trainer.total_steps, config.trainer.save_interval = STEPS, 2
    config.algorithm.sample_strategy, config.algorithm.sample_strategy_args = "tests.trinity.stand_ins.Sampler", {}
    # An explorer that is woken without a version makes a batch more.
    config.buffer.total_steps = STEPS if style == "fixed" else 100
    return config


def run(config: Config) -> dict[str, Any]:
    """As `trinity run` in mode "both"."""
    explorer, trainer = LoopExplorer.get_actor(config), LoopTrainer.get_actor(config)
    ray.get([explorer.prepare.remote(), trainer.prepare.remote()], timeout=LIMIT)
    nccl = config.synchronizer.sync_method == SyncMethod.NCCL
    if nccl:
        synchronizer = Synchronizer.get_actor(namespace=config.ray_namespace)
        ray.get(synchronizer.coordinate_weight_sync_setup.remote(), timeout=LIMIT)
    ray.get([explorer.sync_weight.remote(), trainer.sync_weight.remote()], timeout=LIMIT)
    ended = ray.get([explorer.explore.remote(), trainer.train.remote()], timeout=LIMIT)
    if nccl:
        ray.get(synchronizer.coordinate_weight_sync_teardown.remote(), timeout=LIMIT)
    told = ray.get([explorer.told.remote(), trainer.told.remote()], timeout=LIMIT)
    return {"ended": ended, "explorer": told[0], "trainer": told[1]}


def main(folder: Path, scenarios: list[str]) -> None:
    with local_ray.running():
        for scenario in scenarios:
            print(f"{time.strftime('%X')} {scenario}", flush=True)
            done = run(config_of(scenario, folder / scenario))
            (folder / f"{scenario}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
