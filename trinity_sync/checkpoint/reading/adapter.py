"""LoRA adapters: their tensors under the names that peft saves, and the two together with their base.

An adapter's checkpoint does not hold its base. `merge` reads both, tensor by tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trinity_sync.checkpoint.reading.pieces import Source, TensorInfo, WeightsError
from trinity_sync.checkpoint.reading.saved_form import made_of, renamed
from trinity_sync.errors import RunError
from trinity_sync.models.files import CONFIG
from trinity_sync.weights import lora
from trinity_sync.weights.shards import listed


def adapter_form(sources: Mapping[str, Source], place: Path) -> dict[str, Source] | None:
    """Return an adapter's tensors by the names that peft saves; None: these are of no adapter.

    Args:
        sources: what is stored, by name.
        place: where, for errors.

    Raises:
        WeightsError: adapter and base are stored together.
    """
    # A model that peft has not wrapped may have layers of such names itself.
    adapter = [name for name in sources if name.startswith(lora.PREFIX) and lora.is_adapter(name)]
    if not adapter:
        return None
    if len(adapter) < len(sources):
        raise WeightsError(
            f"{place} holds a model together with a LoRA adapter, such as {adapter[0]}; merge them with verl"
        )
    return {lora.saved_name(name): sources[name] for name in sorted(adapter)}


def read_adapter_config(path: Path) -> dict[str, object]:
    """Read an ``adapter_config.json``.

    Raises:
        WeightsError: it cannot be read, or is none of LoRA.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.get("peft_type") != "LORA":
        raise WeightsError(f"{path} describes no LoRA adapter")
    return body


def merge(
    adapter: Mapping[str, Source], config: Mapping[str, object], base: Mapping[str, Source], folder: Path | None
) -> dict[str, Source]:
    """Return the tensors of the base with the adapter's products added.

    Args:
        adapter: see `adapter_form`.
        config: what the ``adapter_config.json`` says.
        base: the whole model's tensors by the names it is saved by.
        folder: with the base's config.json; None: there is none.

    Raises:
        WeightsError: the adapter is not one of this model, or not of a kind that is merged here.
    """
    try:
        scale, pairs = lora.scaling(config), lora.pairs(adapter)
    except RunError as error:
        raise WeightsError(f"the adapter cannot be merged: {error}") from error
    if folder is not None and pairs.keys() - base.keys():
        names = renamed(folder)
        pairs = {names.get(name, name): pair for name, pair in pairs.items()}
    absent = sorted(pairs.keys() - base.keys())
    if absent:
        why = next(filter(None, (_not_apart(name, base, folder) for name in absent)), None)
        raise WeightsError(why or f"the adapter belongs to another model: the base has no {listed(absent)}")
    transposed = bool(config.get("fan_in_fan_out"))
    found = dict(base)
    for name, pair in pairs.items():
        a, b = adapter[pair.a], adapter[pair.b]
        outer, inner = b.info.shape[0], a.info.shape[-1]
        shape = (inner, outer) if transposed else (outer, inner)
        if base[name].info.shape != shape:
            raise WeightsError(
                f"the adapter belongs to another model: it is for a {name} of {list(shape)}, the base has "
                f"{list(base[name].info.shape)}"
            )
        found[name] = _Merged(base[name].info, base[name], a, b, scale, transposed)
    return found


def _not_apart(name: str, base: Mapping[str, Source], folder: Path | None) -> str | None:
    """Why the base saves no tensor of this name, although its model has the layer; None: it has none."""
    layer, advice = name.removesuffix(".weight").removesuffix(".base_layer"), "export it with --adapter"
    if any(other.startswith(f"{layer}.") for other in base):
        return f"the adapter is for {layer}, which is fused experts: merge it with peft, or {advice}"
    model = made_of(folder) if folder is not None else None
    weight = None if model is None else dict(model.named_parameters(remove_duplicate=False)).get(name)
    if model is None or weight is None:
        return None
    tied = next(other for other, each in model.named_parameters() if each is weight)
    return (
        f"the adapter is for {layer}, and this model ties {name} to {tied} (tie_word_embeddings in {folder}/{CONFIG}): "
        f"merged, they would no longer be one tensor; {advice}, or train one without that layer"
    )


@dataclass(frozen=True, slots=True)
class _Merged:
    """A weight with its adapter; `info` has the dtype of the weight, what is read is in float32."""

    info: TensorInfo
    weight: Source
    a: Source
    b: Source
    scale: float
    transposed: bool

    def read(self) -> torch.Tensor:
        weight = self.weight.read().float()
        return lora.merged(weight, self.a.read(), self.b.read(), self.scale, transposed=self.transposed)
