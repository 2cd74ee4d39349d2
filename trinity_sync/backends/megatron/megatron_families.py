"""The model families of `backend=megatron`, and whether a run can resume from a checkpoint in another layout.

The checks of a configuration and the launcher use it, so it imports neither torch nor megatron-core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trinity_sync.config.schema import MegatronConfig
from trinity_sync.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model families of transformers; `bridges` has a bridge for each."""

WITH_EXPERTS = ("qwen3_moe",)
"""Families with mixtures of experts in every layer."""


def dense_layers(model: Mapping[str, object]) -> dict[str, bool]:
    """Return, for the fields of a model's Hugging Face config, which settings leave layers without experts or route to
    one.
    """
    if model.get("model_type") not in WITH_EXPERTS:
        return {}
    return {
        "mlp_only_layers": bool(model.get("mlp_only_layers")),
        "decoder_sparse_step": model.get("decoder_sparse_step", 1) != 1,
        "num_experts_per_tok=1": model.get("num_experts_per_tok") == 1 and bool(model.get("norm_topk_prob")),
    }


def check_layout(backend: MegatronConfig, checkpoint: Path) -> str | None:
    """Compare the layout of the configuration with that of a checkpoint (the step folder). Returns a message for the
    user, None where nothing changes.
    """
    saved = saved_layout(checkpoint / "actor")
    ranks = backend.ranks // (backend.tp * backend.pp)
    wanted = {"tp": backend.tp, "pp": backend.pp, "dp": ranks, "ep": backend.ep}
    if saved is None or all(saved[name] == value for name, value in wanted.items()):
        return None
    there, here = (" ".join(f"{name}={of[name]}" for name in wanted) for of in (saved, wanted))
    if saved["optimizer_format"] == "dp_reshardable" and any(
        saved[name] != wanted[name] for name in ("tp", "pp", "ep")
    ):
        raise ConfigError(
            f"{checkpoint} was saved with {there} and backend.optimizer_format=dp_reshardable, which other values of "
            f"tp, pp and ep cannot load: set backend.tp={saved['tp']} backend.pp={saved['pp']} "
            f"backend.ep={saved['ep']}; a run that saves with "
            f"backend.optimizer_format=fully_reshardable can change them later"
        )
    if backend.restore_rng:
        raise ConfigError(
            f"{checkpoint} was saved with {there}, this run has {here}: weights and optimizer can be loaded, the "
            f"random generators belong to the old ranks; set backend.restore_rng=false to continue with new ones"
        )
    return f"{checkpoint} was saved with {there}, this run has {here}: the random generators start from new seeds"


def saved_layout(actor: Path) -> dict[str, int | str] | None:
    """Return the layout in a checkpoint's `actor` folder: ``tp``, ``pp``, ``dp``, ``ep``, ``optimizer_format``.

    None where it is not recorded, as in verl's own saves.
    """
    try:
        contents = json.loads((actor / "ckpt_contents.json").read_text())
    except (OSError, ValueError):
        return None
    found = contents.get("layout") if isinstance(contents, dict) else None
    if not isinstance(found, dict) or not {"tp", "pp", "dp", "optimizer_format"} <= found.keys():
        return None
    return {"ep": 1, **found}  # older checkpoints have no `ep`
