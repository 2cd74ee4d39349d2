"""The tokens of a model: end tokens, tokens that the tokenizer adds, rows of the embedding.

Rollouts, SFT, scoring and `rows` use it. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.errors import ConfigError, in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


_FILES = ("generation_config.json", "config.json")
_PROBES = ("0", "a", " a")
"""Texts to find added tokens; a tokenizer need not know each."""


class ModelTokens:
    """The tokens of a model.

    Args:
        tokenizer, config: of the model, as transformers reads them.
        files: the fields of its files that may name end tokens, by the file's name.

    Attributes:
        embedded: rows of the embedding; None: unknown.
        ends: tokens that end a text: all that a source names and the embedding has. SFT teaches the first, which is the
            tokenizer's where that has one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PreTrainedConfig,
        files: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        rows = getattr(config.get_text_config(), "vocab_size", None)
        self.embedded = rows if isinstance(rows, int) else None
        named = {"the tokenizer": [tokenizer.eos_token_id]} | {
            name: _ends(body) for name, body in (files or {}).items()
        }
        self._named = {name: tokens for name, found in named.items() if (tokens := list(filter(self._has, found)))}
        self.ends = tuple(dict.fromkeys(token for tokens in self._named.values() for token in tokens))

    def _has(self, token: object) -> bool:
        return type(token) is int and 0 <= token < (self.embedded or token + 1)

    def needed_ends(self, path: str) -> list[int]:
        """Return `ends`, or raise a `ConfigError` for the model at `path` if there is none."""
        if not self.ends:
            raise ConfigError(
                f"model.path={path} names no end-of-sequence token that its embedding has: set eos_token_id in its "
                f"{' or '.join(_FILES)}, or eos_token in its tokenizer_config.json"
            )
        return list(self.ends)

    @property
    def difference(self) -> str | None:
        """A message if sources name different ends; None: all that name some agree."""
        if len({frozenset(tokens) for tokens in self._named.values()}) < 2:
            return None
        shown = {token: f"{self.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.ends}
        named = "; ".join(f"{name} {', '.join(shown[one] for one in ends)}" for name, ends in self._named.items())
        return f"the model names its end-of-sequence tokens in several ways ({named}); each of them ends a text"


def read_tokens(model_path: str, *, trust_remote_code: bool) -> ModelTokens:
    """Read the tokens of a model: a folder in Hugging Face format, or a hub id. Raises OSError, ValueError if it is not
    here, and the hub does not give it.
    """
    from transformers import AutoConfig, AutoTokenizer

    @contextmanager
    def reading(file: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError | ValueError) and not Path(model_path).is_dir():
                raise
            reason = in_one_line(error)
            raise ConfigError(f"model.path={model_path}: its {file} cannot be read: {reason}") from error

    with reading("config.json"):
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with reading("tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    if tokenizer.is_fast and not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}:
        # without files transformers makes one of the special tokens of the model's family
        raise ConfigError(f"model.path={model_path}: its tokenizer has no tokens; copy all of its files there")
    return ModelTokens(tokenizer, config, {name: _fields(model_path, name) for name in _FILES})


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts to continue, without those that the tokenizer appends to each text."""
    if not texts:
        return []
    appended = _appended(tokenizer)
    return [list(row[: len(row) - appended]) for row in tokenizer(list(texts))["input_ids"]]


def beyond_embedding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], embedded: int | None) -> str | None:
    """Return a message about the first token without a row in the embedding; None: there is none."""
    if embedded is None or max(ids, default=-1) < embedded:
        return None
    token = next(one for one in ids if one >= embedded)
    return (
        f"has token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), but the embedding of the model has "
        f"{embedded} rows (vocab_size in its config.json): the tokenizer has tokens that the model was not trained with"
    )


@lru_cache(maxsize=4)
def _appended(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that a tokenizer appends to each text by default: usually an end token."""
    for text in _PROBES:
        try:
            plain, whole = (list(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (False, True))
        except Exception:  # it has no token for this text
            continue
        if not plain or not set(plain).isdisjoint(tokenizer.all_special_ids):
            continue  # its token for unknown text may be the added one, too
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return len(whole) - start - len(plain)
    return 0


def _fields(model_path: str, name: str) -> Mapping[str, object]:
    """Return the fields of a file of the model; empty if it is missing or cannot be read."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        found = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _ends(fields: Mapping[str, object]) -> Iterator[object]:
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, Mapping) else {}):
        ends = part.get("eos_token_id")
        yield from ends if isinstance(ends, list) else [ends]


# The characters of the tokenizer of a model made from `model.architecture`.


SPECIAL = {"pad_token_id": "␀", "bos_token_id": "␂", "eos_token_id": "␃"}
"""Tokens 0, 1 and 2; one character each, so that a response always has as many characters as tokens."""
CHARACTERS = "0123456789=+-*,;<>?:#%"
"""Tokens 3 and following."""
UNUSED = 0xE000
"""Tokens after the characters are private-use characters: this code point plus the token's number."""


def check_vocabulary(vocab_size: int) -> None:
    """Raise a `ConfigError` if a vocabulary has no room for the characters."""
    needed = len(SPECIAL) + len(CHARACTERS)
    if vocab_size < needed:
        raise ConfigError(
            f"model.architecture.vocab_size is {vocab_size}; the character tokenizer needs at least {needed}"
        )
