from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from tests.tasks.chat import TEMPLATE, chat_tokenizer, ending_tokenizer, said
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.tasks.conversations import Conversation, ConversationsTask
from trinity_sync.tasks.encoding import EncodedPair, PairEncoder
from trinity_sync.tasks.pairs import TextPair

HERE = "train.jsonl:3"

PICKY = "{% if messages[0].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}" + TEMPLATE[
    TEMPLATE.index("{%- if tools") :
].replace("message.content", "message.content if message.content is string else message.content[0].text")
THINKING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if loop.last and loop.index0 and message.role == 'assistant' %}{{ '??' }}{% endif %}{{ message.content }}",
)
"""One that does not render a turn without a question before it, and one that renders the last turn otherwise."""


def encoder(tokenizer: PreTrainedTokenizerFast | None = None, **changes: Any) -> PairEncoder:
    return PairEncoder(tokenizer or chat_tokenizer(), **({"max_length": 100} | changes))


def conversation(messages: list[dict[str, object]], **more: Any) -> Conversation:
    return Conversation(messages, more.get("tools"), more.get("thinking"), HERE)  # type: ignore[arg-type]


def spoken(ids: list[int]) -> str:
    return str(chat_tokenizer().decode(ids))


def learnt(found: EncodedPair) -> str:
    return spoken([token for token, mark in zip(found.response, found.learnt, strict=True) if mark])


# pairs


@pytest.mark.parametrize(
    ("prompt", "before"), [("61=", "␂61="), ([{"role": "user", "content": "61="}], "%*;<0:61=><1:")]
)
def test_of_a_pair_the_response_and_its_end_are_learnt(prompt: Any, before: str) -> None:
    (found,) = encoder().encode([TextPair(prompt, "61", HERE)])
    assert (spoken(found.prompt), spoken(found.response), found.learnt) == (before, "61␃", [True] * 3)


@pytest.mark.parametrize(
    ("settings", "told"), [({}, "task.max_length allows 6"), ({"positions": 6}, "the model has 6")]
)
def test_a_pair_that_is_too_long_is_refused_or_loses_its_right_end(settings: dict[str, int], told: str) -> None:
    long = TextPair("61=", "12345", HERE)
    limits = {"max_length": 100 if settings else 6} | settings
    assert encoder(**limits).lengths([long]) == [10]
    with pytest.raises(RunError, match=rf"^{HERE}: 10 tokens; {told}"):
        encoder(**limits).encode([long])
    (cut,) = encoder(**limits, truncate=True).encode([long])
    assert (spoken(cut.prompt), spoken(cut.response)) == ("␂61=", "12")


def test_a_prompt_that_leaves_no_room_is_refused_though_it_may_be_cut() -> None:
    with pytest.raises(RunError, match=rf"^{HERE}: nothing to learn is left of 6 tokens"):
        encoder(max_length=4, truncate=True).lengths([TextPair("61=", "1", HERE)])


def test_of_many_the_one_is_named_that_cannot_be_tokenised() -> None:
    with pytest.raises(RunError, match=r"^b cannot be tokenised"):
        encoder().lengths([TextPair("1", "1", "a"), TextPair("1", "x", "b"), TextPair("x", "1", "c")])


def test_a_chat_needs_a_template() -> None:
    pairs = [TextPair("1", "1", "a"), TextPair(said("1"), "1", "b")]  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"^b is a chat, but the tokenizer has no chat template"):
        encoder(chat_tokenizer(None)).lengths(pairs)


# conversations

CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": said("61=", "61")},
    "several": {"messages": said("1+1=", "2", "2+2=", "4", "5-1=", "4")},
    "a system message": {"messages": said("61=", "61", "7", "8", system="%")},
    "the user has the last word": {"messages": said("61=", "61", "7")},
    "tools": {"messages": said("61=", "61"), "tools": [{"name": "7"}, {"name": "88"}]},
    "thinking": {"messages": said("61=", "61"), "enable_thinking": True},
    "no thinking": {"messages": said("61=", "61"), "enable_thinking": False},
}


