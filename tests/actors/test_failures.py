"""What an actor's method raises is in its log. The bodies are called without Ray."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import cloudpickle
import pytest

from trinity_sync.actors.pending import failures_logged
from trinity_sync.errors import RunError


class Body:
    """An actor's body."""

    def __init__(self, name: str) -> None:
        if not name:
            raise RunError("it has no name")
        self.name = name

    @classmethod
    def made(cls) -> Body:
        return cls("made")

    def add(self, one: int, other: int) -> int:
        return one + other

    def hold_on(self) -> None:
        raise RunError("it holds nothing")

    def hold_twice(self) -> None:
        self.hold_on()

    async def wait_for(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def body() -> Any:
    return failures_logged(Body)("explorer-0")


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_what_a_method_raises_is_logged_once_and_raised(body: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunError, match="it holds nothing"):
        body.hold_twice()
    assert messages(caplog) == [(logging.ERROR, "hold on failed: it holds nothing")]


def test_what_a_constructor_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunError):
        failures_logged(Body)("")
    assert messages(caplog) == [(logging.ERROR, "start failed: it has no name")]


def test_what_a_coroutine_raises_is_logged_and_its_cancellation_is_not(
    body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError):
        asyncio.run(body.wait_for(RunError("no")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body.wait_for(asyncio.CancelledError()))
    assert messages(caplog) == [(logging.ERROR, "wait for failed: no")]


def test_an_actor_is_the_same_otherwise(body: Any, caplog: pytest.LogCaptureFixture) -> None:
    cls = type(body)
    assert (cls.__name__, cls.__doc__, cls.__module__) == ("Body", "An actor's body.", __name__)
    assert (body.name, body.add(1, other=2), cls.made().name) == ("explorer-0", 3, "made")
    assert inspect.iscoroutinefunction(cls.wait_for)
    assert str(inspect.signature(cls.add)) == str(inspect.signature(Body.add))
    assert messages(caplog) == []


def test_a_class_of_an_actor_goes_to_another_process() -> None:
    again = cloudpickle.loads(cloudpickle.dumps(failures_logged(Body)))
    assert again("explorer-0").add(1, 2) == 3
