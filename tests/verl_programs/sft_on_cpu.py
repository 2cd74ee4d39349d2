"""verl's own SFT trainer on CPUs, for `torch.distributed.run`: nothing of it is changed but how the ranks meet, for
verl asks torch for two backends of one device there, which torch refuses.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
import verl.utils.distributed as verl_distributed


def meet(timeout_second: float = 600) -> tuple[int, int, int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_second), rank=rank, world_size=world)
    return int(os.environ["LOCAL_RANK"]), rank, world


if __name__ == "__main__":
    verl_distributed.initialize_global_process_group = meet
    from verl.trainer import sft_trainer

    sft_trainer.main()