def test_the_turns_of_the_assistant_are_learnt_without_what_asks_for_them() -> None:
    (found,) = encoder().encode([conversation(said("1+1=", "2", "2+2=", "4"))])
    assert spoken(found.prompt) == "%*;<0:1+1=><1:"
    assert spoken(found.response) == "2><0:2+2=><1:4>"
    assert learnt(found) == "2>4>"


def of_file(folder: Path, rows: list[dict[str, Any]], kind: str) -> tuple[ConversationsTask, Path]:
    table = folder / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    lines = folder / "chats.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConversationsTask(table if kind == "parquet" else lines, "messages", 0), table


def call(name: str, arguments: dict[str, object], **more: object) -> list[dict[str, object]]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return [
        *said("7"),
        {"role": "assistant", "tool_calls": calls, **more},
        {"role": "tool", "content": "7"},
        said("", "8")[1],
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [call("f", {"x": 1}, content=""), call("g", {"y": "q"}, content="")],
        [call("f", {"x": {"z": [{"w": 1}, {"v": 2}]}}), call("g", {}, content=None)],
        [[*said("1"), {"role": "assistant", "content": "2", "tool_calls": None}], call("f", {"x": 1}, content=None)],
        [call("f", {"x": 1}), call("g", {"x": 2}, content=None)],
    ],
)
def test_rows_of_json_lines_and_of_parquet_are_the_same_conversations(tmp_path: Path, rows: list[Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    given = [{"messages": messages, "tools": [tool]} for messages in rows]
    given[0]["tools"] = [tool, {"type": "function", "function": {"name": "f", "strict": True}}]
    found = [
        [one._replace(where="") for _, one in of_file(tmp_path, given, kind)[0].all_rows()]
        for kind in ("jsonl", "parquet")
    ]
    assert found[0] == found[1]
    assert not any(value is None for one in found[0] for message in one.messages for value in message.values())
    assert all("content" in message for one in found[0] for message in one.messages)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("chat", "template"),
    [(chat, name) for chat in CHATS for name in ("plain", "picky") if (chat, name) != ("a system message", "picky")],
)
def test_tokens_and_mask_are_those_of_verls_dataset(tmp_path: Path, chat: str, template: str, kind: str) -> None:
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer = chat_tokenizer({"plain": TEMPLATE, "picky": PICKY}[template])
    task, table = of_file(tmp_path, [CHATS[chat]], kind)
    verls = MultiTurnSFTDataset(
        str(table),
        tokenizer,
        {"pad_mode": "no_padding"},  # type: ignore[arg-type]
    )[0]
    (found,) = encoder(tokenizer).encode(task.pairs(1, 1))
    assert [*found.prompt, *found.response] == verls["input_ids"].tolist()
    assert [False] * len(found.prompt) + found.learnt == verls["loss_mask"].bool().tolist()


def refused(messages: list[dict[str, object]], template: str, **more: Any) -> str:
    with pytest.raises(RunError) as caught:
        encoder(chat_tokenizer(template), **more).lengths([conversation(messages)])
    assert str(caught.value).startswith(HERE)
    return str(caught.value).removeprefix(HERE)


@pytest.mark.parametrize("answer", ["61616161", "-7"])
def test_of_a_longer_generation_prompt_what_the_turn_begins_with_is_not_learnt(answer: str) -> None:
    """The template ends the prompt with ``-+``, which no turn has; an answer may begin like that."""
    quiet = encoder(chat_template={"enable_thinking": False})
    (found,) = quiet.encode([conversation(said("61=", answer, "7", "77777777"))])
    assert spoken(found.prompt) == "%*;<0:61=><1:"
    assert learnt(found) == f"{answer}>77777777>"


def test_a_turn_that_is_another_one_in_the_conversation_is_refused_unless_that_is_allowed() -> None:
    chat = said("61=", "61", "7", "8")
    told = refused(chat, THINKING)
    assert told.startswith(": the chat template renders message 2 otherwise in the whole conversation")
    assert "set task.ignore_input_ids_mismatch=true to learn it as it is there" in told
    (found,) = encoder(chat_tokenizer(THINKING), ignore_mismatch=True).encode([conversation(chat)])
    assert learnt(found) == "61>??8>", "as the whole conversation has it"


def test_a_template_that_marks_what_is_learnt_is_taken_at_its_word() -> None:
    marking = TEMPLATE.replace(
        "{{ message.content }}{{ '>' }}",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{{ '>' }}",
    )
    (found,) = encoder(chat_tokenizer(marking)).encode([conversation(said("61=", "61", "7", "8"))])
    assert (spoken(found.prompt), learnt(found)) == ("%*;<0:61=><1:", "618")


def test_a_template_that_wants_roles_in_turns_is_asked_for_such_chats_alone() -> None:
    alternating = "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}" + (
        "{{ raise_exception('take turns') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    found, other = encoder(chat_tokenizer(alternating)).encode(
        [conversation(said("61=", "61", "7", "8")), conversation(said("61=", "61", "7"))]
    )
    assert (learnt(found), learnt(other)) == ("61>8>", "61>")
    told = refused(said("61=", "61", system="7"), alternating)
    assert told == " cannot be tokenised: the chat template does not take it: take turns"


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("{{ '>' }}{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}", ">␃"),
        ("{{ '*' if loop.last and message.role == 'assistant' and not add_generation_prompt else '>' }}", "*"),
    ],
)
def test_a_template_may_end_the_last_turn_otherwise(end: str, last: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATE.replace("{{ '>' }}", end))
    (found,) = encoder(tokenizer).encode([conversation(said("61=", "61", "7", "8", "9", "0"))])
    assert learnt(found) == f"61>8>0{last}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% if add_generation_prompt %}{{ '%' }}{% endif %}" + TEMPLATE,
            ": the chat template renders the messages before message 2 otherwise in the whole conversation than where",
        ),
        (
            TEMPLATE.replace("{{ '>' }}", "{{ '*' if loop.last and not add_generation_prompt else '>' }}"),
            ": the chat template renders the messages before message 2 otherwise in the whole conversation than where",
        ),
        (
            TEMPLATE.replace("{{ message.content }}", "{% if loop.first %}{{ message.content }}{% endif %}"),
            ": the chat template leaves out the text of message 2",
        ),
        (
            TEMPLATE.replace(
                "{{ message.content }}",
                "{{ message.content if not loop.last }}{% generation %}{{ message.content if loop.last }}"
                "{% endgeneration %}",
            ),
            ": the chat template marks no text of message 2",
        ),
        (
            TEMPLATE.replace("message.content", "message.content[0].text"),
            " cannot be tokenised: the chat template leaves out the texts of the messages",
        ),
        (
            "{% if messages|length == 1 %}{{ raise_exception('too few') }}{% endif %}" + TEMPLATE,
            ": the chat template takes the conversation, but not its first 1 messages by themselves, so it does not "
            "tell what is learnt (the chat template does not take it: too few); give the model a chat template with",
        ),
    ],
)
def test_a_template_that_does_not_tell_what_is_learnt_is_refused(template: str, told: str) -> None:
    assert refused(said("61=", "61", "7", "8"), template).startswith(told)


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    calls = [{"type": "function", "function": {"name": "7", "arguments": {}}}]
    chat = [*said("61="), {"role": "assistant", "content": "", "tool_calls": calls}]
    assert refused(chat, TEMPLATE).startswith(": the chat template leaves out the tool calls of message 2")


