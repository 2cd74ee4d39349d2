from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.chat import TEMPLATE, chat_tokenizer, ending_tokenizer, said
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.encoding import PromptEncoder

HERE = "train.jsonl:3"


def encoder(**changes: Any) -> PromptEncoder:
    return PromptEncoder(changes.pop("tokenizer", None) or chat_tokenizer(), **({"response_length": 4} | changes))


def text(content: str) -> Prompt:
    return Prompt(index=0, text=content)


def chat(*contents: str) -> Prompt:
    return Prompt(index=0, text=contents[-1], messages=tuple(said(*contents)))  # type: ignore[arg-type]


def spoken(ids: list[int]) -> str:
    return str(chat_tokenizer().decode(ids)).replace("␂", "")


def test_a_chat_is_asked_for_an_answer_with_the_arguments_that_are_given() -> None:
    assert spoken(encoder().encode(chat("61="), HERE)) == "%*;<0:61=><1:"
    quiet = encoder(chat_template={"enable_thinking": False})
    assert spoken(quiet.encode(chat("61="), HERE)) == "%*;<0:61=><1:-+"
    assert quiet.encode(text("61="), HERE) == encoder().encode(text("61="), HERE), "of texts no template is asked"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("enable_thinkin", "is not an argument that the tokenizer's chat template reads; it reads: enable_thinking"),
        ("tools", "is set by the program itself"),
        ("add_generation_prompt", "is set by the program itself"),
    ],
)
def test_an_argument_that_the_template_does_not_read_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^task\.chat_template\.{name} {told}"):
        encoder(chat_template={name: True})


def test_arguments_without_a_template_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^task\.chat_template is given, but the model's tokenizer has no chat"):
        encoder(tokenizer=chat_tokenizer(None), chat_template={"enable_thinking": False})


def test_arguments_where_none_of_several_templates_is_the_default_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^task\.chat_template: This model has multiple chat templates with no def"):
        encoder(tokenizer=chat_tokenizer({"rag": TEMPLATE}), chat_template={"enable_thinking": False})


def test_of_a_template_with_marks_arguments_are_refused_too() -> None:
    marked = chat_tokenizer("{%- generation %}{{ messages[0].content }}{{ mood }}{% endgeneration -%}")
    assert encoder(tokenizer=marked, chat_template={"mood": 1}).limit is None
    with pytest.raises(ConfigError, match=r"^task\.chat_template\.anything is not an argument that .* it reads: mood$"):
        encoder(tokenizer=marked, chat_template={"anything": 1})


def test_of_a_template_with_tags_of_its_own_no_argument_is_refused() -> None:
    tagged = chat_tokenizer("{% trans %}{{ messages[0].content }}{% endtrans %}")
    assert encoder(tokenizer=tagged, chat_template={"anything": 1}).limit is None


@pytest.mark.parametrize(
    ("settings", "limit", "told"),
    [
        ({"prompt_length": 6}, 6, "task.prompt_length allows 6"),
        (
            {"prompt_length": 9, "positions": 10},
            6,
            "with a response of 4 that is more than the 10 positions of the model",
        ),
        ({"positions": 10}, 6, "with a response of 4 that is more than the 10 positions of the model"),
        ({"prompt_length": 6, "positions": 100}, 6, "task.prompt_length allows 6"),
    ],
)
def test_the_limit_is_that_of_the_settings_or_of_the_model(settings: dict[str, int], limit: int, told: str) -> None:
    found = encoder(**settings)
    assert found.limit == limit
    assert len(found.encode(text("12345"), HERE)) == 6
    with pytest.raises(RunError, match=rf"^{HERE} has 7 tokens; {told}$"):
        found.encode(text("123456"), HERE)
    cut = encoder(**settings, truncate=True)
    assert spoken(cut.encode(text("123456789"), HERE)) == "456789", "the end of a prompt stays"
    assert cut.lengths([text("123456789")], [HERE]) == [10], "as it was before"


def test_a_response_that_fills_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no room for a prompt in the 4 positions"):
        encoder(positions=4)


def test_many_at_a_time_have_the_lengths_that_each_has() -> None:
    prompts = [text("1"), chat("2", "3", "4"), text("12345"), chat("6")]
    one = encoder()
    assert one.lengths(prompts, [HERE] * 4) == [len(one.encode(prompt, HERE)) for prompt in prompts]


@pytest.mark.parametrize("bad", [text("6x="), chat("6x=")])
def test_of_many_the_one_is_named_that_cannot_be_tokenised(bad: Prompt) -> None:
    with pytest.raises(RunError, match=r"^b cannot be tokenised: the tokenizer has no token for 'x'$"):
        encoder().lengths([text("1"), bad, bad], ["a", "b", "c"])


def test_of_many_a_chat_is_named_for_which_there_is_no_template() -> None:
    with pytest.raises(RunError, match=r"^b is a chat, but the tokenizer has no chat template"):
        encoder(tokenizer=chat_tokenizer(None)).lengths([text("1"), chat("2")], ["a", "b"])


def test_a_prompt_that_the_template_leaves_out_is_named() -> None:
    silent = chat_tokenizer("{{ '' }}")
    with pytest.raises(RunError, match=r"^b cannot be tokenised: the chat template leaves out the texts of the mess"):
        encoder(tokenizer=silent).lengths([text("1"), chat("2")], ["a", "b"])


def test_an_end_token_that_the_tokenizer_adds_is_no_part_of_a_prompt() -> None:
    ends = encoder(tokenizer=ending_tokenizer())
    assert ends.encode(text("61="), HERE) == encoder().encode(text("61="), HERE)
    assert ends.lengths([text("61="), text("1=")], [HERE, HERE]) == [4, 3]


def test_an_end_token_that_stands_in_a_prompt_stays() -> None:
    assert encoder(tokenizer=ending_tokenizer()).encode(text("61␃"), HERE)[-1] == 2


@pytest.mark.parametrize("prompt", [text("61="), chat("61=")], ids=["text", "chat"])
def test_a_prompt_with_a_token_beyond_the_embedding_is_refused_by_place_and_token(prompt: Prompt) -> None:
    few = encoder(embedded=8)
    told = r"^train\.jsonl:3 has token \d+ \('.'\), but the embedding of the model has 8 rows"
    with pytest.raises(RunError, match=told):
        few.encode(prompt, HERE)
    with pytest.raises(RunError, match=told):
        few.lengths([prompt], [HERE])
