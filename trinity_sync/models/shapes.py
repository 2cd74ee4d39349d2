"""The shapes of published models, without their weights, for `workload=bytes`.

The files in `published/` have the sizes of the config.json of Qwen3-0.6B, Qwen3-8B, Qwen3-30B-A3B and Qwen3-235B-A22B
on the Hugging Face hub. transformers is imported where a model is made, in ranks and explorers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from trinity_sync.errors import ConfigError, in_one_line
from trinity_sync.models.adapter_layers import adapter_layers
from trinity_sync.models.families import made_class
from trinity_sync.weights.lora import PREFIX, saved_name
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import layer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

SIZES = "shapes.json"
"""File next to a model's config.json: `bytes` in bf16 of a version, `bytes_whole` of the whole model, and its sources:
`shapes` (from `read_shapes`), `layers`, and `lora`, the adapter in place of the weights, if any (`rank`, `targets`).
"""


class LoraShape(TypedDict):
    """An adapter in place of the weights."""

    rank: int
    targets: str | list[str]  # see `adapter_layers`


_PUBLISHED = Path(__file__).parent / "published"


def read_shapes(shapes: str) -> Mapping[str, object]:
    """Read a model's config, given a name in `published/` or the path of a config.json (`model.shapes`)."""
    published = {file.stem: file for file in _PUBLISHED.glob("*.json")}
    path = published.get(shapes, Path(shapes))
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        names = ", ".join(sorted(published))
        raise ConfigError(
            f"model.shapes is {shapes}, which is not a file; give one of {names}, or a config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.shapes: {path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"model.shapes: {path} names no model_type; give the config.json of a model")
    return fields


def cut(fields: Mapping[str, object], layers: int | None) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Complete the fields of a config (from `read_shapes`), and cut its language model to the first `layers` (None:
    all). Returns the fields of the whole model and of the cut one.
    """
    from transformers import CONFIG_MAPPING

    model_type = fields["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model.shapes: model_type is {model_type!r}, which transformers does not know; try qwen3")
    kind = CONFIG_MAPPING[model_type]
    try:
        config = kind.from_dict(dict(fields))
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"model.shapes: {kind.__name__} does not take this file: {reason}") from error
    whole = config.to_dict()
    whole.pop("auto_map", None)
    if (architecture := made_class(whole)) is None:
        raise ConfigError(
            f"model.shapes: model_type is {model_type}, but transformers has no causal language model of it; try qwen3"
        )
    whole["architectures"] = [architecture]  # for readers of a checkpoint
    whole.pop("quantization_config", None)
    text = config.get_text_config()
    of_text = whole if text is config else whole.get("text_config")
    if not isinstance(of_text, dict):
        raise ConfigError(
            f"model.shapes: {model_type} is made of several models, and none is text_config; give the config of its "
            "language model alone"
        )
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = of_text.get(key)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"model.shapes: {key} is {count}; it must be a number of layers, at least 1")
    if layers is None:
        return whole, whole
    if layers > count:
        raise ConfigError(f"model.layers is {layers}, but the model has {count}; give at most that")
    left = {
        name: value[:layers] if isinstance(value, list) and len(value) == count else value
        for name, value in of_text.items()
    } | {key: layers}
    return whole, left if of_text is whole else {**whole, "text_config": left}


def saved_shapes(fields: Mapping[str, object], lora: LoraShape | None = None) -> dict[str, SavedTensor]:
    """Return the tensors of a version of a model with these fields, by name; or of an adapter for it."""
    from trinity_sync.weights.tensors import version_list

    model = _made(model_config(fields), "meta", None)
    return adapter_list(model, **lora) if lora else version_list(model)


def adapter_list(model: PreTrainedModel, rank: int, targets: str | Sequence[str]) -> dict[str, SavedTensor]:
    """Return the tensors of a LoRA adapter that peft would save for a model, by name, with their names in peft's
    wrapper.

    No tensor of the model is read. `targets` and errors: see `adapter_layers`.
    """
    found = {}
    for name, (outputs, inputs) in adapter_layers(model, targets).shapes.items():
        for kind, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            held = f"{PREFIX}{name}.{kind}.default.weight"
            found[saved_name(held)] = SavedTensor.as_held("BF16", shape, held)
    return found


def lora_of(folder: Path) -> LoraShape | None:
    """Return the adapter in place of the weights of a model that `BytesOption.make_model` wrote, if any."""
    found: LoraShape | None = json.loads((folder / SIZES).read_text(encoding="utf-8"))["lora"]
    return found


def empty_model(folder: Path, dtype: torch.dtype | None, device: str) -> PreTrainedModel:
    """Make a model with unfilled weights from the config.json in a folder. `dtype`: of its weights, None for the
    config's own. `device`: of its weights; ``"meta"`` for none.
    """
    return _made(model_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))), device, dtype)


def check_made_of(folder: Path, engine: Mapping[str, object]) -> None:
    """Check that a model of `BytesOption.make_model` is the one of `BytesOption.engine_fields`: a resumed run has its
    own.
    """
    sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
    for key in ("shapes", "layers", "lora"):
        if sizes[key] != engine[key]:
            raise ConfigError(f"model.{key} differs from that of {folder}; leave it as it was, or begin a new run")


def bytes_by_layers(saved: Mapping[str, SavedTensor], layers: int = 0) -> list[int]:
    """Return the bytes in bf16 of a model cut to 0, 1, ... and all layers of its language model."""
    sizes: dict[int, int] = {}
    for name, (_, shape, *_) in saved.items():
        layer = layer_of(name)
        sizes[layer] = sizes.get(layer, 0) + 2 * prod(shape)
    sums = [sizes.get(-1, 0)]
    for layer in range(max(layers, max(sizes, default=-1) + 1)):
        sums.append(sums[-1] + sizes.get(layer, 0))
    return sums


def model_config(fields: Mapping[str, object]) -> PreTrainedConfig:
    """Make the config of a model from its fields, such as those of `cut`."""
    from transformers import CONFIG_MAPPING

    config: PreTrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    return config


def _made(config: PreTrainedConfig, device: str, dtype: torch.dtype | None) -> PreTrainedModel:
    import torch

    from trinity_sync.models.architecture import unfilled_model

    try:
        return unfilled_model(config, dtype or torch.bfloat16, device, attn_implementation="eager")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.shapes: transformers makes no causal language model of this: {reason}") from error