def test_a_tokenizer_that_does_not_know_the_places_of_its_tokens_learns_the_same() -> None:
    """As those written in Python, of which transformers has the tokens alone."""

    class Placeless(PreTrainedTokenizerFast):
        def __call__(self, *arguments: Any, **settings: Any) -> Any:
            return {"input_ids": super().__call__(*arguments, **settings)["input_ids"]}

    fast = chat_tokenizer()
    slow = Placeless(tokenizer_object=fast.backend_tokenizer, unk_token=fast.unk_token, chat_template=TEMPLATE)
    chat = [conversation(said("1+1=", "2", "2+2=", "4"))]
    assert encoder(slow).encode(chat) == encoder(fast).encode(chat)


def test_a_conversation_that_is_too_long_loses_its_right_end() -> None:
    long = conversation(said("1+1=", "2", "2+2=", "4"))
    (cut,) = encoder(max_length=20, truncate=True).encode([long])
    assert spoken([*cut.prompt, *cut.response]) == "%*;<0:1+1=><1:2><0:2+2="[:20]
    assert learnt(cut) == "2>"
    with pytest.raises(RunError, match="nothing to learn is left of 29 tokens"):
        encoder(max_length=14, truncate=True).lengths([long])


def test_a_conversation_that_begins_with_what_is_learnt_is_refused() -> None:
    bare = chat_tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(RunError, match=rf"^{HERE}: message 1 is the assistant's: the prompt has no token"):
        encoder(bare).lengths([conversation([{"role": "assistant", "content": "61"}])])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "has no such field; it has: 'text'"),
        ({"messages": []}, "must be a list of chat messages"),
        ({"messages": "61="}, "must be a list of chat messages"),
        ({"messages": [{"role": "user"}]}, "message 1 of the field 'messages' must be an object with the texts"),
        ({"messages": [*said("1"), {"content": "2"}]}, "message 2 of the field 'messages' must be an object"),
        ({"messages": said("61=")}, "no message is the assistant's"),
        ({"messages": said("1", "2"), "tools": "7"}, "the field 'tools' must be a list"),
        ({"messages": said("1", "2"), "enable_thinking": "no"}, "the field 'enable_thinking' must be true or false"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_at_once(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (CHATS["one turn"], {"text": "x", **row})))
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:2[: ].*{told}"):
        ConversationsTask(path, "messages", 0)


