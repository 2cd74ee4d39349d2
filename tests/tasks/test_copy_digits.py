from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.copy_digits import CopyDigits

PROMPT = Prompt(index=0, text="61=", answer="61")


@given(digits=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), step=st.integers(1, 10**6))
def test_a_prompt_asks_for_its_answer(digits: int, seed: int, step: int) -> None:
    for index, prompt in enumerate(CopyDigits(digits, seed).prompts(step, 3)):
        assert prompt.index == index
        assert prompt.text == f"{prompt.answer}="
        assert len(prompt.answer) == digits
        assert prompt.answer.isdecimal()


def test_prompts_are_a_function_of_seed_step_and_index() -> None:
    asked_later = CopyDigits(2, 3)
    asked_later.prompts(1, 5)
    assert asked_later.prompts(9, 8)[:4] == CopyDigits(2, 3).prompts(9, 4)


@pytest.mark.parametrize("other", [CopyDigits(6, 1).prompts(1, 8), CopyDigits(6, 0).prompts(2, 8)])
def test_another_seed_or_step_has_other_prompts(other: list[Prompt]) -> None:
    answers = [prompt.answer for prompt in CopyDigits(6, 0).prompts(1, 8)]
    assert not set(answers) & {prompt.answer for prompt in other}


def test_all_numbers_are_drawn_about_as_often() -> None:
    drawn = Counter(prompt.answer for prompt in CopyDigits(1, 0).prompts(1, 10_000))
    chi_square = sum((drawn[str(digit)] - 1000) ** 2 / 1000 for digit in range(10))
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("text", "finished", "thirds", "exact"),
    [
        ("61", True, 3, 1.0),
        ("61", False, 2, 0.0),
        ("60", True, 2, 0.0),
        ("16", True, 1, 0.0),
        ("6", True, 1, 0.0),
        ("", True, 0, 0.0),
        ("613", True, 2, 0.0),
        ("613", False, 2, 0.0),
        ("x61", False, 0, 0.0),
    ],
)
def test_the_reward_is_the_share_of_correct_positions(text: str, finished: bool, thirds: int, exact: float) -> None:
    assert CopyDigits(2, 0).reward(PROMPT, text, finished) == (thirds / 3, exact)


def test_no_digits_are_no_task() -> None:
    with pytest.raises(ConfigError, match=r"task\.digits is 0; must be at least 1"):
        CopyDigits(0, 0)


def test_a_response_must_be_long_enough_for_the_answer_and_its_end() -> None:
    CopyDigits(2, 0, response_length=3)
    with pytest.raises(
        ConfigError, match=r"task\.response_length is 2; 2 digits and the end of the text take 3 tokens"
    ):
        CopyDigits(2, 0, response_length=2)
