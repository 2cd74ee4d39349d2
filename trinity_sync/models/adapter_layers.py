"""The linear layers of a model that get a LoRA adapter, from `model.lora.targets` and the model itself.

The driver determines them before Ray starts; trainer ranks, explorers and `workload=bytes` repeat it on their own
models, with the same result. peft gets names that match exactly these layers. Reads no weights: a model on the meta
device is enough.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError, near
from trinity_sync.weights.lora import ALL_LINEAR
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import tower

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROUTER = re.compile(r"(^|\.)(\w*router|gate|shared_expert_gate)(\.|$)")
"""Names of modules that choose experts, in transformers' mixtures."""
_EXPERTS = re.compile(r"(^|\.)(experts|block_sparse_moe|moe)(\.|$)")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
"""Names of an expert's projections."""
_ADVICE = "adapters are for linear layers alone: name others, or leave the key out"


@dataclass(frozen=True)
class AdapterLayers:
    """The layers that get an adapter."""

    shapes: Mapping[str, tuple[int, int]]  # (outputs, inputs) by the module's name
    names: Sequence[str]  # ends of names: peft's `target_modules`
    left_out: Sequence[str] = ()  # layers that `all-linear` skips, such as ``fused experts (mlp.experts)``


def adapter_layers(model: PreTrainedModel, targets: str | Sequence[str], *, saved: bool = False) -> AdapterLayers:
    """Return the layers of a model that get an adapter. `model`: of transformers; may be on the meta device."""
    found, left_out = _Modules(model), list[str]()
    if targets == ALL_LINEAR:
        chosen, left_out = found.default()
    elif isinstance(targets, str):
        chosen = found.trained(found.matched(targets))
    else:
        chosen = found.trained(name for target in targets for name in found.called(target, saved))
    as_given = not isinstance(targets, str) and not found.tower
    names = list(targets) if as_given else found.shortest(chosen)
    return AdapterLayers({name: found.shape(name) for name in chosen}, names, left_out)


