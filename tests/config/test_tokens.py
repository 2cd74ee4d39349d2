"""Checks of the keys that batch by tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.config import compose
from trinity_sync.config.checks import check
from trinity_sync.errors import ConfigError


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(compose(list(overrides)))
    return str(error.value)


def jsonl(folder: Path) -> tuple[str, ...]:
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    return "task=jsonl", f"task.path={file}", "task.prompt_length=100", "task.response_length=60"


def test_a_limit_below_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    assert refused(*jsonl(tmp_path), "trainer.max_tokens=159") == (
        "trainer.max_tokens is 159, but a sequence may have 160 tokens (task.prompt_length + task.response_length), "
        "and none is cut; set it to 160 or more"
    )
    check(compose([*jsonl(tmp_path), "trainer.max_tokens=160"]))


def test_ranks_that_share_a_sequence_have_a_part_of_it_each(tmp_path: Path) -> None:
    check(compose([*jsonl(tmp_path), "trainer.max_tokens=80", "backend.sp=2"]))
    assert "set it to 80 or more" in refused(*jsonl(tmp_path), "trainer.max_tokens=79", "backend.sp=2")


def test_where_the_task_knows_no_lengths_there_is_nothing_to_refuse() -> None:
    check(compose(["trainer.max_tokens=16"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["backend=megatron", "trainer.remove_padding=always"],
            "trainer.remove_padding is always, but backend=megatron pads",
        ),
        (
            ["model.attn_implementation=eager", "trainer.remove_padding=always"],
            "trainer.remove_padding is always, but model.attn_implementation is eager",
        ),
        (["model.architecture.model_type=gpt2", "backend.sp=2"], "backend.sp is 2, for which sequences are packed"),
        (["backend.sp=2", "trainer.remove_padding=never"], "trainer.remove_padding is never, but ranks share"),
        (["backend.sp=2", "backend.ranks=3"], "backend.sp is 2; must divide backend.ranks (3)"),
        (["backend.sp=3", "backend.ranks=3"], "backend.sp is 3; it must divide the model's num_attention_heads (4)"),
        (
            ["backend.sp=2", "backend.ranks=2", "model.architecture.num_key_value_heads=3"],
            "backend.sp is 2; it must divide the model's num_key_value_heads (3), or be a multiple",
        ),
    ],
)
def test_what_cannot_be_packed_or_shared_is_refused(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
def test_models_that_cannot_be_packed_are_padded(backend: str) -> None:
    check(compose([f"backend={backend}", "model.attn_implementation=eager"]))


def test_data_parallel_ranks_are_those_that_share_no_sequence() -> None:
    check(
        compose(["backend.ranks=4", "backend.sp=4", "algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=2"])
    )
    assert "data-parallel ranks (backend.ranks / backend.sp) x trainer.mini_batches (2)" in refused(
        "backend.ranks=4", "backend.sp=2", "algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=3"
    )
