"""The initial model of a run that names none, made from `model.architecture`, and models without weights."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from trinity_sync.errors import ConfigError, RunError, in_one_line, near
from trinity_sync.models.families import auto_class
from trinity_sync.models.tokens import CHARACTERS, SPECIAL, UNUSED, check_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


# transformers reads these fields of every config, even undeclared ones
_COMMON_FIELDS = {"rope_theta", "rope_scaling", "head_dim"}


def character_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character: padding, begin, end, `CHARACTERS`, unused ones up to `vocab_size`.

    It puts the begin token before a text. Encoding an unknown character raises.
    """
    check_vocabulary(vocab_size)
    characters = [*SPECIAL.values(), *CHARACTERS]
    characters += [chr(UNUSED + token) for token in range(len(characters), vocab_size)]
    vocabulary = {character: token for token, character in enumerate(characters)}
    pad, begin, end = SPECIAL.values()
    # the unknown token is deliberately not in the vocabulary: an unknown character is an error, not a token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def architecture_config(architecture: Mapping[str, object]) -> PreTrainedConfig:
    """Make the config from `model_type` and fields of that Hugging Face config."""
    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type is {model_type!r}, which transformers does not know"
            f"{near(str(model_type), CONFIG_MAPPING)}; use one such as qwen3"
        )
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | kind.attribute_map.keys() | _COMMON_FIELDS
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"model.architecture.{name}: {kind.__name__} has no such field{near(str(name), sorted(known))}"
            )
    for token, name in enumerate(SPECIAL):
        if fields.setdefault(name, token) != token:
            raise ConfigError(f"model.architecture.{name} is {fields[name]}; the character tokenizer has it at {token}")
    try:
        return kind(**fields)
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"model.architecture is not one that {kind.__name__} takes: {reason}") from error


def make_model(architecture: Mapping[str, object], seed: int, path: Path) -> Path:
    """Write a model of random weights and its tokenizer in Hugging Face format, and return the folder.

    Weights are in bf16, except those that the class keeps in fp32. The same arguments give the same bytes. The
    process's random state stays unchanged. The folder appears as a whole or not at all.
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
    import torch
    from transformers import AutoModelForCausalLM

    from trinity_sync.weights.tensors import cast_model, kept_by_class

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # only the CPU's: torch.manual_seed would reset the accelerators' generators as well
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            reason = in_one_line(error)
            raise ConfigError(
                f"model.architecture: transformers cannot build this {config.model_type} model: {reason}"
            ) from error
    cast_model(model, torch.bfloat16, kept_by_class(model, "BF16"))
    return model


def unfilled_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    attn_implementation: str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make a causal language model with unfilled parameters (device ``"meta"``: none), for loading versions and reading
    shapes.

    Buffers that no checkpoint contains have their values. Errors of transformers for an unknown model are passed on.
    """
    import torch
    from transformers.initialization import no_init_weights

    kind = getattr(transformers, auto_class(config.to_dict()))
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = kind.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    model.tie_weights()  # part of the skipped initialisation
    return model.eval().requires_grad_(False)
