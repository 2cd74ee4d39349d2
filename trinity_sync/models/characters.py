"""The characters of the tokenizer of a model made from `model.architecture`. Imports nothing."""

from __future__ import annotations

from trinity_sync.errors import ConfigError

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
