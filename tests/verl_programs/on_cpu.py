"""What verl needs changed to run on CPUs, named by `VERL_USE_EXTERNAL_MODULES` in each of its processes: how ranks
meet, for it asks torch for two backends of one device there, which torch refuses; that Ray has no GPUs to give; and
the attention of a model of values, for verl takes flash attention whatever is asked for.
"""

from __future__ import annotations

import datetime
import os
from types import ModuleType
from typing import Any

import torch.distributed as dist
from wrapt import register_post_import_hook


def meet(timeout_second: float | None = None, backend: str | None = None) -> tuple[int, int, int]:
    """Stands in for verl's functions of torchrun's ranks and of Ray's."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        place = os.environ.get("DIST_INIT_METHOD", "env://")
        limit = datetime.timedelta(seconds=timeout_second or 600)
        dist.init_process_group("gloo", init_method=place, timeout=limit, rank=rank, world_size=world)
    return int(os.environ.get("LOCAL_RANK", 0)), rank, world


def _meet(module: ModuleType) -> None:
    for name in ("initialize_global_process_group", "initialize_global_process_group_ray"):
        setattr(module, name, meet)


def _without_gpus(module: ModuleType) -> None:
    verls = module.RayResourcePool.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **{**kwargs, "use_gpu": False, "max_colocate_count": 1})

    module.RayResourcePool.__init__ = init


def _eager(module: ModuleType) -> None:
    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
        )

    module.load_valuehead_model = load


register_post_import_hook(_eager, "verl.utils.model")
register_post_import_hook(_meet, "verl.utils.distributed")
register_post_import_hook(_without_gpus, "verl.single_controller.ray.base")
