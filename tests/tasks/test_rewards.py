from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.rewards import contains_answer, exact_match, numeric_match


def asked(answer: Any) -> Prompt:
    return Prompt(index=0, text="?", answer=answer)


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("61", "61", True),
        ("61", " 61\n", True),
        (" 61 ", "61", True),
        ("61", "061", False),
        ("61", "61.", False),
        ("Yes", "yes", False),
        (61, "61", True),
        (0.5, "0.5", True),
    ],
)
def test_exact_match(answer: Any, response: str, right: bool) -> None:
    assert exact_match(asked(answer), response) == float(right)


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("7", "it is 7.", True),
        ("7", "17", False),
        ("7", "7th", False),
        ("7", "(7)", True),
        ("a+b", "so a+b it is", True),
        ("x y", "x  y", False),
        ("Paris", "paris", False),
        (7, "7", True),
    ],
)
def test_contains_answer(answer: Any, response: str, right: bool) -> None:
    assert contains_answer(asked(answer), response) == float(right)


@pytest.mark.parametrize("function", [exact_match, contains_answer])
def test_case_can_be_ignored(function: Any) -> None:
    assert function(asked("Paris"), "PARIS", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("7", "3 + 4 = 7", True),
        ("7", "7.0", True),
        ("7", "0.7e1", True),
        ("7", "7.", True),
        ("7", "the answer is 7, or 8", False),
        ("1,234.5", "1234.50", True),
        ("1234", "$1,234", True),
        ("-3", "x = -3", True),
        ("3", "4-3", True),
        ("3", "(4)-3", True),
        ("-3", "(-3)", True),
        ("0.5", ".5", True),
        ("7", "seven", False),
        ("7", "", False),
        ("She has 3 + 4 = 7.\n#### 7", "7", True),
        (7, "7", True),
        ("0.1", "0.1000000000000000000000000000001", False),
        ("7", "1e9999999999999999999", False),
        ("7", "1e9999", False),
    ],
)
def test_numeric_match(answer: Any, response: str, right: bool) -> None:
    assert numeric_match(asked(answer), response) == float(right)


@pytest.mark.parametrize(("tolerance", "right"), [(0.009, 0.0), (0.01, 1.0)])
def test_a_numeric_answer_may_be_off_by_the_tolerance(tolerance: float, right: float) -> None:
    assert numeric_match(asked("3.14"), "3.15", tolerance=tolerance) == right


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3), response=st.text(max_size=30))
def test_a_number_matches_itself_behind_any_words(value: object, response: str) -> None:
    assert numeric_match(asked(f"{value:f}"), f"{response} {value:f}") == 1.0


@given(response=st.text())
def test_no_response_breaks_a_reward(response: str) -> None:
    prompt = asked("7")
    assert {function(prompt, response) for function in (exact_match, contains_answer, numeric_match)} <= {0.0, 1.0}


@pytest.mark.parametrize("function", [exact_match, contains_answer, numeric_match])
@pytest.mark.parametrize("answer", [None, ["7"], {"n": 7}, True])
def test_an_answer_must_be_a_text_or_a_number(function: Any, answer: Any) -> None:
    with pytest.raises(TypeError, match="must be a text or a number"):
        function(asked(answer), "7")


@pytest.mark.parametrize(("function", "answer"), [(contains_answer, " "), (numeric_match, "seven")])
def test_an_answer_that_nothing_can_be_compared_with_is_refused(function: Any, answer: str) -> None:
    with pytest.raises(ValueError, match="the answer"):
        function(asked(answer), "7")
