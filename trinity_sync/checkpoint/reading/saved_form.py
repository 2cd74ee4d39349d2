"""From the names of a model's state dict to those that ``save_pretrained`` writes.

The model is built without storage from its config; which of its tensors are saved, under which names, and where each
lies in the state dict (tied tensors, experts stored as one) then shows in the storages they share. No tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from trinity_sync.checkpoint.reading.pieces import Source, View, WeightsError
from trinity_sync.models.files import CONFIG
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import saved_tensors


def saved_form(sources: Mapping[str, Source], config: Path) -> dict[str, Source]:
    """Map what is stored to the tensors that ``save_pretrained`` would write.

    Args:
        sources: what is stored, by name in the state dict or by that under which it would be saved.
        config: folder with the model's ``config.json``.

    Returns:
        The tensors by the name under which they would be saved. The sources as they are where transformers does not
        know the architecture (code of the model's own, which is not run).

    Raises:
        WeightsError: the config cannot be read, or the tensors are not those of its architecture.
    """
    model = made_of(config)
    if model is None:
        return dict(sources)
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    saved = saved_tensors(model)
    known = {**saved, **state}
    unknown = sorted(sources.keys() - known.keys())
    if unknown:
        raise WeightsError(
            f"{type(model).__name__}, which {config / CONFIG} describes, has no {listed(unknown)}, which is stored"
        )
    names: dict[int, str] = {}
    for name in state:
        if name in sources:
            names.setdefault(_storage(state[name]), name)
    missing = sorted(name for name, tensor in saved.items() if name not in sources and _storage(tensor) not in names)
    if missing:
        raise WeightsError(
            f"of the {type(model).__name__} that {config / CONFIG} describes, {listed(missing)} is missing"
        )
    found: dict[str, Source] = {}
    for name, tensor in saved.items():
        stored = name if name in sources else names[_storage(tensor)]
        source, whole = sources[stored], known[stored]
        if source.info.shape != tuple(whole.shape):
            raise WeightsError(
                f"{stored} is stored as {list(source.info.shape)}, the config in {config} says {list(whole.shape)}"
            )
        offset = int(tensor.storage_offset()) - int(whole.storage_offset())
        same = (tuple(tensor.shape), tensor.stride(), offset) == (tuple(whole.shape), whole.stride(), 0)
        found[name] = source if same else View(source, tuple(tensor.shape), tensor.stride(), offset)
    return found


def renamed(config: Path) -> dict[str, str]:
    """Return the parameters that ``save_pretrained`` writes under another name, whole: saved name by name in the model.

    Args:
        config: folder with the model's ``config.json``.

    Raises:
        WeightsError: as of `made_of`.
    """
    model = made_of(config)
    if model is None:
        return {}
    saved = {(_storage(one), one.shape): name for name, one in saved_tensors(model).items()}
    names = {name: saved.get((_storage(one), one.shape), name) for name, one in model.named_parameters()}
    return {name: other for name, other in names.items() if name != other}


def made_of(config: Path) -> torch.nn.Module | None:
    """Build the architecture that a config names, without storage; None where transformers has none of that name.

    Args:
        config: folder with the model's ``config.json``.

    Raises:
        WeightsError: the config cannot be read, or no model can be made of it.
    """
    path = config / CONFIG
    try:
        architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    import transformers

    kind = getattr(transformers, str(architectures[0]), None) if architectures else None
    if kind is None:
        return None
    try:
        loaded = transformers.AutoConfig.from_pretrained(config)
        with torch.device("meta"):
            model: torch.nn.Module = kind._from_config(loaded)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{path} does not describe a model that transformers can make: {reason}") from error
    return model


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
