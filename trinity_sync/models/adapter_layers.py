"""Which linear layers of a model get a LoRA adapter, from `model.lora.targets` and the model itself.

The driver asks before Ray starts; trainer ranks, explorers and `workload=bytes` ask again, on models of their own, and
get the same answer. peft is given names that mean these layers and no others. Reads no weights: a model on the meta
device is enough.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError
from trinity_sync.weights.lora import ALL_LINEAR, target_text
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROUTER = re.compile(r"(^|\.)(\w*router|gate|shared_expert_gate)(\.|$)")
"""Parts of the names of modules that choose experts, in transformers' mixtures."""
_EXPERTS = re.compile(r"(^|\.)(experts|block_sparse_moe|moe)(\.|$)")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What the projections of an expert are called where experts are layers of their own, also by adapters for those."""


@dataclass(frozen=True)
class AdapterLayers:
    """The layers that get an adapter.

    Attributes:
        shapes: (outputs, inputs) of each layer, by the module's name.
        names: what peft is given as `target_modules`: ends of these names that no other module has.
        left_out: what a default or an expression passes over and why, such as ``fused experts (mlp.experts)``.
    """

    shapes: Mapping[str, tuple[int, int]]
    names: Sequence[str]
    left_out: Sequence[str] = ()


def adapter_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> AdapterLayers:
    """Return the layers of a model that get an adapter.

    Args:
        model: of transformers; may be on the meta device.
        targets: `all-linear`, another regular expression for whole names of modules, or a list of ends of names.

    Raises:
        ConfigError: a target means no layer, or one that cannot have an adapter; names the module and the reason.
    """
    found = _Modules(model)
    if targets == ALL_LINEAR:
        chosen, left_out = found.default()
    elif isinstance(targets, str):
        chosen, left_out = found.inside(found.matched(targets)), []
    else:
        chosen, left_out = found.inside(name for target in targets for name in found.called(target)), []
    if len({found.is_transposed(name) for name in chosen}) > 1:
        raise _refusal(
            f"{target_text(targets)} means layers that keep their weight transposed (Conv1D) and others; name layers "
            "of one kind"
        )
    as_given = not isinstance(targets, str) and not found.has_towers
    names = list(targets) if as_given else found.names_for(chosen)
    return AdapterLayers({name: found.shape(name) for name in chosen}, names, left_out)


class _Modules:
    """The modules of a model, and which of them can have an adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        self._all = dict(model.named_modules())
        self._linear = {name: part for name, part in self._all.items() if isinstance(part, nn.Linear | Conv1D)}
        self._transposed = {name for name, part in self._linear.items() if isinstance(part, Conv1D)}
        self._head = model.get_output_embeddings()
        holders: dict[int, list[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(weight), []).append(name.rpartition(".")[0])
        self._tied = {name: other for names in holders.values() for name in names for other in names if other != name}
        # convolutions have weights of three dimensions as well, and are no experts
        self._fused = {
            name: sorted(each for each, weight in part.named_parameters(recurse=False) if weight.ndim == 3)
            for name, part in self._all.items()
            if _EXPERTS.search(name) and any(weight.ndim == 3 for _, weight in part.named_parameters(recurse=False))
        }
        self._mixture = bool(self._fused) or any(_EXPERTS.search(name) for name in self._all)
        self._taken = _taken_for_experts(model, self._leaves()) if self._fused else set()
        text = model.config.get_text_config()
        whole = text is model.config
        self._language = None if whole else next((n for n, p in self._all.items() if _has_config(p, text)), None)

    @property
    def has_towers(self) -> bool:
        """Whether there is more than a language model."""
        return self._language is not None

    def is_transposed(self, name: str) -> bool:
        return name in self._transposed

    def shape(self, name: str) -> tuple[int, int]:
        rows, columns = self._linear[name].weight.shape
        return (columns, rows) if name in self._transposed else (rows, columns)

    # -- what is asked for

    def default(self) -> tuple[list[str], list[str]]:
        """The layers of `all-linear`, and what it passes over."""
        passed: dict[str, set[str]] = {"fused experts": {_in_layer(name) for name in self._fused}}
        chosen = []
        for name, part in self._all.items():
            if part is self._head:
                continue
            if self._mixture and _ROUTER.search(name):
                passed.setdefault("routers", set()).add(_in_layer(name))
            elif name not in self._linear:
                continue
            elif not self._is_inside(name):
                passed.setdefault("what is outside the language model", set()).add(".".join(name.split(".")[:2]))
            elif self._reason(name):
                passed.setdefault("what peft takes for experts or cannot adapt", set()).add(_in_layer(name))
            else:
                chosen.append(name)
        if not chosen:
            raise _refusal(f"{ALL_LINEAR} means no layer of this model")
        return chosen, [f"{kind} ({listed(sorted(names), 4)})" for kind, names in passed.items() if names]

    def matched(self, expression: str) -> Iterator[str]:
        """The layers whose whole name an expression matches."""
        try:
            found = [name for name in self._all if name and re.fullmatch(expression, name)]
        except re.error as error:
            raise _refusal(f"{expression} is not a regular expression: {error}") from error
        if not found:
            listed_so = f"; as a list: [{expression}]" if self._ends(expression) else ""
            raise _refusal(f"{expression} matches the whole name of no layer{listed_so}; {self._known()}")
        return self._checked(expression, found)

    def called(self, target: str) -> Iterator[str]:
        """The layers whose name ends in a target."""
        leaf = target.rpartition(".")[2]
        if found := self._ends(target):
            return self._checked(target, found)
        for name, parameters in self._fused.items():
            if leaf in (*parameters, *self._taken, *_OF_EXPERTS):
                raise _refusal(f"{target} is a part of {name}, which is fused experts; {_ONLY}")
        near = difflib.get_close_matches(leaf, self._leaves(), n=1)
        raise _refusal(f"no layer is called {target}{f' (meant {near[0]}?)' if near else ''}; {self._known()}")

    def inside(self, names: Iterable[str]) -> list[str]:
        """Those of the language model: the towers beside it are not trained."""
        found = list(dict.fromkeys(names))
        kept = [name for name in found if self._is_inside(name)]
        if not kept:
            raise _refusal(f"{found[0]} is outside the language model, and is not trained; {self._known()}")
        return kept

    def names_for(self, chosen: Sequence[str]) -> list[str]:
        """The shortest ends of names that mean these layers alone, also where experts are layers of their own."""
        everywhere = Counter(end for name in self._all for end in _ends_of(name))
        here = Counter(end for name in chosen for end in _ends_of(name))
        barred = set(_OF_EXPERTS) if self._fused else set()
        return sorted(
            {
                next(end for end in _ends_of(name) if everywhere[end] == here[end] and end not in barred)
                for name in chosen
            }
        )

    # -- what is possible

    def _checked(self, target: str, found: Iterable[str]) -> Iterator[str]:
        for name in found:
            if reason := self._reason(name):
                raise _refusal(f"{target} means {name}, {reason}; {_ONLY}")
            yield name

    def _reason(self, name: str) -> str | None:
        """Why a module cannot have an adapter; None: it can."""
        kind = type(self._all[name]).__name__
        if name in self._fused:
            return f"fused experts ({kind})"
        if name not in self._linear:
            return f"a router ({kind})" if self._mixture and _ROUTER.search(name) else f"of class {kind}"
        if name in self._tied:
            return f"which is tied to {self._tied[name]}: with an adapter that would no longer be one tensor"
        if name.rpartition(".")[2] in self._taken:
            return "whose name peft takes for the fused experts of this family"
        return (
            None
            if _computes_plainly(self._linear[name], *self.shape(name))
            else f"of class {kind}, which computes otherwise"
        )

    def _ends(self, target: str) -> list[str]:
        return [name for name in self._all if name == target or name.endswith(f".{target}")]

    def _leaves(self) -> list[str]:
        return sorted({name.rpartition(".")[2] for name, part in self._linear.items() if part is not self._head})

    def _known(self) -> str:
        return f"its linear layers are {', '.join(leaf for leaf in self._leaves() if leaf not in self._taken)}"

    def _is_inside(self, name: str) -> bool:
        return self._language is None or name.startswith(f"{self._language}.") or self._linear[name] is self._head


_ONLY = "adapters are for linear layers alone: name others, or leave the key out"


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"model.lora.targets: {text}")