# ends of texts


def test_an_answer_that_the_template_ends_with_no_end_token_is_told_of() -> None:
    told = encoder().unended(conversation(said("61=", "61")))
    assert str(told).startswith(
        "train.jsonl:3: the chat template ends an answer with '61>', which has none of the model"
    )


@pytest.mark.parametrize(
    "example", [conversation(said("61=", "61␃")), TextPair("61=", "61", HERE)], ids=["turns", "pair"]
)
def test_an_answer_that_ends_with_an_end_token_is_not_told_of(example: Any) -> None:
    assert encoder().unended(example) is None


def test_a_pair_has_one_end_token_though_the_tokenizer_adds_its_own() -> None:
    (found,) = encoder(ending_tokenizer()).encode([TextPair("61=", "61", HERE)])
    assert (spoken(found.prompt), spoken(found.response)) == ("␂61=", "61␃")


def test_a_response_that_ends_itself_gets_no_second_end() -> None:
    (found,) = encoder(ends=[2]).encode([TextPair("61=", "61␃", HERE)])
    assert spoken(found.response) == "61␃"


def test_the_first_of_the_ends_is_taught() -> None:
    (found,) = encoder(ends=[5, 2]).encode([TextPair("61=", "61", HERE)])
    assert found.response[-1] == 5


def test_a_pair_is_refused_by_its_place_where_the_model_names_no_end() -> None:
    with pytest.raises(RunError, match=r"^train\.jsonl:3: the model names no end-of-sequence token"):
        encoder(ends=[]).encode([TextPair("61=", "61", HERE)])


@pytest.mark.parametrize(
    "example", [TextPair("61=", "61", HERE), conversation(said("61=", "61"))], ids=["pair", "turns"]
)
def test_a_token_beyond_the_embedding_is_refused_by_place_and_token(example: Any) -> None:
    with pytest.raises(RunError, match=r"^train\.jsonl:3 has token \d+ \('.'\), but the embedding of the model has 8"):
        encoder(embedded=8).encode([example])
