"""LoRA adapters: the names of their tensors, and their product with the base weights.

An adapter travels and is saved under the names that peft's ``save_pretrained`` writes. A model in training holds its
tensors under names that contain the adapter's name (``...q_proj.lora_A.default.weight``), and verl's files use those.
Imports no torch, because the checks of a configuration use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.errors import RunError
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""The files of an adapter that peft writes."""

ALL_LINEAR = "all-linear"
"""peft's word for all linear layers except the one of the logits."""

PREFIX = "base_model.model."
"""Prefix of all tensor names of a model that peft has wrapped."""

_HELD = ".default"
_A, _B = ".lora_A.weight", ".lora_B.weight"

_PLAIN = frozenset(
    {
        "peft_type",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "fan_in_fan_out",
        "lora_dropout",
        "qalora_group_size",
        "megatron_core",
    }
)
"""Keys of an ``adapter_config.json`` whose values never make an adapter other than a plain one."""
_PLACES = frozenset({"exclude_modules", "layers_to_transform", "layers_pattern"})
_OFF: Mapping[str, Sequence[object]] = {
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva"],  # other values change the base as well
}


class FactorPair(NamedTuple):
    """Names of the two factors of the change to one weight, as peft saves them."""

    a: str
    b: str


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a model that peft has wrapped belongs to the adapter, by verl's rule."""
    return "lora_" in name or ".adapter_" in name


def saved_name(held: str) -> str:
    """Return peft's saved name of a tensor that the model holds under this one."""
    return held.removesuffix(_HELD) if held.endswith(_HELD) else held.replace(f"{_HELD}.", ".")


def adapter_name(held: str) -> str | None:
    """Return the name if it is of the adapter's tensor in a model that peft has wrapped; None: it is the base's."""
    return held if is_adapter(held) else None


def base_name(held: str) -> str | None:
    """Return a tensor's name in the model itself from its name in peft's wrapper; None: it is the adapter's."""
    return None if is_adapter(held) else held.removeprefix(PREFIX).replace(".base_layer.", ".")


def held_adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapter's live tensors, detached, by their names in peft's wrapper of `model` (not the wrapper
    itself).
    """
    state = model.state_dict(keep_vars=True)
    return {PREFIX + name: tensor.detach() for name, tensor in state.items() if is_adapter(name)}


def pairs(names: Iterable[str]) -> dict[str, FactorPair]:
    """Return the factors of an adapter by the saved name of the weight that they change."""
    names = set(names)
    found = {
        name.removeprefix(PREFIX).removesuffix(_A) + ".weight": FactorPair(name, name.removesuffix(_A) + _B)
        for name in names
        if name.startswith(PREFIX) and name.endswith(_A)
    }
    odd = sorted(names ^ {name for pair in found.values() for name in pair})
    if odd:
        raise RunError(f"the adapter is not made of pairs of lora_A and lora_B for linear layers: {listed(odd)}")
    return found


def target_names(targets: str | Iterable[str]) -> list[str]:
    """Return the targets of an adapter, sorted: names of linear layers, or peft's one word for them."""
    return [targets] if isinstance(targets, str) else sorted(set(targets))


def target_text(targets: str | Iterable[str]) -> str:
    """Return the targets of an adapter as `model.lora.targets` takes them, names in order."""
    return targets if isinstance(targets, str) else f"[{', '.join(target_names(targets))}]"


def not_plain(config: Mapping[str, object], *, placed: bool = False) -> list[str]:
    """Return the keys of an ``adapter_config.json`` that make an adapter more than products of two factors with one
    scale for all layers of `target_modules`. Unknown keys are among them, unless they are off.
    """
    known = _PLAIN | _PLACES if placed else _PLAIN
    return sorted(
        key
        for key, value in config.items()
        if key not in known
        and value not in _OFF.get(key, ())
        and not (value is None or value is False or (isinstance(value, Sized) and not len(value)))
    )


def scaling(config: Mapping[str, object]) -> float:
    """Return the factor of the product, from an ``adapter_config.json``."""
    if refused := not_plain(config, placed=True):
        raise RunError(f"an adapter with {', '.join(refused)} is not merged here; merge it with peft")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise RunError(
            f"the adapter's r is {rank!r} and its lora_alpha {alpha!r}; expected a positive integer, a number"
        )
    assert isinstance(alpha, int | float)
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, *, transposed: bool = False
) -> torch.Tensor:
    """Return a weight with an adapter's product added, in the weight's dtype; computed whole, in float32.

    Ranks that hold rows of the weight compute the whole product too and cut it: a product of rows may round
    differently.

    Args:
        weight: [out, in], on any device; [in, out] with `transposed`.
        a: [rank, in].
        b: [out, rank].
        transposed: the layer keeps its weight transposed (peft's ``fan_in_fan_out``: GPT-2's Conv1D).
    """
    return (weight.float() + change(a, b, scale, transposed=transposed)).to(weight.dtype)


def change(a: torch.Tensor, b: torch.Tensor, scale: float, *, transposed: bool = False) -> torch.Tensor:
    """Return the change of a weight by an adapter, in float32; arguments as for `merged`."""
    product = (b.float() @ a.float()) * scale
    return product.T if transposed else product
