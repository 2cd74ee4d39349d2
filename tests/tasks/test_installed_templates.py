"""Each chat template of the installed packages: what is learnt of conversations is right, or the refusal is."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest

from tests.tasks.installed_templates import PACKAGES, marking_tokenizer, templates_of
from trinity_sync.errors import RunError
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.encoding import PairEncoder

_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"x": 1}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "Where."}}},
    },
}
_ASKED, _ANSWER = {"role": "user", "content": "Quokka?"}, {"role": "assistant", "content": "Zebra."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [_ASKED, _ANSWER],
    "system": [{"role": "system", "content": "Wombat!"}, _ASKED, _ANSWER],
    "turns": [_ASKED, _ANSWER, {"role": "user", "content": "Numbat?"}, {"role": "assistant", "content": "Yak."}],
    "asked last": [_ASKED, _ANSWER, {"role": "user", "content": "Numbat?"}],
    "thinking": [_ASKED, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nZebra."}],
    "tools": [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "weather", "content": "7", "tool_call_id": "abcdefghi"},
        _ANSWER,
    ],
}
_SAID = {"turns": ["Zebra.", "Yak."], "tools": ["weather", "Zebra."]}
_REFUSALS = (
    "the chat template does not take it: ",
    "the chat template leaves out ",
    "the chat template renders message 2 otherwise in the whole conversation than as the last message",
    "the chat template takes the conversation, but not its first",
    "the chat template renders the messages before message",
)


@pytest.fixture(scope="module", params=PACKAGES)
def templates(request: pytest.FixtureRequest) -> dict[str, str]:
    found = templates_of(request.param)
    if not found:
        pytest.skip(f"{request.param} is not installed, or has no chat template")
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.few(8)
def test_what_the_assistant_says_is_learnt_or_the_reason_is_told(templates: dict[str, str], chat: str) -> None:
    wrong = {name: told for name, text in templates.items() if (told := fault(text, chat))}
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_templates_of_texts_are_not_refused(package: str) -> None:
    """At least one of each package: all being refused would be right, too, in the test above."""
    found = templates_of(package)
    if not found:
        pytest.skip(f"{package} is not installed, or has no chat template")
    assert any(isinstance(learnt_of(text, CHATS["turns"]), list) for text in found.values())


def fault(template: str, name: str) -> str:
    """Why what is learnt, or the refusal, is wrong; empty: it is right."""
    learnt = learnt_of(template, CHATS[name])
    if isinstance(learnt, str):
        return "" if learnt.startswith(_REFUSALS) else learnt
    said = _SAID.get(name, ["Zebra."])
    others = re.compile("Quokka|Numbat|Wombat|Tells it")
    right = [word in part and not others.search(part) for word, part in zip(said, learnt, strict=False)]
    return "" if len(learnt) == len(said) and all(right) else repr(learnt)


def learnt_of(template: str, messages: list[dict[str, Any]]) -> list[str] | str:
    """The parts of a conversation that are learnt, or why it is refused."""
    tokenizer = marking_tokenizer(template)
    tools = [_TOOL] if any("tool_calls" in message for message in messages) else None
    conversation = Conversation(messages, tools, None, "f:1")  # type: ignore[arg-type]
    try:
        ((prompt, response, learnt),) = PairEncoder(tokenizer, max_length=99999).encode([conversation])
    except RunError as error:
        return re.sub(r"^f:1( cannot be tokenised)?: ", "", str(error))
    whole = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    if [*prompt, *response] != whole:
        return f"other tokens than those of the conversation: {tokenizer.decode([*prompt, *response])}"
    parts = groupby(zip(response, learnt, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in part])) for mark, part in parts if mark]
