"""Which tokens end a text, which a tokenizer adds, and which have a row of the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from trinity_sync.errors import ConfigError
from trinity_sync.models.architecture import character_tokenizer
from trinity_sync.models.tokens import ModelTokens, beyond_embedding, prompt_tokens, read_tokens

BEGIN, END, DIGIT = "␂", "␃", "3"


def tokens_of(end: str | None = END, **files: dict[str, Any]) -> ModelTokens:
    tokenizer = character_tokenizer(32)
    tokenizer.eos_token = end
    named = {f"{name}.json": fields for name, fields in files.items()}
    return ModelTokens(tokenizer, CONFIG_MAPPING["qwen3"](vocab_size=32), named)


def adding(single: str) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(32)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(BEGIN, 1), (END, 2)]
    )
    return tokenizer


def test_all_that_a_source_names_ends_a_text_and_the_tokenizers_is_taught() -> None:
    found = tokens_of(DIGIT, generation_config={"eos_token_id": [2, 4]}, config={"eos_token_id": 5})
    assert found.ends == (6, 2, 4, 5)


def test_the_config_of_the_language_model_inside_counts_too() -> None:
    assert tokens_of(None, config={"text_config": {"eos_token_id": 7}}).ends == (7,)


@pytest.mark.parametrize("value", [None, -1, True, "2", 32, [None, -1]])
def test_what_is_no_token_of_the_embedding_ends_nothing(value: object) -> None:
    assert tokens_of(config={"eos_token_id": value}).ends == (2,)


def test_sources_that_differ_are_told_with_their_tokens() -> None:
    told = tokens_of(generation_config={"eos_token_id": [2, 4]}).difference
    assert told == (
        "the model names its end-of-sequence tokens in several ways (the tokenizer '␃' (2); generation_config.json '␃' "
        "(2), '1' (4)); each of them ends a text"
    )


def test_sources_that_agree_are_not_told_of() -> None:
    assert tokens_of(generation_config={"eos_token_id": [2]}, config={"eos_token_id": 2}).difference is None


def test_a_model_without_an_end_is_refused_with_the_files_that_could_name_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.path=/m names no end-of-sequence .* generation_config\.json or conf"
    ):
        tokens_of(None).needed_ends("/m")


def test_a_folder_names_its_ends_in_its_files_whatever_transformers_makes_of_them(tmp_path: Path) -> None:
    character_tokenizer(32).save_pretrained(tmp_path)
    fields = {"model_type": "llama", "vocab_size": 32, "eos_token_id": [2, 9]}  # the default of the family is 2
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6, "do_sample": false, "temperature": 0.6}')
    assert read_tokens(str(tmp_path), trust_remote_code=False).ends == (2, 6, 9)


@pytest.mark.parametrize(
    ("single", "behind"), [(f"{BEGIN} $A {END}", 1), (f"$A {END} {END}", 2), (f"{BEGIN} $A", 0), ("$A", 0)]
)
def test_the_tokens_that_a_tokenizer_puts_behind_a_text_are_no_part_of_a_prompt(single: str, behind: int) -> None:
    tokenizer = adding(single)
    whole = tokenizer("61")["input_ids"]
    assert prompt_tokens(tokenizer, ["61", "61"]) == [whole[: len(whole) - behind]] * 2


def test_a_token_for_unknown_text_that_also_begins_each_text_is_not_taken_for_one_behind_it() -> None:
    words = Tokenizer(models.WordLevel({BEGIN: 0, "b": 1, "c": 2}, unk_token=BEGIN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=BEGIN, unk_token=BEGIN)
    assert prompt_tokens(tokenizer, ["b c"]) == [[0, 1, 2]]


def test_a_token_without_a_row_is_named() -> None:
    tokenizer = character_tokenizer(32)
    tokenizer.add_tokens(["<more>"])
    assert beyond_embedding(tokenizer, [3, 31], 32) is None
    assert beyond_embedding(tokenizer, [3, 32], None) is None
    assert str(beyond_embedding(tokenizer, [3, 32], 32)).startswith("has token 32 ('<more>'), but the embedding of the")
