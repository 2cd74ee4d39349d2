"""Reward functions for tasks with a known answer. Named by `task.reward._target_`; a user's own have the same form.

Each takes the prompt and the response and returns 1.0 (right) or 0.0 (wrong). Keyword arguments are set by keys beside
`_target_`. The answer is `Prompt.answer`: a text, or a number, which then counts as the text that JSON writes for it.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal

from trinity_sync.samples.record import Prompt

# A sign belongs to the number unless it follows a digit, a letter or a closing bracket: there it is an operator or a
# hyphen. Exponents are bounded, so that no response can ask for arithmetic that never ends.
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])[-+])?
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
        (?:[eE][-+]?\d{1,4}(?!\d))?""",
    re.VERBOSE | re.ASCII,
)
_EXACT = Context(prec=1000)


def exact_match(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 where the response is the answer, blanks at both ends aside, else 0.

    Raises:
        TypeError: the answer is neither a text nor a number.
    """
    said, right = response.strip(), _answer_text(prompt).strip()
    return float(said.casefold() == right.casefold() if ignore_case else said == right)


def contains_answer(prompt: Prompt, response: str, *, ignore_case: bool = False) -> float:
    """Return 1 where the answer stands in the response as words of its own: ``7`` in ``it is 7.``, not in ``17``; else
    0.

    Raises:
        TypeError: the answer is neither a text nor a number.
        ValueError: the answer is blank, so every response would contain it.
    """
    right = _answer_text(prompt).strip()
    if not right:
        raise ValueError("the answer is blank")
    return float(
        re.search(rf"(?<!\w){re.escape(right)}(?!\w)", response, re.IGNORECASE if ignore_case else 0) is not None
    )


def numeric_match(prompt: Prompt, response: str, *, tolerance: float = 0.0) -> float:
    """Return 1 where the last number in the response is the last number in the answer, else 0.

    So an answer may be written out to its end, as ``... so 3 + 4 = 7. #### 7``. Numbers are decimal, with an optional
    sign, commas between thousands, and an exponent; they are compared exactly (``7``, ``7.0`` and ``0.7e1`` are equal).

    Args:
        prompt: the last number of its answer is the right one.
        response: what the model wrote.
        tolerance: largest difference that still counts as right.

    Raises:
        TypeError: the answer is neither a text nor a number.
        ValueError: there is no number in the answer.
    """
    right, margin = _last_number(_answer_text(prompt)), Decimal(repr(tolerance))
    if right is None:
        raise ValueError(f"there is no number in the answer {prompt.answer!r}")
    said = _last_number(response)
    return float(said is not None and _EXACT.subtract(right, margin) <= said <= _EXACT.add(right, margin))


def _answer_text(prompt: Prompt) -> str:
    answer = prompt.answer
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return repr(answer)
    raise TypeError(f"the answer is {answer!r}; it must be a text or a number")


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
