"""Makes the initial model of a run that names none: random weights and a tokenizer with one token per character.

Called by rank 0 before the engines are built. The default one learns the default task in seconds on a CPU core.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.architecture import architecture_config, character_tokenizer
from trinity_sync.weights.wire_cast import cast_model, kept_by_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def make_model(architecture: Mapping[str, object], seed: int, path: Path) -> Path:
    """Write a model of random weights and its tokenizer in Hugging Face format. Weights are in bf16, but for those that
    its class keeps in fp32.

    The same arguments give the same bytes. The process's random state is left as it was. The folder appears as a whole
    or not at all.

    Args:
        architecture: `model_type` and fields of that Hugging Face config. Token ids of padding, begin and end are 0, 1,
            2 and need not be given.
        seed: seed of the weights.
        path: the folder to make; must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        ConfigError: the architecture is not one that transformers can build; names the key.
        RunError: the folder exists and is not empty.
    """
    config = architecture_config(architecture)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        _build(config, seed).save_pretrained(staging)
        character_tokenizer(config.vocab_size).save_pretrained(staging)
        try:
            staging.rename(path)
        except OSError as error:
            raise RunError(f"the initial model cannot be put at {path}: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path


def _build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # of the CPU alone: torch.manual_seed would reset the accelerators' generators as well
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"model.architecture: transformers cannot build this {config.model_type} model: {reason}"
            ) from error
    cast_model(model, torch.bfloat16, kept_by_class(model, "BF16"))
    return model
