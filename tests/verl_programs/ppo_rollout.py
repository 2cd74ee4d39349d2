"""What stands in for vLLM's server in verl's PPO program on CPUs, on which that was not tried: a rollout named
`transformers`, registered with verl as any other is. Named by `VERL_USE_EXTERNAL_MODULES`, after `on_cpu`.

verl's: when weights move and how, replicas, load balancer, agent loops. The test's: how tokens come of weights. Each
version that arrives is also a file in `VERSIONS`, for the test to look at.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

NAME = "transformers"
VERSIONS = "ROLLOUT_VERSIONS"
"""The variable that names the folder."""

_ACTOR = "transformers_server_{}"


class Server:
    """Generates with a model of transformers; an actor of Ray."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._step: int | None = None

    async def load(self, state: dict[str, Any], step: int) -> None:
        import torch

        own = self._model.state_dict()
        assert set(own) - set(state) <= {"lm_head.weight"}  # which is the embedding
        for name, tensor in state.items():
            own[name].copy_(tensor)
        self._step = step
        path = Path(os.environ[VERSIONS]) / f"version_{step}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        import torch
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(0)
        step, limit = self._step, sampling_params.get("max_tokens") or 8
        tokens = torch.tensor([list(prompt_ids)])
        log_probs = []
        with torch.no_grad():
            for _number in range(min(limit, 8)):
                scores = self._model(tokens).logits[0, -1].float().log_softmax(-1)
                token = torch.multinomial(scores.exp(), 1)
                log_probs.append(float(scores[token]))
                tokens = torch.cat((tokens, token[None]), 1)
        made = tokens[0, len(prompt_ids) :].tolist()
        return TokenOutput(
            token_ids=made, log_probs=log_probs, stop_reason="completed", extra_fields={"global_steps": step}
        )

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def _replica() -> type:
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self) -> None:
            name = _ACTOR.format(self.replica_rank)
            server = (
                ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=64).remote(self.model_config["path"])
            )
            self.servers, self._server_handle, self._server_address = [server], server, name

    return Replica


def __getattr__(name: str) -> Any:
    """verl asks for the class of `Adapter` by this module's name."""
    if name != "Adapter":
        raise AttributeError(name)
    import ray
    from verl.workers.rollout.base import BaseRollout

    class Adapter(BaseRollout):
        """Hands the weights on, where they arrive: in the trainer's rank, or in verl's worker beside the server."""

        def __init__(self, *args: Any, replica_rank: int = -1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
            self.is_leader_rank = True

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, global_steps: int, **_: Any) -> None:
            import torch

            def whole(tensor: Any) -> Any:
                return tensor.detach().to("cpu", torch.bfloat16, copy=True)

            if hasattr(weights, "__aiter__"):
                state = {name: whole(tensor) async for name, tensor in weights}
            else:
                state = {name: whole(tensor) for name, tensor in weights}
            await ray.get_actor(_ACTOR.format(self.replica_rank)).load.remote(state, global_steps)

    globals()[name] = Adapter
    return Adapter


def _replicas(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register(NAME, _replica)


def _adapters(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Adapter"


def _groups(module: ModuleType) -> None:
    """verl asks for GPUs for a rollout of its own, whatever its pool has, and looks for them before."""
    verls = module.RayWorkerGroup.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **{**kwargs, "use_gpu": False})

    module.RayWorkerGroup.__init__ = init
    module.ResourcePoolManager._check_resource_available = lambda _: None  # counts GPUs


register_post_import_hook(_replicas, "verl.workers.rollout.replica")
register_post_import_hook(_adapters, "verl.workers.rollout.base")
register_post_import_hook(_groups, "verl.single_controller.ray.base")
