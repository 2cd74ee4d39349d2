"""Secrets in output: names of secrets, and texts without the secrets.

All code that shows or sends settings, command lines, addresses or errors uses a function of this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = re.compile(r"(secret|passw(or)?d|passphrase|credential|bearer|authorization|apikey)s?|pwd")
"""Words that make any name a secret's."""
_AT_THE_END = re.compile(r"(access|account|auth|private|secret|p)?(key|token)|auth")
_NO_SECRET = {
    "token": "bos eos pad unk sep cls mask image video audio special stop end start begin per next last first sos",
    "key": "prompt answer response messages message tools thinking fn image images video videos audio data source sort "
    "cache primary column label text",
}
"""Words before the last one that make it a token of a vocabulary, or a column."""
_REFERENCE = re.compile(r"\$\{[^,]*\}")
_USER = re.compile(r"(://[^/@:\s]*):[^/\s]*@")
_QUERY = re.compile(r"([?&;])([^=&;\s]+)=([^&;\s'\"]+)")
_ITEM = re.compile(
    r"""([\w.-]+)(['"]?\s*:\s*)(\$\{[^}]*\}|'[^']*'|"[^"]*"|\[[^]]*\]|\{(?:[^{}]|\{[^{}]*\})*\}|[^,\[\]{}]*)"""
)
_LEAF = re.compile(r"([\w.-]+)['\"]?\s*:\s*('[^']*'|\"[^\"]*\"|[^,\[\]{}]+)")
_LEAST, _LEAST_OF_LETTERS = 6, 12
"""Least characters of a text that is hidden everywhere: a shorter one, or a plain word, could occur in any sentence."""

_hidden: set[str] = set()


def is_secret(name: str) -> bool:
    """Return whether a name is a secret's, by its words: ``api_key``, ``authToken``; not ``max_tokens``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if any(map(_ALWAYS.fullmatch, words)) or words[-2:] == ["connection", "string"]:
        return True
    if words[-1:] == ["keys"]:
        return words[-2:-1] in (["api"], ["access"], ["private"])
    if not words or not _AT_THE_END.fullmatch(words[-1]):
        return False
    return not (len(words) > 1 and words[-2] in _NO_SECRET.get(words[-1], "").split())


def masked(value: object, name: str = "") -> Any:
    """Return a value for display, at any depth: secrets are masked, and references stay."""
    if isinstance(value, Mapping):
        return {key: masked(inner, name if is_secret(name) else str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if is_secret(name) and not isinstance(value, bool) and value not in (None, "", "???"):
        return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK
    return shown(value) if isinstance(value, str) else value


def masked_override(text: str) -> str:
    """Return an argument of a command line, such as an override, without its secrets."""
    key, equals, value = text.partition("=")
    if equals and any(map(is_secret, key.lstrip("+~-").split("."))):
        return f"{key}={_masked_text(value)}"
    return shown(f"{key}{equals}{_ITEM.sub(_masked_item, value)}")


def _masked_item(found: re.Match[str]) -> str:
    name, colon, value = found.groups()
    return f"{name}{colon}{_masked_text(value) if is_secret(name) else _ITEM.sub(_masked_item, value)}"


def _masked_text(value: str) -> str:
    bare = value.strip("'\" ")
    return value if bare in ("", "null") or _REFERENCE.fullmatch(bare) else MASK


def shown(place: str) -> str:
    """Return a text without the passwords in its URLs."""
    text = _USER.sub(rf"\1:{MASK}@", place)
    return _QUERY.sub(lambda found: f"{found[1]}{found[2]}={MASK if is_secret(found[2]) else found[3]}", text)


def without_secrets(text: str, place: str, options: Mapping[str, object]) -> str:
    """Return a text, such as a store's error, without the secrets of the place and its options."""
    return _without(text, (secret for secret in secrets_of([place, options]) if len(secret) > 3))


def hide(settings: Mapping[str, object]) -> None:
    """Have `without_hidden` mask the secrets in resolved settings, for the life of this process."""
    found = secrets_of(settings)
    _hidden.update(one for one in found if len(one) >= (_LEAST_OF_LETTERS if one.isalpha() else _LEAST))


def hide_typed(arguments: Sequence[str]) -> None:
    """As `hide`, for the secrets on a command line."""
    for key, _, value in (text.partition("=") for text in arguments):
        for name, text in [(key.rpartition(".")[2], value), *_LEAF.findall(value)]:
            hide({name: text.strip("'\" ")} if "${" not in text else {})


@dataclass(frozen=True)
class EnvironmentSecret:
    """A secret of the user's environment. Each process that has it masks its text, and its `repr` has only the name."""

    variable: str
    text: str = field(repr=False)

    def __post_init__(self) -> None:
        hide({"secret": self.text})

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:  # hides it where it arrives
        return type(self), (self.variable, self.text)


def without_hidden(text: str) -> str:
    """Return a text, such as an error, without the secrets of this process."""
    return _without(text, _hidden) if _hidden else text


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def secrets_of(value: object, *, secret: bool = False) -> Iterator[str]:
    """Yield the secrets in settings, at any depth; `secret`: the value's name is a secret's."""
    if isinstance(value, str):
        if secret:
            yield value
        for found in re.findall(r"://[^/@:\s]*:([^/\s]+)@", value):
            yield from (found, unquote(found))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from secrets_of(inner, secret=secret or is_secret(str(name)))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from secrets_of(inner, secret=secret)
