"""Where in the user's code an error comes from. The user's code is a module that is written for the test."""

from __future__ import annotations

import importlib.util
import pickle
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.errors import RunError
from trinity_sync.host.origin import error_line, error_text, keep_origin, origin

SOURCE = """\
import json


def parses(text):
    return json.loads(text)


def fails(text):
    raise ValueError("of two\\nlines")


class Slotted(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


def refuses(text):
    raise Slotted("no")


class Speechless(Exception):
    def __str__(self):
        return 1 / 0


def is_speechless(text):
    raise Speechless


def recurses(text):
    return recurses(text + "x")


def rambles(text):
    raise ValueError("x" * 100_000)


def rewards(text):
    return parses(text)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("user") / "their_rewards.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("their_rewards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(function: Callable[..., object], *args: object) -> Exception:
    """What a call raises, without the frame of this module."""
    with pytest.raises(Exception) as caught:
        function(*args)
    trace = caught.value.__traceback__
    assert trace is not None
    assert isinstance(caught.value, Exception)
    return caught.value.with_traceback(trace.tb_next)


def test_the_place_is_the_innermost_of_the_user_s_and_the_traceback_begins_there(theirs: Any) -> None:
    found = origin(raised(theirs.rewards, "no json"))
    assert found is not None
    assert found.place == f"{theirs.__file__}:5"
    lines = found.traceback.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{theirs.__file__}", line 39, in rewards']
    assert "json/decoder.py" in found.traceback
    assert lines[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_what_a_library_raises_that_no_user_s_code_called_has_no_origin() -> None:
    error = raised(statistics.mean, [])
    assert origin(error) is None
    assert error_text(error) == "StatisticsError: mean requires at least one data point"


def test_an_error_of_ours_has_the_origin_of_what_it_was_raised_from(theirs: Any) -> None:
    cause = raised(theirs.fails, "x")
    error = RunError("the reward failed")
    error.__cause__ = cause
    found = origin(error)
    assert found is not None
    assert found == origin(cause)


def test_an_origin_goes_along_to_another_process(theirs: Any) -> None:
    for error in (RunError("no"), raised(theirs.fails, "x")):
        error.__cause__ = error.__cause__ or raised(theirs.fails, "x")
        kept = keep_origin(error)
        assert kept is not None
        assert origin(pickle.loads(pickle.dumps(error))) == kept


def test_an_error_that_takes_no_attributes_is_none_the_worse(theirs: Any) -> None:
    found = keep_origin(raised(theirs.refuses, "x"))
    assert found is not None
    assert found.place.endswith(":18")


def test_an_error_is_told_with_its_place_in_the_user_s_code(theirs: Any) -> None:
    error = raised(theirs.fails, "x")
    assert error_text(error) == f"ValueError: of two\nlines ({theirs.__file__}:9)"
    assert error_line(error) == f"ValueError: of two ({theirs.__file__}:9)"
    assert error_text(KeyboardInterrupt()) == error_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize("name", ["recurses", "rambles"])
def test_a_long_traceback_is_cut_in_the_middle(theirs: Any, name: str) -> None:
    found = origin(raised(getattr(theirs, name), "x"))
    assert found is not None
    assert len(found.traceback) < 21_000
    assert found.traceback.startswith("Traceback (most recent call last):")


def test_causes_in_a_circle_end() -> None:
    one, two = RunError("one"), RunError("two")
    one.__cause__, two.__cause__ = two, one
    assert origin(one) is None


def test_an_error_that_cannot_be_put_into_words_is_told_by_its_class(theirs: Any) -> None:
    error = raised(theirs.is_speechless, "x")
    assert error_text(error) == error_line(error) == f"Speechless: (it cannot be put into words) ({theirs.__file__}:27)"


def test_the_place_is_in_the_user_s_code_and_not_in_a_library_that_it_calls(theirs: Any, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "python3.11" / "site-packages" / "judge.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        "def judge(call, text):\n    return call(text)\n\n\ndef fail(text):\n    raise ValueError(text)\n"
    )
    judge = {"__name__": "judge"}
    exec(compile(library.read_text(), str(library), "exec"), judge)
    theirs.judge = judge["fail"]
    exec(compile("def asks(text):\n    judge(text)\n", theirs.__file__, "exec"), theirs.__dict__)
    found = origin(raised(theirs.asks, "x"))
    assert found is not None
    assert found.place == f"{theirs.__file__}:2"
    assert f'File "{library}", line 6, in fail' in found.traceback
    installed = origin(raised(judge["fail"], "x"))  # type: ignore[arg-type]
    assert installed is not None
    assert installed.place == f"{library}:6"
