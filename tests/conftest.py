"""Settings for all tests, and the options for pytest that run a part of them (see `tests.parts`)."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests import parts
from tests.quick_hydra import make_quick
from trinity_sync import config as _config  # noqa: F401 - it has Hydra compose its way, which is remembered, too
from trinity_sync.host import masking

# How long an example takes depends on what else the machine does; what hangs is ended by pytest's own limit. Continuous
# integration judges a change, so it tries the same examples each time; new ones are found by everybody else.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


gc.set_threshold(250_000, 20, 100)  # saves a sixth of the time of tests of settings, and 5 % of that of imports
_DONT_WRITE = sys.dont_write_bytecode
sys.dont_write_bytecode = False
"""Until all tests are collected: pytest compiles each file of tests anew where it may not keep what came out, which
takes longer than all imports.
"""

_ENGINES = "tests/integrations/real_engines"
_ROOMS = {
    _ENGINES: re.compile(rf"{_ENGINES}/"),
    "ranks": re.compile(r"tests/backends/.*\bfrom tests\.backends\.engines import", re.DOTALL),
    "Ray": re.compile(
        r"tests/(?:actors|checkpoint|explorer|sync|trainer|vllm|test_)"
        r".*\b(?:local_ray\.|(?:cluster|(?:make_)?(?:monitor|actor|agent|synchronizer)): )",
        re.DOTALL,
    ),
}
"""Files that share processes which take long to start, by what their path and text begin with and hold."""


class _Scheduling(LoadFileScheduling):
    """A file is for one worker, and so are all files of a room."""

    def _split_scope(self, nodeid: str) -> str:
        return _room(super()._split_scope(nodeid))


@functools.cache
def _room(file: str) -> str:
    text = file + (parts.ROOT / file).read_text()
    return next((room for room, holds in _ROOMS.items() if holds.match(text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


make_quick()  # before the first composition; composing without is `tests/test_quick_hydra.py`'s


def pytest_collection_finish() -> None:
    """Leave alone at each collection of garbage what is imported."""
    sys.dont_write_bytecode = _DONT_WRITE
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys of this user, which sign what runs record, are made for the tests and not in the user's home."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_signals() -> Iterator[None]:
    """Signals are those of a program in a terminal, also where the tests run in the background or under nohup."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _own_secrets() -> Iterator[None]:
    """A process has the secrets of one program; tests that share a process do not share theirs."""
    yield
    masking._hidden.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, help="run one of several parts of the test files, such as 2/4")


@pytest.hookimpl(tryfirst=True)  # so all parts see the same files, whatever markers select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_to_all(items)
    part: parts.Part | None = config.getoption("part")
    if part is None:
        return
    path = {item: item.path.relative_to(parts.ROOT).as_posix() for item in items}
    seconds = json.loads(parts.DURATIONS.read_text())
    mine = parts.divide(set(path.values()), seconds, part.of)[part.number - 1]
    config.hook.pytest_deselected(items=[item for item in items if path[item] not in mine])
    items[:] = [item for file in mine for item in items if path[item] == file]


def _leave_to_all(items: list[pytest.Item]) -> None:
    """Of a test that is marked `few`, leave all cases but the first so many to `make test-all`."""
    seen: Counter[str] = Counter()
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("all") is None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > few.args[0]:
                item.add_marker(pytest.mark.all)


def _part(text: str) -> parts.Part:
    try:
        return parts.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
