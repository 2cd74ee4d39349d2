"""What a model folder says of tokens: which end a text, which the tokenizer adds, how many the embedding has.

Rollouts, SFT, scoring and the look at rows ask here. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "the tokenizer"
_PROBES = ("0", "a", " a")
"""Texts by which added tokens are found; a tokenizer need not know each."""


@dataclass(frozen=True)
class ModelTokens:
    """Answers about the tokens of a model.

    Attributes:
        tokenizer, config: of the model, as transformers reads them.
        sources: the end tokens of each source that names one, by its name; the tokenizer's first.
    """

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    sources: Mapping[str, tuple[int, ...]]

    @property
    def embedded(self) -> int | None:
        """How many tokens the embedding has; None: the config does not say."""
        found = getattr(self.config.get_text_config(), "vocab_size", None)
        return found if isinstance(found, int) else None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text: all that a source names and the embedding has. SFT teaches the first, which is the
        tokenizer's where it has one.
        """
        found = dict.fromkeys(token for tokens in self.sources.values() for token in tokens)
        return tuple(token for token in found if self.embedded is None or token < self.embedded)

    def needed_ends(self, path: str) -> tuple[int, ...]:
        """Return `ends`, of which there has to be one.

        Args:
            path: of the model, for errors.

        Raises:
            ConfigError: there is none.
        """
        if not self.ends:
            named = "".join(f"; {name} has {list(tokens)}" for name, tokens in self.sources.items())
            raise ConfigError(
                f"model.path={path} names no end-of-sequence token that its embedding has: set eos_token_id in its "
                f"{_GENERATION} or {_CONFIG}, or eos_token in its tokenizer_config.json{named}"
            )
        return self.ends

    @property
    def difference(self) -> str | None:
        """Words on which source names which ends; None: all that name some name the same."""
        if len({frozenset(tokens) for tokens in self.sources.values()}) < 2:
            return None
        named = "; ".join(
            f"{name} {', '.join(f'{self.tokenizer.convert_ids_to_tokens(one)!r} ({one})' for one in tokens)}"
            for name, tokens in self.sources.items()
        )
        return f"the model names its end-of-sequence tokens in several ways ({named}); each of them ends a text"


def read_tokens(model_path: str, *, trust_remote_code: bool) -> ModelTokens:
    """Read what a model says of tokens.

    Args:
        model_path: folder in Hugging Face format, or hub id.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        OSError, ValueError: transformers cannot read the config or the tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    return model_tokens(tokenizer, config, {name: _fields(model_path, name) for name in (_GENERATION, _CONFIG)})


def model_tokens(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, files: Mapping[str, Mapping[str, Any]]
) -> ModelTokens:
    """Make the answers.

    Args:
        tokenizer, config: of the model.
        files: the fields of its files that may name end tokens, by the file's name.
    """
    named = {_TOKENIZER: (tokenizer.eos_token_id,)} | {name: tuple(_named(fields)) for name, fields in files.items()}
    usable = {name: tuple(one for one in tokens if _is_token(one)) for name, tokens in named.items()}
    return ModelTokens(tokenizer, config, {name: tokens for name, tokens in usable.items() if tokens})


def added_behind(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a tokenizer puts behind each text of its own accord: an end token, as a rule."""
    for text in _PROBES:
        try:
            plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            whole = list(tokenizer(text)["input_ids"])
        except Exception:  # it has no token for this text
            continue
        for start in range(len(whole) - len(plain) + 1):
            if plain and whole[start : start + len(plain)] == plain:
                return len(whole) - start - len(plain)
    return 0


def beyond_embedding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], embedded: int | None) -> str | None:
    """Name the first of the tokens for which the embedding has no row; None: it has all of them.

    Args:
        tokenizer: of the model.
        ids: tokens of a text.
        embedded: rows of the embedding; None: unknown.
    """
    if embedded is None or not ids or max(ids) < embedded:
        return None
    token = next(one for one in ids if one >= embedded)
    name = tokenizer.convert_ids_to_tokens(token)
    return (
        f"has token {token} ({name!r}), but the embedding of the model has {embedded} rows (vocab_size in its "
        f"{_CONFIG}): the tokenizer has tokens that the model was not trained with"
    )


def _fields(model_path: str, name: str) -> dict[str, Any]:
    """The fields of a file of the model; none where it is missing or cannot be read."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        found = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(fields: Mapping[str, Any]) -> Iterator[Any]:
    """The end tokens that the fields of a file name."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, Mapping) else {}):
        ends = part.get("eos_token_id")
        yield from ends if isinstance(ends, list) else [ends]


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
