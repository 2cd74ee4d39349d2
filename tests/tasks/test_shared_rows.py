"""Rows that a validation has in common with what is trained on."""

from __future__ import annotations

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.pairs import TextPair, shared_rows


def chat(*contents: str) -> Prompt:
    messages = tuple({"role": "user", "content": content} for content in contents)
    return Prompt(index=0, text=contents[-1], messages=messages)


def test_prompts_are_the_same_by_all_that_they_say_whatever_their_answer() -> None:
    trained = [Prompt(index=0, text="a"), Prompt(index=1, text="b", answer="1"), chat("first", "c")]
    asked = [Prompt(index=5, text="b", answer="2"), Prompt(index=6, text="c"), chat("first", "c"), chat("other", "c")]
    places = [f"val:{number}" for number in range(1, 5)]
    assert shared_rows(trained, zip(places, asked, strict=True)) == ["val:1", "val:3"]


def test_pairs_and_conversations_are_the_same_as_a_whole_wherever_they_stand() -> None:
    trained = [TextPair("a", "b", "train:1"), TextPair("a", "c", "train:2")]
    asked = [("val:1", TextPair("a", "d", "val:1")), ("val:2", TextPair("a", "c", "val:2"))]
    assert shared_rows(trained, asked) == ["val:2"]
    said = [{"role": "user", "content": "a"}, {"content": "b", "role": "assistant"}]
    turned = [{"content": "a", "role": "user"}, {"role": "assistant", "content": "b"}]
    talk = Conversation(turned, None, None, "val:1")
    assert shared_rows([Conversation(said, None, None, "train:1")], [("val:1", talk)]) == ["val:1"]
    assert shared_rows([Conversation(said, None, True, "train:1")], [("val:1", talk)]) == []
