"""Composing without the work that Hydra and OmegaConf do again for each of the fifty files of a configuration.

For the tests' own process, in which hundreds of configurations are composed of the same files. What comes out is the
same, in a quarter of the time. Functions inside of both are replaced, with the versions that this was tried with only.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import IO, Any, TypeVar

import hydra
import omegaconf
import yaml
from hydra import version
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf, SCMode, ValueNode, _utils, base
from omegaconf.basecontainer import BaseContainer

_T = TypeVar("_T")

_TEXTS = 512
"""Of so many texts it is remembered what they say."""

_CHOICES = 96
"""Of so many lists of files it is remembered what they come to, a megabyte each."""

_TRIED = ("1.3.8", "2.3.1")
"""Versions of Hydra and OmegaConf."""


@cache
def make_quick() -> None:
    """Replace functions of Hydra and OmegaConf in this process, once. With other versions nothing is done."""
    if (hydra.__version__, omegaconf.__version__) != _TRIED:
        return
    version._get_version = cache(version._get_version)
    defaults_list._create_interpolation_map = _where_needed(  # type: ignore[assignment]
        defaults_list._create_interpolation_map
    )
    Hydra.get_mode = _as_given(Hydra.get_mode)  # type: ignore[assignment, method-assign]
    # Each composition copies its sources, and with them the store, from which it takes copies of what it needs anyway.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    base.Metadata.__deepcopy__ = _copied  # type: ignore[attr-defined]
    DictConfig.__deepcopy__ = _tree_copied(DictConfig.__deepcopy__)  # type: ignore[method-assign]
    BaseContainer._to_content = staticmethod(_plain_at_once(BaseContainer._to_content))  # type: ignore[assignment]
    base.parse = _utils.parse = lru_cache(_TEXTS)(base.parse)
    reading = _Reading()
    _utils.get_yaml_loader = _remembering(_utils.get_yaml_loader, reading)
    ConfigStore.load = reading.nodes(ConfigStore.load)  # type: ignore[assignment, method-assign]
    ConfigRepository.load_config = reading.once(ConfigRepository.load_config)  # type: ignore[assignment, method-assign]
    config_loader_impl.create_defaults_list = _listed_once(config_loader_impl.create_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged_once(  # type: ignore[assignment, method-assign]
        ConfigLoaderImpl._compose_config_from_defaults_list
    )


def _copied(of: base.Metadata, memo: dict[int, Any]) -> base.Metadata:
    """What OmegaConf notes with each value: all but two of its fields are never changed. Half of a copy's time."""
    made = object.__new__(type(of))
    made.__dict__.update(of.__dict__)
    made.flags = None if of.flags is None else dict(of.flags)
    made.resolver_cache = copy.deepcopy(of.resolver_cache, memo) if of.resolver_cache else defaultdict(dict)
    return made


_Copy = Callable[[DictConfig, dict[int, Any]], DictConfig]


def _tree_copied(copy_one: _Copy) -> _Copy:
    """Copy values without making each anew, with its checks."""

    def value_copied(node: ValueNode, parent: DictConfig, memo: dict[int, Any]) -> ValueNode:
        made: ValueNode = object.__new__(type(node))
        made.__dict__.update(node.__dict__, _metadata=_copied(node._metadata, memo), _parent=parent, _flags_cache=None)
        return made

    @wraps(copy_one)
    def copied(node: DictConfig, memo: dict[int, Any]) -> DictConfig:
        content = node.__dict__["_content"]
        if not isinstance(content, dict):
            return copy_one(node, memo)
        made: DictConfig = object.__new__(DictConfig)
        copies: dict[Any, Any] = {}
        made.__dict__.update(
            _metadata=_copied(node.__dict__["_metadata"], memo),
            _flags_cache=copy.copy(node.__dict__["_flags_cache"]),
            _content=copies,
            _parent=node.__dict__["_parent"],
        )
        for key, value in content.items():
            if isinstance(value, ValueNode):
                copies[key] = value_copied(value, made, memo)
                continue
            parent = value.__dict__["_parent"]
            value.__dict__["_parent"] = None  # it would be copied, too
            try:
                copies[key] = copy.deepcopy(value, memo)
            finally:
                value.__dict__["_parent"] = parent
            copies[key].__dict__["_parent"] = made
        return made

    return copied


class _ReferencesError(Exception):
    """A tree has interpolations that are to be resolved, or nodes of other kinds."""


def _plain_at_once(to_content: Callable[..., Any]) -> Callable[..., Any]:
    """Have OmegaConf check no key of a tree of which it returns all values as they are."""

    def plain(node: Node, resolve: bool) -> Any:
        if isinstance(node, ValueNode):
            content = node._val
        elif isinstance(node, DictConfig | ListConfig):
            content = node.__dict__["_content"]
        else:
            raise _ReferencesError
        if isinstance(content, str) and resolve and "${" in content:
            raise _ReferencesError
        if isinstance(node, DictConfig) and isinstance(content, dict):
            return {key: plain(value, resolve) for key, value in content.items()}
        if isinstance(node, ListConfig) and isinstance(content, list):
            return [plain(value, resolve) for value in content]
        return content

    @wraps(to_content)
    def converted(
        conf: Container,
        resolve: bool,
        throw_on_missing: bool,
        enum_to_str: bool = False,
        structured_config_mode: SCMode = SCMode.DICT,
    ) -> Any:
        if not throw_on_missing and not enum_to_str and structured_config_mode == SCMode.DICT:
            with contextlib.suppress(_ReferencesError):
                return plain(conf, resolve)
        return to_content(conf, resolve, throw_on_missing, enum_to_str, structured_config_mode)

    return converted


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
        if not any(default.is_interpolation() for default in defaults):
            return None
        overrides.resolved = True  # type: ignore[attr-defined]  # for `_listed_once`
        return create(overrides, defaults, self_added)

    return created


