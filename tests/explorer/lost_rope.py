"""An engine that computes another function of the same weights."""

from __future__ import annotations

from typing import Any

import torch

from trinity_sync.explorer.hf import HFEngine

STRETCH = 5.0


class LostRope(HFEngine):
    """Its model has lost the frequencies of its rotary embedding."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for name, buffer in self.model.named_buffers():
            if name.endswith("inv_freq"):
                buffer.copy_(torch.full_like(buffer, 1 / STRETCH))
