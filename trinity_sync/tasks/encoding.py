"""Prompts, pairs and conversations as tokens of a model, for the check of all rows before a run, for explorers and for
supervised training. The caller passes the tokenizer; transformers is not imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.tokens import beyond_embedding, prompt_tokens
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.pairs import TextPair

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedTokenizerBase

    from trinity_sync.models.tokens import ModelTokens


class PromptEncoder:
    """Turns prompts into tokens and checks them.

    Args:
        response_length: longest response, in tokens.
        prompt_length: longest prompt, in tokens; None: as long as the positions allow.
        positions: of the model, in tokens; None: unknown.
        truncate: cut the left end of longer prompts instead of refusing them.
        chat_template: arguments of the tokenizer's chat template.
        embedded: rows of the model's embedding; None: unknown.

    Attributes:
        limit: longest prompt, in tokens; None: any.
        cut: the end that is cut off, in words.

    Raises:
        ConfigError: no prompt would fit, or see `ChatTemplate`.
    """

    cut = "their left end"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        response_length: int,
        prompt_length: int | None = None,
        positions: int | None = None,
        truncate: bool = False,
        chat_template: Mapping[str, object] | None = None,
        embedded: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._embedded = embedded
        self._response_length = response_length
        self._prompt_length = prompt_length
        self._positions = positions
        self._truncate = truncate
        self._template = ChatTemplate(tokenizer, chat_template or {})
        room = None if positions is None else positions - response_length
        if room is not None and room < 1:
            raise ConfigError(
                f"task.response_length is {response_length}, which leaves no room for a prompt in the {positions} "
                "positions of the model"
            )
        self.limit = min((limit for limit in (prompt_length, room) if limit is not None), default=None)

    @classmethod
    def of_task(cls, task: Mapping[str, Any], tokens: ModelTokens) -> Self:
        """Make the encoder from the keys of `task`; a user's own task may lack some."""
        return cls(
            tokens.tokenizer,
            response_length=task["response_length"],
            prompt_length=task.get("prompt_length"),
            positions=positions_of(tokens.config),
            truncate=task.get("too_long") == "truncate",
            chat_template=task.get("chat_template"),
            embedded=tokens.embedded,
        )

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """Return the tokens of a prompt."""
        ids = self._one(prompt, where)
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self._truncate:
            return ids[-self.limit :]
        raise RunError(f"{where} has {len(ids)} tokens; {self.limit_text}")

    def lengths(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[int]:
        """Return the numbers of tokens of prompts, also above the limit. Much faster than one call for each."""
        try:
            rows = self._many(prompts)
        except Exception:  # one at a time, to name the wrong one
            rows = [self._one(prompt, where) for prompt, where in zip(prompts, places, strict=True)]
        for prompt, where, ids in zip(prompts, places, rows, strict=True):
            self._check(prompt, where, ids)
        return [len(ids) for ids in rows]

    @property
    def limit_text(self) -> str:
        """The origin of the limit, in words."""
        if self.limit == self._prompt_length:
            return f"task.prompt_length allows {self.limit}"
        return (
            f"with a response of {self._response_length} that is more than the {self._positions} positions of the model"
        )

    def remedy(self, longest: int) -> str:
        """Return the setting that would admit prompts of so many tokens."""
        room = None if self._positions is None else self._positions - self._response_length
        return f"task.prompt_length={longest}" if room is None or longest <= room else "a smaller task.response_length"

    def _one(self, prompt: Prompt, where: str) -> list[int]:
        if prompt.messages is not None and not self._template.present:
            raise RunError(f"{where} is a chat, but the tokenizer has no chat template; give prompts as texts")
        try:
            ids = (
                prompt_tokens(self._tokenizer, [prompt.text])[0]
                if prompt.messages is None
                else self._template.tokens([self._template.render(prompt.messages, ask=True)])[0]
            )
        except Exception as error:
            raise RunError(f"{where} cannot be tokenised: {self._unknown(prompt.text) or error}") from error
        self._check(prompt, where, ids)
        return ids

    def _many(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        chats = [prompt.messages for prompt in prompts if prompt.messages is not None]
        texts = [prompt.text for prompt in prompts if prompt.messages is None]
        if chats and not self._template.present:
            raise RunError("a chat without a template")
        rendered = [self._template.render(chat, ask=True) for chat in chats]
        of_chats = iter(self._template.tokens(rendered))
        of_texts = iter(prompt_tokens(self._tokenizer, texts))
        return [next(of_texts if prompt.messages is None else of_chats) for prompt in prompts]

    def _check(self, prompt: Prompt, where: str, ids: Sequence[int]) -> None:
        if self._tokenizer.unk_token_id in ids and self._has_unknown(prompt):
            raise RunError(f"{where} cannot be tokenised: {self._unknown(prompt.text) or 'a part is unknown'}")
        if not ids:
            raise RunError(f"{where} has no token")
        if text := beyond_embedding(self._tokenizer, ids, self._embedded):
            raise RunError(f"{where} {text}")

    def _has_unknown(self, prompt: Prompt) -> bool:
        """Tell whether the unknown token in a prompt stands for unknown text. Some tokenizers begin each text with it,
        and their chat templates write it.
        """
        unknown = self._tokenizer.unk_token_id
        if unknown not in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id):
            return True
        texts = [prompt.text] if prompt.messages is None else [message["content"] for message in prompt.messages]
        encoded = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        written = [text.count(str(self._tokenizer.unk_token)) for text in texts]
        return any(ids.count(unknown) > said for ids, said in zip(encoded, written, strict=True))

    def _unknown(self, text: str) -> str:
        """Name the characters without a token, in a sentence; empty: there are none."""
        unknown = [repr(character) for character in dict.fromkeys(text) if not self._has(character)]
        return f"the tokenizer has no token for {', '.join(unknown)}" if unknown else ""

    def _has(self, character: str) -> bool:
        try:
            ids = self._tokenizer(character, add_special_tokens=False)["input_ids"]
        except Exception:
            return False
        return bool(ids) and self._tokenizer.unk_token_id not in ids


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return a model's number of positions, in tokens; None: its config does not tell."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


# Pairs and conversations.


_TAIL = 3
"""The last tokens of an answer, one of which is its end token: templates write a line break after it."""


class EncodedPair(NamedTuple):
    """The tokens of a pair or conversation. `prompt`: tokens before the first that counts. `response`: all later
    tokens. `learnt`: marks the tokens of `response` that count.
    """

    prompt: list[int]
    response: list[int]
    learnt: list[bool]


class PairEncoder:
    """Turns pairs and conversations into tokens and checks them.

    Args:
        max_length: longest sequence, in tokens.
        positions: of the model, in tokens; None: unknown.
        truncate: cut the right end of longer sequences instead of refusing them.
        chat_template: arguments of the tokenizer's chat template.
        ignore_mismatch: train on turns as in the whole conversation, even if they differ from their text as its last.
        ends: tokens that end a text; the first is added to responses; None: the tokenizer's.
        embedded: rows of the model's embedding; None: unknown.

    Attributes:
        limit: longest sequence, in tokens.
        cut: the end that is cut off, in words.

    Raises:
        ConfigError: see `ChatTemplate`.
    """

    cut = "their right end"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        positions: int | None = None,
        truncate: bool = False,
        chat_template: Mapping[str, object] | None = None,
        ignore_mismatch: bool = False,
        ends: Sequence[int] | None = None,
        embedded: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = [one for one in (tokenizer.eos_token_id,) if one is not None] if ends is None else ends
        self._embedded = embedded
        self._max_length = max_length
        self._positions = positions
        self._truncate = truncate
        self._template = ChatTemplate(tokenizer, chat_template or {})
        self._ignore_mismatch = ignore_mismatch
        self.limit = max_length if positions is None else min(max_length, positions)

    @classmethod
    def of_task(cls, task: Mapping[str, Any], tokens: ModelTokens) -> Self:
        """Make the encoder from the keys of `task`."""
        return cls(
            tokens.tokenizer,
            max_length=task["max_length"],
            positions=positions_of(tokens.config),
            truncate=task.get("too_long") == "truncate",
            chat_template=task.get("chat_template"),
            ignore_mismatch=bool(task.get("ignore_input_ids_mismatch")),
            ends=tokens.ends,
            embedded=tokens.embedded,
        )

    def encode(self, examples: Sequence[TextPair | Conversation]) -> list[EncodedPair]:
        """Return the tokens of examples."""
        return [
            self._fitted(example.where, *found) for example, found in zip(examples, self._all(examples), strict=True)
        ]

    def lengths(self, examples: Sequence[TextPair | Conversation], places: Sequence[str] = ()) -> list[int]:
        """Return the numbers of tokens of examples, also above the limit."""
        found = self._all(examples)
        usable = self._fitted if self._truncate else self._parted
        for example, (ids, learnt) in zip(examples, found, strict=True):
            usable(example.where, ids, learnt)
        return [len(ids) for ids, _ in found]

    def unended(self, example: TextPair | Conversation) -> str | None:
        """Return a warning about an answer without an end token; None: it has one."""
        ids, learnt = self._all([example])[0]
        tail = [token for token, mark in zip(ids, learnt, strict=True) if mark][-_TAIL:]
        if not tail or not self._ends or not set(tail).isdisjoint(self._ends):
            return None
        return (
            f"{example.where}: the chat template ends an answer with {self._tokenizer.decode(tail)!r}, which has none "
            "of the model's end-of-sequence tokens, so the trained model would not end its responses; name the token "
            "of the template in eos_token_id of generation_config.json"
        )

    @property
    def limit_text(self) -> str:
        """The origin of the limit, in words."""
        if self.limit == self._max_length:
            return f"task.max_length allows {self.limit}"
        return f"the model has {self.limit} positions"

    def remedy(self, longest: int) -> str:
        """Return the setting that would admit sequences of so many tokens."""
        fits = self._positions is None or longest <= self._positions
        return f"task.max_length={longest}" if fits else "a model with more positions"

    def _fitted(self, where: str, ids: list[int], learnt: list[bool]) -> EncodedPair:
        if len(ids) > self.limit:
            if not self._truncate:
                raise RunError(f"{where}: {len(ids)} tokens; {self.limit_text}")
            if not any(learnt[: self.limit]):
                raise RunError(f"{where}: nothing to learn is left of {len(ids)} tokens; {self.limit_text}")
            ids, learnt = ids[: self.limit], learnt[: self.limit]
        return self._parted(where, ids, learnt)

    @staticmethod
    def _parted(where: str, ids: list[int], learnt: list[bool]) -> EncodedPair:
        if not any(learnt):
            raise RunError(f"{where}: there is no token to learn")
        first = learnt.index(True)
        if first == 0:
            raise RunError(f"{where}: the prompt has no token")
        return EncodedPair(ids[:first], ids[first:], learnt[first:])

    def _all(self, examples: Sequence[TextPair | Conversation]) -> list[tuple[list[int], list[bool]]]:
        """Return the tokens of each, and marks of those that count."""
        try:
            return self._tokens(examples)
        except RunError:
            raise
        except Exception as error:
            if len(examples) == 1:
                raise RunError(f"{examples[0].where} cannot be tokenised: {error}") from error
            return [found for example in examples for found in self._all([example])]  # to name the wrong one

    def _tokens(self, examples: Sequence[TextPair | Conversation]) -> list[tuple[list[int], list[bool]]]:
        of_pairs = iter(self._pairs([one for one in examples if isinstance(one, TextPair)]))
        of_conversations = iter(self._conversations([one for one in examples if isinstance(one, Conversation)]))
        found = [next(of_pairs if isinstance(one, TextPair) else of_conversations) for one in examples]
        for example, (ids, _) in zip(examples, found, strict=True):
            self._check_known(example.where, ids)
        return found

    # -- pairs

    def _pairs(self, pairs: Sequence[TextPair]) -> Iterator[tuple[list[int], list[bool]]]:
        if pairs and not self._ends:
            raise RunError(f"{pairs[0].where}: the model names no end-of-sequence token to put behind a response")
        texts = [pair.response for pair in pairs]
        responses = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        of_texts = iter(prompt_tokens(self._tokenizer, [pair.prompt for pair in pairs if isinstance(pair.prompt, str)]))
        chats = [(pair.where, pair.prompt) for pair in pairs if not isinstance(pair.prompt, str)]
        for where, _ in chats:
            self._check_template(where)
        of_chats = iter(self._template.tokens([self._template.render(chat, ask=True) for _, chat in chats]))
        for pair, spoken in zip(pairs, responses, strict=True):
            prompt = next(of_texts if isinstance(pair.prompt, str) else of_chats)
            response = [*spoken, *([] if spoken and spoken[-1] in self._ends else self._ends[:1])]
            yield [*prompt, *response], [False] * len(prompt) + [True] * len(response)

    # -- conversations

    def _conversations(self, conversations: Sequence[Conversation]) -> list[tuple[list[int], list[bool]]]:
        for conversation in conversations:
            self._check_template(conversation.where)
        turns = partial(assistant_turns, self._template, ignore_mismatch=self._ignore_mismatch)
        return self._template.marked_tokens([turns(conversation) for conversation in conversations])

    # -- both

    def _check_template(self, where: str) -> None:
        if not self._template.present:
            raise RunError(f"{where} is a chat, but the tokenizer has no chat template")

    def _check_known(self, where: str, ids: Sequence[int]) -> None:
        unknown = self._tokenizer.unk_token_id
        stands_for_more = unknown in (
            self._tokenizer.bos_token_id,
            self._tokenizer.eos_token_id,
            self._tokenizer.pad_token_id,
        )
        if unknown is not None and not stands_for_more and unknown in ids:
            raise RunError(f"{where} cannot be tokenised: the tokenizer does not know a part of it")
        if text := beyond_embedding(self._tokenizer, ids, self._embedded):
            raise RunError(f"{where} {text}")


# The characters of a conversation that the assistant says: those that are trained on.


_NO_BEGINNING = "\ue000"
"""A character of private use, in no script and no template."""
_MARKS = "give the model a chat template with {% generation %} marks"


def assistant_turns(template: ChatTemplate, conversation: Conversation, *, ignore_mismatch: bool) -> MarkedText:
    """Return the text of a conversation, and the assistant's parts of it, each with its end token."""
    thinking = {} if conversation.thinking is None else {"enable_thinking": conversation.thinking}
    more = {"tools": conversation.tools, **thinking}
    marked = template.marked(conversation.messages, **more)
    found = marked or _TurnFinder(template, conversation, more).turns(ignore_mismatch)
    learnt = " ".join(found.text[begin:end] for begin, end in found.learnt)
    for place, message in enumerate(conversation.messages):
        content = message.get("content")
        if message["role"] != "assistant":
            continue
        if isinstance(content, str) and not has_words(learnt, content.rpartition("</think>")[2]):
            what = "leaves out the text" if marked is None else "marks no text"
            raise RunError(f"{conversation.where}: the chat template {what} of message {place + 1}")
        if message.get("tool_calls") and found.text == _without_calls(template, conversation.messages, place, more):
            raise RunError(
                f"{conversation.where}: the chat template leaves out the tool calls of message {place + 1}; give the "
                "model a chat template that renders them"
            )
    return found


def _without_calls(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], place: int, more: Mapping[str, object]
) -> str | None:
    """Return the text of a conversation without a message's tool calls; None: the template refuses it."""
    other = {key: value for key, value in messages[place].items() if key != "tool_calls"}
    try:
        return template.render([*messages[:place], other, *messages[place + 1 :]], ask=False, **more)
    except ValueError:
        return None


