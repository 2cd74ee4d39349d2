"""Checks that a model folder has exactly the tensors of its model.

transformers would initialise a missing tensor at random and skip an unknown one, both silently. Reads the headers of
safetensors files, and tensors that are stored twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.errors import ConfigError
from trinity_sync.models.files import INDEX, IndexedFile, index_of
from trinity_sync.weights.saved_views import SavedTensor
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$", r"\.(attn|attention)\.bias$")
"""Tensors in folders of old versions of transformers that models compute by themselves."""


class LeftOutNames(NamedTuple):
    """Tensors of a folder that are in no version."""

    drafts: tuple[str, ...] = ()  # draft heads, which the model's class or config leaves out
    tower: tuple[str, ...] = ()  # of the vision tower


def left_out(folder: Path, model: PreTrainedModel, saved: Mapping[str, SavedTensor]) -> LeftOutNames:
    """Return names of the tensors of a folder that are in no version. `model`: made from the folder's config, on the
    meta device.
    """
    stored = _stored(folder)
    frozen = tower(model)
    if not stored or getattr(model.config, "quantization_config", None) is not None:
        if frozen:
            raise ConfigError(
                f"model.path={folder} has no vision tower in plain safetensors files, from which exports and explorers "
                "take it; save the model with save_pretrained"
            )
        return LeftOutNames()
    # a folder may be in another form than this version of transformers writes, with tied tensors under each name
    places = _places(stored.keys() | saved.keys(), model)
    filled = {places[name] for name in stored}
    _check_equal(folder, model, stored, places)
    absent = sorted(
        name
        for name in saved.keys() - stored.keys()
        if (place := places[name]) is None or filled.isdisjoint((place, _TensorPlace(place.held)))
    )
    absent = _but(absent, model._keys_to_ignore_on_load_missing or ())
    if absent:
        raise ConfigError(
            f"model.path={folder} lacks {len(absent)} of the {len(saved)} tensors of {type(model).__name__}: "
            f"{listed(absent, 4)}; training would begin with random numbers in their place: name a whole model"
        )
    surplus = _but(sorted(name for name in stored if places[name] is None), (*_COMPUTED, *_buffers(model)))
    unknown = _but(surplus, [*(model._keys_to_ignore_on_load_unexpected or ()), *_draft_layers(folder, model)])
    if unknown:
        raise ConfigError(
            f"model.path={folder} holds {len(unknown)} tensors that {type(model).__name__} has no place for: "
            f"{listed(unknown, 4)}; they would be silently left out: correct its config.json, or remove them"
        )
    live = model.state_dict(keep_vars=True)
    ids = {id(live[name]) for name in frozen}
    in_tower = sorted(name for name in stored if (at := places[name]) is not None and at.held in ids)
    return LeftOutNames(tuple(surplus), tuple(in_tower))


def _stored(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that transformers would load; empty without safetensors of a model."""
    from safetensors import SafetensorError

    index, path = folder / INDEX, folder / "model.safetensors"
    files = [path] if path.is_file() else []  # it has priority over an index
    stored: dict[str, Path] = {}
    try:
        if not files and index.is_file():
            path = index
            files = sorted({folder / file for file in (index_of(folder) or {}).values()})
        for path in files:
            with IndexedFile(path, framework="pt") as opened:
                stored |= dict.fromkeys(opened.keys(), path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"model.path={folder}: {path.name} is damaged or cannot be read: {type(error).__name__}: {error}"
        ) from error
    return stored


class _TensorPlace(NamedTuple):
    """The place into which transformers loads a stored tensor."""

    held: int  # id of the model's tensor; tied ones are one
    part: str | None = None  # name of the part of it, if it is fused from several


def _places(names: Iterable[str], model: PreTrainedModel) -> dict[str, _TensorPlace | None]:
    """Return the place of each stored tensor, by transformers' own tables; None: it would not be loaded."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]

    def place(name: str) -> _TensorPlace | None:
        held, converted = rename_source_key(name, renamings, converters, prefix, state)
        if held not in state:  # as transformers does
            held, converted = rename_source_key(name, [], [], prefix, state)
        if held not in state:
            return None
        part = None if converted is None else rename_source_key(name, renamings, [])[0].removeprefix(f"{prefix}.")
        return _TensorPlace(id(state[held]), part)

    return {name: place(name) for name in names}


def _check_equal(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, Path], places: Mapping[str, _TensorPlace | None]
) -> None:
    """Check that stored copies of one tensor of the model have the same values; reads them."""
    from safetensors import safe_open
    from torch import Tensor, equal

    def read(name: str) -> Tensor:
        with safe_open(stored[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    first: dict[_TensorPlace, str] = {}
    for name in sorted(stored):
        place = places[name]
        if place is None or first.setdefault(place, name) == name:
            continue
        if not equal(read(name), read(first[place])):
            raise ConfigError(
                f"model.path={folder} holds {first[place]} and {name} with other values, which are one tensor of "
                f"{type(model).__name__} by its config.json, so one would be lost: set tie_word_embeddings=false "
                "there, or remove the wrong one"
            )


def _buffers(model: PreTrainedModel) -> list[str]:
    """Return patterns of buffers that the model computes and does not save, with or without its prefix."""
    kept, prefix = model.state_dict(keep_vars=True), f"{model.base_model_prefix}."
    unsaved = (name.removeprefix(prefix) for name, _ in model.named_buffers() if name not in kept)
    return [rf"^({re.escape(prefix)})?{re.escape(name)}$" for name in unsaved]


def _draft_layers(folder: Path, model: PreTrainedModel) -> list[str]:
    """Return patterns of the layers that predict tokens further ahead, which come after the others.

    Their number is in the folder's own config.json: verl sets it to zero in the model's, which trains none.
    """
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        drafts = int(fields.get("text_config", fields).get("num_nextn_predict_layers") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        drafts = 0
    return [rf"(^|\.)layers\.{layers + number}\." for number in range(drafts)]


def _but(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    known = [re.compile(pattern) for pattern in patterns]
    return [name for name in names if not any(pattern.search(name) for pattern in known)]
