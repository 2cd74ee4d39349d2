"""Settings for all tests, and the options for pytest that run a part of them (see `tests.parts`)."""

from __future__ import annotations

import argparse
import json
import os

import pytest
from hypothesis import settings

from tests import parts

# How long an example takes depends on what else the machine does; what hangs is ended by pytest's own limit. Continuous
# integration judges a change, so it tries the same examples each time; new ones are found by everybody else.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, help="run one of several parts of the test files, such as 2/4")


@pytest.hookimpl(tryfirst=True)  # so all parts see the same files, whatever markers select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: parts.Part | None = config.getoption("part")
    if part is None:
        return
    path = {item: item.path.relative_to(parts.ROOT).as_posix() for item in items}
    seconds = json.loads(parts.DURATIONS.read_text())
    mine = parts.divide(set(path.values()), seconds, part.of)[part.number - 1]
    config.hook.pytest_deselected(items=[item for item in items if path[item] not in mine])
    items[:] = [item for file in mine for item in items if path[item] == file]


def _part(text: str) -> parts.Part:
    try:
        return parts.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