class _Modules:
    """The modules of a model, and those that can have an adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        from torch import nn

        self.all = dict(model.named_modules())
        self.linear = {name: part for name, part in self.all.items() if isinstance(part, nn.Linear)}
        self.head = model.get_output_embeddings()
        leaves = {name.rpartition(".")[2] for name, part in self.linear.items() if part is not self.head}
        self.fused = [name for name, part in self.all.items() if _EXPERTS.search(name) and _holds_many(part)]
        self.mixture = any(map(_EXPERTS.search, self.all))
        self.taken = _taken_for_experts(model, leaves) if self.fused else set[str]()
        self.leaves = sorted(leaves - self.taken)
        frozen = tower(model)
        self.tower = {name for name in self.linear if f"{name}.weight" in frozen}

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self.linear[name].weight.shape
        return outputs, inputs

    def default(self) -> tuple[list[str], list[str]]:
        """Return the layers of `all-linear`, and those that it skips."""
        chosen, passed = [], {"fused experts": {_in_layer(name) for name in self.fused}}
        for name, part in self.all.items():
            if self.mixture and _ROUTER.search(name):
                passed.setdefault("routers", set()).add(_in_layer(name))
            elif name in self.tower:
                passed.setdefault("what is outside the language model", set()).add(".".join(name.split(".")[:2]))
            elif name not in self.linear or part is self.head:
                continue
            elif self.reason(name):
                passed.setdefault("what peft takes for experts or cannot adapt", set()).add(_in_layer(name))
            else:
                chosen.append(name)
        if not chosen:
            raise _refusal(f"{ALL_LINEAR} means no layer of this model")
        return chosen, [f"{kind} ({listed(sorted(names), 4)})" for kind, names in passed.items() if names]

    def matched(self, expression: str) -> Iterator[str]:
        try:
            found = [name for name in self.all if name and re.fullmatch(expression, name)]
        except re.error as error:
            raise _refusal(f"{expression} is not a regular expression: {error}") from error
        if not found:
            meant = f" (did you mean [{expression}]?)" if self.ends(expression) else ""
            raise _refusal(f"{expression} matches the whole name of no module{meant}; {self.known}")
        return self.checked(expression, found)

    def called(self, target: str, saved: bool) -> Iterator[str]:
        """Return the layers whose name ends in a target; a target of a saved adapter may have none."""
        if found := self.ends(target):
            return self.checked(target, found)
        leaf = target.rpartition(".")[2]
        if self.fused and leaf in _OF_EXPERTS:
            raise _refusal(f"{target} is a part of {self.fused[0]}, which is fused experts; {_ADVICE}")
        if saved:
            return iter(())
        raise _refusal(f"no layer is called {target}{near(leaf, self.leaves)}; {self.known}")

    def trained(self, names: Iterable[str]) -> list[str]:
        found = list(dict.fromkeys(names))
        if not found:
            raise _refusal(f"they mean no layer of this model; {self.known}")
        if self.tower.issuperset(found):
            raise _refusal(f"{found[0]} is outside the language model, and is not trained; {self.known}")
        return [name for name in found if name not in self.tower]

    def shortest(self, chosen: Sequence[str]) -> list[str]:
        """Return the shortest ends of names that match only these layers, with experts as layers of their own, too."""
        everywhere = Counter(end for name in self.all for end in _ends_of(name))
        here = Counter(end for name in chosen for end in _ends_of(name))
        barred = _OF_EXPERTS if self.fused else ()
        found = {
            next(end for end in _ends_of(name) if everywhere[end] == here[end] and end not in barred) for name in chosen
        }
        return sorted(found)

    def checked(self, target: str, found: Iterable[str]) -> Iterator[str]:
        for name in found:
            if reason := self.reason(name):
                raise _refusal(f"{target} means {name}, {reason}; {_ADVICE}")
            yield name

    def reason(self, name: str) -> str | None:
        """Return why a module cannot have an adapter; None: it can."""
        kind = type(self.all[name]).__name__
        if name in self.fused:
            return f"fused experts ({kind})"
        if name not in self.linear:
            return f"a router ({kind})" if self.mixture and _ROUTER.search(name) else f"of class {kind}"
        if name.rpartition(".")[2] in self.taken:
            return "whose name peft takes for the fused experts of this family"
        plain = _is_plain(self.linear[name], *self.shape(name))
        return None if plain else f"of class {kind}, which computes something else than a linear layer"

    def ends(self, target: str) -> list[str]:
        return [name for name in self.all if f".{name}".endswith(f".{target}")]

    @property
    def known(self) -> str:
        return f"its linear layers are {', '.join(self.leaves)}"


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"model.lora.targets: {text}")


def _holds_many(part: nn.Module) -> bool:
    """Return whether a module among experts has one tensor for the matrices of many of them."""
    return any(weight.ndim == 3 for weight in part.parameters(recurse=False))


def _taken_for_experts(model: PreTrainedModel, leaves: Iterable[str]) -> set[str]:
    """Return the ends of names for which peft adapts fused experts or a router instead.

    It takes them for those of the model in transformers 4.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_taken(leaf: str) -> bool:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # it requires the other half, which is fused with this one
            return True
        return bool(config.target_parameters)

    return {leaf for leaf in leaves if is_taken(leaf)}


def _is_plain(layer: nn.Module, outputs: int, inputs: int) -> bool:
    """Return whether a layer, even of a custom class, has the output of a linear layer, judged by shapes."""
    import torch

    if type(layer).__module__.startswith("torch.nn."):
        return True
    try:
        found = copy.deepcopy(layer).to("meta")(
            torch.empty(1, 2, inputs, dtype=next(layer.parameters()).dtype, device="meta")
        )
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, 2, outputs)


def _in_layer(name: str) -> str:
    return re.sub(r"^.*?\.\d+\.", "", name)


def _ends_of(name: str) -> Iterator[str]:
    return accumulate(reversed(name.split(".")), lambda end, part: f"{part}.{end}")