class _TurnFinder:
    """Finds the turns of a conversation by rendering its beginnings."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, more: Mapping[str, object]) -> None:
        self._template, self._more = template, more
        self._where, self._messages = conversation.where, conversation.messages
        self._whole = template.render(self._messages, ask=False, **more)

    def turns(self, ignore_mismatch: bool) -> MarkedText:
        learnt = []
        for place, message in enumerate(self._messages):
            if message["role"] == "assistant":
                asked = self._text(place, ask=True)
                begin = self._begin(place, asked)
                learnt.append((begin, self._end(place, begin, asked, ignore_mismatch)))
        return MarkedText(self._whole, learnt)

    def _text(self, count: int, *, ask: bool = False) -> str:
        """Return the text of the first `count` messages."""
        if count == 0:
            raise RunError(
                f"{self._where}: message 1 is the assistant's: the prompt has no token, and the chat template does not "
                f"tell what of the message is learnt; remove it, or {_MARKS}"
            )
        try:
            return self._template.render(self._messages[:count], ask=ask, **self._more)
        except Exception as error:
            raise RunError(
                f"{self._where}: the chat template takes the conversation, but not its first {count} messages by "
                f"themselves, so it does not tell what is learnt ({error}); {_MARKS}"
            ) from error

    def _before(self, place: int, asked: str) -> str:
        """Return the text before a turn, with which `asked` and the whole text begin."""
        before = self._text(place)
        # some templates end a chat that does not ask with an end-of-text token
        for text in (before, before.removesuffix(self._template.end_of_text)):
            if asked.startswith(text) and self._whole.startswith(text):
                return text
        raise RunError(
            f"{self._where}: the chat template renders the messages before message {place + 1} otherwise in the whole "
            f"conversation than where it asks for that message, so it does not tell where that begins; {_MARKS}"
        )

    def _begin(self, place: int, asked: str) -> int:
        """Return the begin of a turn, after the part of the generation prompt that the whole text has."""
        begin = self._begin_in(self._whole, place, asked)
        if begin < len(asked):
            self._before(place, asked)
        return begin

    def _begin_in(self, text: str, place: int, asked: str) -> int:
        if text.startswith(asked):
            return len(asked)
        begin, message = common_start(asked, text), self._messages[place]
        if not isinstance(content := message.get("content"), str):
            return begin
        # the message may begin with the same characters as the rest of the generation prompt
        other = [*self._messages[:place], {**message, "content": _NO_BEGINNING + content}]
        return min(begin, common_start(asked, self._template.render(other, ask=False, **self._more)))

    def _end(self, place: int, begin: int, asked: str, ignore_mismatch: bool) -> int:
        """Return the end of a turn, after its end token."""
        count = place + 1
        if count == len(self._messages):
            return len(self._whole)
        turn = self._text(count)
        said = turn[self._begin_in(turn, place, asked) :]
        if self._whole.startswith(said, begin):
            return begin + len(said)
        # some templates end the last turn in another way
        turn = self._text(count, ask=True).removesuffix(asked[len(self._before(place, asked)) :])
        said = turn[self._begin_in(turn, place, asked) :]
        ends = (begin + len(said) - gone for gone in range(len(said)) if self._whole.startswith(said[gone:], begin))
        end = next(ends, begin)
        if end == begin + len(said) or (ignore_mismatch and end > begin):
            return end
        advice = "" if end == begin else "set task.ignore_input_ids_mismatch=true to learn it as it is there, or "
        raise RunError(
            f"{self._where}: the chat template renders message {count} otherwise in the whole conversation than as the "
            "last message, which it is when the model says it (templates drop its thinking, for instance); "
            f"{advice}{_MARKS}"
        )


# A tokenizer's chat template: texts of chats, the parts that the template marks as the assistant's, and their tokens.


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