def _taken_for_experts(model: PreTrainedModel, leaves: Iterable[str]) -> set[str]:
    """The ends of names for which peft adapts fused experts or a router instead: it takes them for those of the model
    as transformers 4 had it.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_taken(leaf: str) -> bool:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # for that alone it does not: it wants the other half, which is fused with it
            return True
        return bool(config.target_parameters)

    return {leaf for leaf in leaves if is_taken(leaf)}


def _computes_plainly(layer: nn.Module, outputs: int, inputs: int) -> bool:
    """Whether a layer of a class of its own computes what a linear layer does, as far as shapes tell."""
    import torch

    if type(layer).__module__.startswith(("torch.nn.", "transformers.pytorch_utils")):
        return True
    with torch.no_grad(), torch.device("meta"):
        try:
            found = torch.func.functional_call(
                layer,
                {name: torch.empty(each.shape, dtype=each.dtype) for name, each in layer.named_parameters()},
                (torch.empty(1, 2, inputs, dtype=next(layer.parameters()).dtype),),
            )
        except (RuntimeError, TypeError, ValueError):
            return False
    return isinstance(found, torch.Tensor) and found.shape == (1, 2, outputs)


def _has_config(part: nn.Module, config: object) -> bool:
    return getattr(part, "config", None) is config and any(True for _ in part.children())


def _in_layer(name: str) -> str:
    """A module's name behind the number of its layer."""
    return re.sub(r"^.*?\.\d+\.", "", name)


def _ends_of(name: str) -> Iterator[str]:
    """The ends of a name, the shortest first."""
    return accumulate(reversed(name.split(".")), lambda end, part: f"{part}.{end}")
