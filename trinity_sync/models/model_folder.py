"""Whether a model folder holds what the model is made of: transformers would draw a missing tensor at random and leave
out one too many, both in silence. Reads the headers of safetensors files only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import ConfigError
from trinity_sync.weights.saved_views import Saved
from trinity_sync.weights.shards import listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$", r"\.attn\.bias$")
"""Of folders that old versions of transformers wrote: what a model computes by itself."""


def left_out(folder: Path, model: PreTrainedModel, saved: Mapping[str, Saved]) -> tuple[str, ...]:
    """Names of the tensors of a folder that the model leaves out, as its class or config says: draft heads.

    Args:
        folder: the model's, in Hugging Face format. Nothing is said of one without safetensors, or of quantised
            weights.
        model: made of the folder's config, on the meta device.
        saved: what `save_pretrained` of the model would write (`saved_list`).

    Raises:
        ConfigError: names tensors of the model that the folder does not have, or tensors of the folder that the model
            has no place for.
    """
    stored = stored_names(folder)
    if not stored or getattr(model.config, "quantization_config", None) is not None:
        return ()
    state = model.state_dict(keep_vars=True)
    # folders in another form than this version of transformers writes, and the second name of tied tensors
    others = _targets(stored - saved.keys(), model, state)
    filled = {id(state[held]) for held in others.values() if held is not None}
    absent = sorted(
        name for name, view in saved.items() if name not in stored and id(state.get(view.held or name)) not in filled
    )
    absent = _but(absent, model._keys_to_ignore_on_load_missing or ())
    if absent:
        raise ConfigError(
            f"model.path={folder} lacks {len(absent)} of the {len(saved)} tensors of {type(model).__name__}: "
            f"{listed(absent, 4)}; training would begin with random numbers in their place: name a whole model"
        )
    surplus = _but(sorted(name for name, held in others.items() if held is None), _COMPUTED)
    unknown = _but(surplus, [*(model._keys_to_ignore_on_load_unexpected or ()), *_draft_layers(folder, model)])
    if unknown:
        raise ConfigError(
            f"model.path={folder} holds {len(unknown)} tensors that {type(model).__name__} has no place for: "
            f"{listed(unknown, 4)}; they would be left out in silence: correct its config.json, or remove them"
        )
    return tuple(surplus)


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files; none where one is not there or cannot be read."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names: set[str] = set()
    try:
        files = {"model.safetensors"}
        if index.is_file():
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for file in files:
            with safe_open(folder / file, framework="pt") as opened:
                names.update(opened.keys())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return set()
    return names


def _targets(names: Iterable[str], model: PreTrainedModel, state: dict[str, Any]) -> dict[str, str | None]:
    """Into which of the model's tensors transformers loads a stored one, by its own tables; None: into none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]

    def target(name: str) -> str | None:
        tried: tuple[tuple[list[Any], list[Any]], ...] = ((renamings, converters), ([], []))  # as transformers does
        found = (rename_source_key(name, *how, model.base_model_prefix, state)[0] for how in tried)
        return next((held for held in found if held in state), None)

    return {name: target(name) for name in names}


def _draft_layers(folder: Path, model: PreTrainedModel) -> list[str]:
    """Patterns of the layers that predict tokens further ahead, which stand behind the others.

    How many there are the folder's own config.json says: verl sets them to none in the model's, which trains none.
    """
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        drafts = int(said.get("text_config", said).get("num_nextn_predict_layers") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        drafts = 0
    return [rf"(^|\.)layers\.{layers + number}\." for number in range(drafts)]


def _but(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names in which no pattern is found."""
    known = [re.compile(pattern) for pattern in patterns]
    return [name for name in names if not any(pattern.search(name) for pattern in known)]
