"""How tokens go to their experts on a CPU, where there is no stream on which counts come to the host."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class HostAllToAll(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher, whose counts are on the host already. Its groups have to be gloo's."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on a CPU"  # else it makes one
        super().__init__(*args, **kwargs)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name, None)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
        return tokens_per_expert


def install() -> None:
    """Have layers that are made from now on use it."""
    moe_layer.MoEAlltoAllTokenDispatcher = HostAllToAll
