"""Find the characters of a conversation that the assistant says: those that are trained on.

The template's ``{% generation %}`` marks tell, if it has them. Otherwise a turn begins where the text of the messages
before it, with the generation prompt, and the text of the whole conversation diverge; it ends where the text of the
messages up to it ends. Only beginnings of the conversation are rendered, so that a template never gets a chat that it
refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity_sync.errors import RunError
from trinity_sync.tasks.chat_template import ChatTemplate, MarkedText, common_start, has_words
from trinity_sync.tasks.conversations import Conversation

_NO_BEGINNING = "\ue000"
"""A character of private use, in no script and no template."""
_MARKS = "give the model a chat template with {% generation %} marks"


def assistant_turns(template: ChatTemplate, conversation: Conversation, *, ignore_mismatch: bool) -> MarkedText:
    """Return the text of a conversation, and the assistant's parts of it, each with its end token."""
    more: dict[str, object] = {"tools": conversation.tools}
    if conversation.thinking is not None:
        more["enable_thinking"] = conversation.thinking
    marked = template.marked(conversation.messages, **more)
    found = marked or _Rendered(template, conversation, more).turns(ignore_mismatch)
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


class _Rendered:
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
