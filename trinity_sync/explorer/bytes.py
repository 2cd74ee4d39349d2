"""The engine of `explorer=bytes`: holds weights and generates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trinity_sync.config import dtype_name
from trinity_sync.errors import RunError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.models.shapes import adapter_list, empty_model, lora_of
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.weights.tensors import hold_fp32, kept_by_class, to_torch, version_tensors
from trinity_sync.weights.wire import kept_names


class BytesEngine(RolloutEngine):
    """The weights of a model, laid out as transformers holds them, or of an adapter; on the GPU if there is one.
    `model_path`: folder of the model, as `BytesOption.make_model` writes it. `dtype`, `keep_fp32`: as for `TextEngine`.
    `settings`: of engines that generate; not used.
    """

    def __init__(
        self, model_path: str, *, dtype: str, keep_fp32: Sequence[str] | None = None, **settings: object
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        folder, kind = Path(model_path), to_torch(dtype_name(dtype))
        lora = lora_of(folder)
        model = empty_model(folder, kind, "meta" if lora else device)
        if lora:
            saved = adapter_list(model, **lora)
            whole = kept_names(keep_fp32 or (), saved)
            self._destinations = {
                name: torch.empty(tensor.shape, dtype=torch.float32 if name in whole else kind, device=device)
                for name, tensor in saved.items()
            }
        else:
            hold_fp32(model, kept_by_class(model, dtype_name(dtype)) if keep_fp32 is None else keep_fp32)
            self._destinations = version_tensors(model)

    def destinations(self) -> dict[str, torch.Tensor]:
        return self._destinations

    def after_load(self) -> None:
        """Do nothing: nothing is computed with the weights."""

    def generate(self, *args: object, **kwargs: object) -> SampleBatch:
        raise RunError("explorer=bytes holds weights only and generates nothing; choose another explorer")
