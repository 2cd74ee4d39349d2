"""Composing without the work that Hydra and OmegaConf do again for each of the fifty files of a configuration.

A start composes twice; a sweep twice, and twice for each of its jobs. What comes out is the same, in little more than
half of the time. Functions inside of both are replaced: in the processes of our commands only, never in a program that
uses this as a library, and only with the versions that this was tried with.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import IO, Any

import hydra
import omegaconf
import yaml
from hydra import version
from hydra._internal import defaults_list
from hydra._internal.defaults_list import Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.types import RunMode
from omegaconf import DictConfig, _utils

_TEXTS = 256
"""Of so many texts it is remembered what they say."""


_TRIED = ("1.3.8", "2.3.1")
"""Versions of Hydra and OmegaConf."""


@cache
def make_quick() -> None:
    """Replace five functions of Hydra and OmegaConf in this process, once. With other versions nothing is done."""
    if (hydra.__version__, omegaconf.__version__) != _TRIED:
        return
    version._get_version = cache(version._get_version)
    defaults_list._create_interpolation_map = _where_needed(  # type: ignore[assignment]
        defaults_list._create_interpolation_map
    )
    _utils.get_yaml_loader = _remembering(_utils.get_yaml_loader)
    Hydra.get_mode = _as_given(Hydra.get_mode)  # type: ignore[assignment, method-assign]
    # Each composition copies its sources, and with them the store, from which it takes copies of what it needs anyway.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def _as_given(get_mode: Callable[[Hydra, str | None, list[str]], Any]) -> Callable[[Hydra, str | None, list[str]], Any]:
    """Hydra composes a configuration only to see whether it is for one run or for a sweep, even where that is given."""

    @wraps(get_mode)
    def given(app: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        modes = [text for text in overrides if "hydra.mode" in text]
        return RunMode.RUN if modes == ["hydra.mode=RUN"] else get_mode(app, config_name, overrides)

    return given


_Map = Callable[[Overrides, list[InputDefault], bool], DictConfig | None]


def _where_needed(create: _Map) -> _Map:
    """For each file Hydra puts all choices so far into a configuration, by which `${...}` in its defaults is resolved;
    few have any.
    """

    @wraps(create)
    def created(overrides: Overrides, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
        needed = any(default.is_interpolation() for default in defaults)
        return create(overrides, defaults, self_added) if needed else None

    return created


class _Named(io.StringIO):
    """A text as the file that it was read from, by whose name errors call it."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def _remembering(get_loader: Callable[[], Any]) -> Callable[[], Any]:
    """Have OmegaConf parse a text of a file once. It makes nodes of its own of what a loader gives it."""
    loader = get_loader()

    @lru_cache(_TEXTS)
    def parsed(text: str, name: str) -> object:
        return yaml.load(_Named(text, name), Loader=loader)

    class Remembering:
        """A loader, as far as `yaml.load` uses one."""

        def __init__(self, stream: str | IO[Any]) -> None:
            self._stream = stream

        def get_single_data(self) -> object:
            if isinstance(self._stream, str):
                return yaml.load(self._stream, Loader=loader)
            text = self._stream.read()
            if not isinstance(text, str):  # of a file that is open for bytes
                return yaml.load(text, Loader=loader)
            return parsed(text, str(getattr(self._stream, "name", "<file>")))

        def dispose(self) -> None:
            pass

    @wraps(get_loader)
    def get() -> Any:
        return Remembering

    return get