_Load = Callable[[ConfigRepository, str], ConfigResult | None]


class _Reading(threading.local):
    """Option files and nodes of the store as Hydra read them first. Where it reads the same text or node again it is
    given an empty one, and at the end what came out then, which nobody changes: see `_merged_once`.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._source: tuple[Hashable, object] | None = None
        self._known: OrderedDict[Hashable, tuple[ConfigResult, object]] = OrderedDict()

    def knows(self, key: Hashable, source: object) -> bool:
        """Whether Hydra reads an option file of which all is known; `source` is kept as long as the key."""
        self._source = None if self._path is None else ((self._path, key), source)
        return self._source is not None and self._source[0] in self._known

    def once(self, load: _Load) -> _Load:
        @wraps(load)
        def loaded(repo: ConfigRepository, config_path: str) -> ConfigResult | None:
            self._path, self._source = config_path, None
            try:
                result = load(repo, config_path)
            finally:
                self._path = None
            if result is None or self._source is None:
                return result
            key, source = self._source
            first, _ = self._known.setdefault(key, (result, source))
            if len(self._known) > _TEXTS:
                self._known.popitem(last=False)
            return replace(result, config=first.config, defaults_list=first.defaults_list)

        return loaded

    def nodes(self, load: Callable[[ConfigStore, str], ConfigNode]) -> Callable[[ConfigStore, str], ConfigNode]:
        @wraps(load)
        def loaded(store: ConfigStore, config_path: str) -> ConfigNode:
            node = store._load(config_path)
            return replace(node, node=OmegaConf.create()) if self.knows(id(node), node) else load(store, config_path)

        return loaded


_List = Callable[[CachingConfigRepository, str | None, list[Override], bool, bool], DefaultsList]


def _listed_once(create: _List) -> _List:
    """Choose the option files once for all compositions that differ by single values alone."""
    known: OrderedDict[Hashable, tuple[DefaultsList, object]] = OrderedDict()

    @wraps(create)
    def listed(
        repo: CachingConfigRepository,
        config_name: str | None,
        overrides_list: list[Override],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> DefaultsList:
        given = [override for override in overrides_list if not override.is_sweep_override()]
        choices = [one for one in given if repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)]
        contents = _contents(repo)
        key = (contents, config_name, prepend_hydra, skip_missing, *(choice.input_line for choice in choices))
        if contents is None or key not in known:
            made = create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
            if contents is None or hasattr(made.overrides, "resolved"):  # it depends on more than these files
                return made
            known[key] = made, list(_nodes(ConfigStore.instance().repo))  # kept, so that no other one gets such an id
        found, _ = _kept(known, key)
        repo.key = key  # type: ignore[attr-defined]
        return replace(found, config_overrides=[one for one in given if one not in choices])

    return listed


def _contents(repo: CachingConfigRepository) -> Hashable:
    """All that a composition may read, or none where a source is of an unknown kind."""
    contents: list[Hashable] = []
    for source in repo.get_sources():
        match source.scheme(), source.path:
            case "file", path:
                contents.append(_files(path))
            case "structured", _:
                contents.append(tuple(map(id, _nodes(ConfigStore.instance().repo))))
            case "pkg", "hydra.conf":
                pass
            case "pkg", name if len(places := getattr(sys.modules.get(name), "__path__", ())) == 1:
                contents.append(_files(places[0]))
            case _:
                return None
    return tuple(contents)


def _files(path: str) -> Hashable:
    folder = Path(path).absolute()
    return folder, *((file, file.read_bytes()) for file in sorted(folder.rglob("*.yaml")))


def _nodes(group: Mapping[str, Any]) -> Iterator[ConfigNode]:
    for node in group.values():
        if isinstance(node, dict):
            yield from _nodes(node)
        else:
            yield node


_Merge = Callable[[ConfigLoaderImpl, list[ResultDefault], CachingConfigRepository], DictConfig]


def _merged_once(merge: _Merge) -> _Merge:
    """Merge the same files in the same order once, whatever single values are set after that."""
    known: OrderedDict[Hashable, DictConfig] = OrderedDict()

    @wraps(merge)
    def merged(loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: CachingConfigRepository) -> DictConfig:
        key = version.getbase(), getattr(repo, "key", None)
        if key in known:
            return copy.deepcopy(_kept(known, key))
        repo.cache = copy.deepcopy(repo.cache)  # whose nodes become a part of what is made of them
        made = merge(loader, defaults, repo)
        if key[1] is not None:
            known[key] = copy.deepcopy(made)
            _kept(known, key)
        return made

    return merged


def _kept(known: OrderedDict[Hashable, _T], key: Hashable) -> _T:
    """Of one that was just asked for or made; those that were not for long are forgotten."""
    known.move_to_end(key)
    if len(known) > _CHOICES:
        known.popitem(last=False)
    return known[key]


class _Named(io.StringIO):
    """A text as the file that it was read from, by whose name errors call it."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def _remembering(get_loader: Callable[[], Any], reading: _Reading) -> Callable[[], Any]:
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
            if reading.knows(text, None):
                return {}
            return parsed(text, str(getattr(self._stream, "name", "<file>")))

        def dispose(self) -> None:
            pass

    @wraps(get_loader)
    def get() -> Any:
        return Remembering

    return get
