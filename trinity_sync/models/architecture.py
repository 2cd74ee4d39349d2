"""The tokenizer and the config of a model that is made from `model.architecture`. Loads no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from trinity_sync.errors import ConfigError
from trinity_sync.models.characters import CHARACTERS, SPECIAL, UNUSED, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# transformers reads these of every config, whether or not its fields declare them
_COMMON_FIELDS = {"rope_theta", "rope_scaling", "head_dim"}


def character_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character: padding, begin, end, `CHARACTERS`, unused ones up to `vocab_size`.

    A text gets the begin token in front. Encoding a character that it does not have raises.

    Raises:
        ConfigError: the vocabulary is too small.
    """
    check_vocabulary(vocab_size)
    characters = [*SPECIAL.values(), *CHARACTERS]
    characters += [chr(UNUSED + token) for token in range(len(characters), vocab_size)]
    vocabulary = {character: token for token, character in enumerate(characters)}
    pad, begin, end = SPECIAL.values()
    # the unknown token is not in the vocabulary on purpose: an unknown character is an error, not a token
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
    """Make the config.

    Args:
        architecture: `model_type` and fields of that Hugging Face config, see `make_model`.

    Raises:
        ConfigError: the architecture is not one that transformers can build; names the key.
    """
    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type is {model_type!r}, which transformers does not know"
            f"{_suggestion(str(model_type), list(CONFIG_MAPPING))}; use one such as qwen3"
        )
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | kind.attribute_map.keys() | _COMMON_FIELDS
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"model.architecture.{name}: {kind.__name__} has no such field{_suggestion(str(name), sorted(known))}"
            )
    for token, name in enumerate(SPECIAL):
        if fields.setdefault(name, token) != token:
            raise ConfigError(f"model.architecture.{name} is {fields[name]}; the character tokenizer has it at {token}")
    try:
        return kind(**fields)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.architecture is not one that {kind.__name__} takes: {reason}") from error


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (meant {close[0]}?)" if close else ""
