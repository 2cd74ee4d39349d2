"""A value of another type than its class asks for is told by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from trinity_sync.protocol.choices import mistyped

if TYPE_CHECKING:
    from somewhere import Nothing


@dataclass
class Fields:
    number: float
    whole: int
    flag: bool
    text: str
    maybe: int | None
    several: list[int]
    anything: Any


class Constructor:
    def __init__(self, *, rate: float, other, **settings: Any) -> None: ...  # type: ignore[no-untyped-def]


class Unresolved:
    def __init__(self, rate: float, nothing: Nothing) -> None: ...


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"number": 1, "whole": 2, "flag": False, "text": "3", "maybe": None, "several": [1], "anything": "x"}, None),
        ({"number": "fast"}, "number is fast; must be a number"),
        ({"number": True}, "number is True; must be a number"),
        ({"whole": 1.5}, "whole is 1.5; must be a whole number"),
        ({"whole": True}, "whole is True; must be a whole number"),
        ({"flag": 1}, "flag is 1; must be true or false"),
        ({"text": 3}, "text is 3; must be a text"),
        ({"maybe": "x"}, "maybe is x; must be a whole number or null"),
        ({"unknown": 3}, None),
    ],
)
def test_fields_of_a_dataclass(values: dict[str, Any], told: str | None) -> None:
    assert mistyped(Fields, values) == told


def test_arguments_of_a_constructor() -> None:
    assert mistyped(Constructor, {"rate": "fast", "other": 1}) == "rate is fast; must be a number"
    assert mistyped(Constructor, {"rate": 1, "other": "x", "more": 2}) is None


def test_annotations_that_cannot_be_resolved_judge_nothing() -> None:
    assert mistyped(Unresolved, {"rate": "fast"}) is None
