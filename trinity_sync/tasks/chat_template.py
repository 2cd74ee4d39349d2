"""A tokenizer's chat template: texts of chats, the parts that the template marks as the assistant's, and their tokens.
The caller passes the tokenizer; transformers is not imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


class MarkedText(NamedTuple):
    """A text with marked parts, which are trained on. `learnt`: begin and end character of each part, in order."""

    text: str
    learnt: list[tuple[int, int]]


class ChatTemplate:
    """A tokenizer's chat template with the user's arguments.

    Args:
        tokenizer: with or without a template.

    Attributes:
        present: whether the tokenizer has a template.
        end_of_text: the text of the tokenizer's end-of-text token; empty: it has none.

    Raises:
        ConfigError: there are arguments but no template, or one that the template does not read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
        self._apply = partial(tokenizer.apply_chat_template, **arguments)
        self._arguments = arguments
        self._tokenizer = tokenizer
        self.present = bool(getattr(tokenizer, "chat_template", None))
        self.end_of_text = str(tokenizer.eos_token or "")
        if arguments:
            self._check(tokenizer, arguments)

    @staticmethod
    def _check(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("task.chat_template is given, but the model's tokenizer has no chat template")
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        try:
            read = _variables(tokenizer.get_chat_template())
        except ValueError as error:  # of several, none is the default
            raise ConfigError(f"task.chat_template: {error}") from error
        for name in arguments:
            if name in taken:
                raise ConfigError(f"task.chat_template.{name} is set by the program itself; leave it out")
            if read is not None and name not in read:
                known = ", ".join(sorted(read - taken.keys() - {"messages"} - set(tokenizer.special_tokens_map)))
                raise ConfigError(
                    f"task.chat_template.{name} is not an argument that the tokenizer's chat template reads; "
                    f"it reads: {known or 'no argument at all'}"
                )

    def render(self, messages: Sequence[Mapping[str, object]], *, ask: bool, **more: object) -> str:
        """Return the text of a chat. `messages`: with ``role`` and ``content``."""
        chat = [dict(message) for message in messages]
        with _refusals():
            text = str(self._apply(chat, add_generation_prompt=ask, tokenize=False, **more))
        asked = [one["content"] for one in chat if one["role"] == "user" and isinstance(one["content"], str)]
        if asked and not any(has_words(text, said) for said in asked):
            raise ValueError("the chat template leaves out the texts of the messages")
        return text

    def marked(self, messages: Sequence[Mapping[str, object]], **more: object) -> MarkedText | None:
        """Return the text of a chat with the parts between the template's ``{% generation %}`` marks; None: it has
        none. `messages`, `more`: as for `render`. Of `more`, ``tools`` chooses among several templates.
        """
        tools = more.pop("tools", None)
        template = self._tokenizer.get_chat_template(None, tools)
        if not _GENERATION.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            (text,), (parts,) = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._arguments, **more},
            )
        return MarkedText(text, parts)

    def tokens(self, rendered: Sequence[str]) -> list[list[int]]:
        """Return the tokens of rendered chats, which contain their special tokens."""
        return list(self._tokenizer(list(rendered), add_special_tokens=False)["input_ids"]) if rendered else []

    def marked_tokens(self, rendered: Sequence[MarkedText]) -> list[tuple[list[int], list[bool]]]:
        """Return the tokens of rendered chats, with a mark for each. A token across the begin of a part is marked; one
        across its end is not.
        """
        if not rendered:
            return []
        rows = self._tokenizer([one.text for one in rendered], add_special_tokens=False)
        found = []
        for row, (ids, one) in enumerate(zip(rows["input_ids"], rendered, strict=True)):
            learnt = [False] * len(ids)
            for part in one.learnt:
                first, last = (self._token_at(rows, row, one.text, place) for place in part)
                learnt[first:last] = [True] * (last - first)
            found.append((list(ids), learnt))
        return found

    def _token_at(self, rows: BatchEncoding, row: int, text: str, place: int) -> int:
        """Return the number of the first token with a character at a place or after it."""
        ids = rows["input_ids"][row]
        if not getattr(rows, "is_fast", False):  # tokenizers in Python do not give the places of tokens
            return common_start(ids, self.tokens([text[:place]])[0])
        found = (rows.char_to_token(row, character) for character in range(place, len(text)))
        return next((token for token in found if token is not None), len(ids))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"the chat template does not take it: {error}") from error


def has_words(text: str, said: str) -> bool:
    """Tell whether a text has at least one of the given words, or none are given; templates may leave out some."""
    words = said.split()
    return not words or any(word in text for word in words)


def common_start(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _variables(template: str) -> set[str] | None:
    """Return the names of a template's arguments; None: unknown."""
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateError:  # tags of its own library
        return None
