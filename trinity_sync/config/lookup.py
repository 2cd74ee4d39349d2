"""Classes that the configuration names as text: checks without an import whether a class exists, and imports it in the
process that uses it. Also reads which classes our option files name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf

from trinity_sync.config.composition import as_written, conf_dir
from trinity_sync.errors import ConfigError, TrinityError, near
from trinity_sync.host.origin import error_text, origin
from trinity_sync.host.references import Settings, Value
from trinity_sync.protocol.choices import mistyped

T = TypeVar("T")
_CODE = (".py", ".so", ".pyc")
_KINDS = {"class": ast.ClassDef, "function": ast.FunctionDef | ast.AsyncFunctionDef}
"""Definitions, by what a name may be of."""


class ModuleSource(NamedTuple):
    """The place of a top-level module: its folder, and the sha256 hex of its file, or of all code files of a
    package.
    """

    folder: str
    digest: str


def module_source(module: str, folders: Iterable[Path] = ()) -> ModuleSource | None:
    """Find a top-level module without importing it: on the import path, else in these folders; None: it is missing."""
    if not module.isidentifier():
        return None
    found = (PathFinder.find_spec(module, [str(folder)]) for folder in folders)
    spec = _find(module, None) or next(filter(None, found), None)
    inner = list((spec and spec.submodule_search_locations) or ())
    root = Path(inner[0] if inner else (spec and spec.origin) or "")
    below = root.rglob("*") if inner else ()
    files = sorted(file for file in below if file.suffix in _CODE and "__pycache__" not in file.parts)
    digest = hashlib.sha256()
    for file in files if inner else [root] * root.is_file():
        content = file.read_bytes()
        digest.update(f"{os.path.relpath(file, root)} {len(content)}\n".encode("utf-8", "surrogateescape") + content)
    return ModuleSource(str(root.parent), digest.hexdigest()) if inner or root.is_file() else None


def missing(name: str, kind: str = "class") -> str | None:
    """Return why a dotted name cannot be imported, as far as can be known without importing; None: no reason found.

    Finds the module as an import would, and reads its source for the name. Modules without source, or with a
    `__getattr__`, are not checked. `kind`: what the name is of, class or function.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or (len(parts) == 1 and _find(name, None) is None):
        return f"it is not a dotted name such as my_package.my_module.{'MyClass' if kind == 'class' else 'my_function'}"
    module: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        place = None if module is None else module.submodule_search_locations
        if module is not None and place is None:
            break
        found = _find(".".join(parts[:depth]), place)
        if found is None:
            break
        module = found
    if module is None:
        return f"there is no module {parts[0]}; it has to be installed, or lie in a folder of PYTHONPATH"
    left = parts[len(module.name.split(".")) :]
    body = _body(module)
    offered = [node.name for node in body if isinstance(node, _KINDS[kind]) and not node.name.startswith("_")]
    if not left:
        return f"{module.name} is a module; name a {kind} of it" + (f": {module.name}.{offered[0]}" if offered else "")
    names = set(_bound(body))
    if not body or left[0] in names or names & {"*", "__getattr__"}:
        return None
    has = f"; it has {', '.join(offered[:5])}" if offered else ""
    return f"{module.name} has no {left[0]}{near(left[0], names) or has}"


def load(key: str, name: str) -> Any:
    """Import the object of a dotted name."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
                continue  # the name of a nested class has no module in the middle
            raise _useless(key, name, _told(error)) from error
        except (Exception, SystemExit) as error:
            raise _useless(key, name, _told(error)) from error
        try:
            for part in parts[depth:]:
                found = getattr(found, part)
        except AttributeError as error:
            raise _useless(key, name, error) from error
        return found
    raise _useless(key, name, missing(name) or "it cannot be imported")


def load_class(key: str, name: str, kind: type[T]) -> type[T]:
    """Import a subclass of `kind`, as `load` does. Raises ConfigError if it is not one."""
    found = load(key, name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{key} is {name}, which is not a subclass of {kind.__module__}.{kind.__name__}")
    return found


def build(key: str, values: Mapping[str, object], kind: type[T]) -> T:
    """Build the object of a part of the configuration: the class under `_target_`, from all other keys."""
    named, others = f"{key}.{TARGET}", {name: value for name, value in values.items() if name != TARGET}
    found = load_class(named, str(values.get(TARGET)), kind)
    if wrong := mistyped(found, others):
        raise ConfigError(f"{key}.{wrong}")
    try:
        return found(**others)
    except TrinityError:
        raise
    except Exception as error:
        reason = error if origin(error) is None else error_text(error)
        raise _useless(named, str(values.get(TARGET)), reason) from error


def _useless(key: str, name: str, reason: object) -> ConfigError:
    return ConfigError(f"{key} is {name}, which cannot be used: {' '.join(str(reason).split())}")


def _told(error: BaseException) -> str:
    """Return the error of an import, with its place; a `SyntaxError` has that itself."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if place.filename.startswith("<") else f" ({place.filename}:{place.lineno})"
    return f"its import raises {type(error).__name__}: {error}{where}"


def _find(name: str, place: Sequence[str] | None) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if isinstance(loaded, ModuleSpec):
        return loaded
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(name, place)
        except Exception:
            continue  # the import itself will report it
        if found is not None:
            return found
    return None


def _body(module: ModuleSpec) -> Sequence[ast.stmt]:
    """Return the statements at the top level of a module; none: it has no source that can be read."""
    if module.origin is None or not module.origin.endswith(".py"):
        return ()
    try:
        return ast.parse(Path(module.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ()


def _bound(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _bound(list(ast.iter_child_nodes(node)))


# -- our own option files: their classes may be named by any configuration; their labels are reserved, except those of
# engines


TARGET = "_target_"
"""The key that names a class."""

LABELS = {"algorithm": "kind", "backend": "strategy", "explorer": "kind", "sync": "mode"}
"""Groups with exactly one option, which names a class, and the key of the option's label. Users, events and reports use
the label.
"""

OF_ENGINES = ("backend",)
"""Groups whose label is another program's name (verl's name of the engine), so that users' classes may have it too: it
says who can load a checkpoint.
"""

GROUPS = (*LABELS, "checkpoint", "retention")
"""All groups whose options name the class that they configure."""


@cache
def own_options(group: str) -> Mapping[str, Settings]:
    """Return our options of a group by name, each with its file's content, not merged or resolved."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return {file.stem: _content(file) for file in files}


@cache
def own_targets() -> frozenset[str]:
    """Return the classes that our options name."""
    return frozenset(name for group in GROUPS for name in own_targets_of(group))


@cache
def own_targets_of(group: str) -> frozenset[str]:
    """Return the classes that our options of a group name."""
    options = own_options(group).values() if group in GROUPS else ()
    return frozenset(name for option in options for name in _targets(option))


@cache
def own_labels(group: str) -> Mapping[str, str]:
    """Return the labels of our options of a group, with the class of each."""
    options = own_options(group).values()
    return {str(option[LABELS[group]]): str(option[TARGET]) for option in options}


def chosen_by_option(overrides: Sequence[str]) -> list[str]:
    """Rewrite overrides of earlier releases that choose one of our classes by its label: ``sync.mode=nccl`` becomes
    ``sync=nccl``. Groups with a user's class stay.
    """
    chosen = dict(text.partition("=")[::2] for text in overrides)
    own = {
        group
        for group in LABELS
        if f"{group}.{TARGET}" in chosen or chosen.get(group, "") not in ("", *own_options(group))
    }
    return [_choice(text, own) or text for text in overrides]


def _choice(override: str, own: Collection[str]) -> str | None:
    key, _, value = override.partition("=")
    group, _, label = key.partition(".")
    if group in own or LABELS.get(group) != label:
        return None
    named = [name for name, option in own_options(group).items() if option[label] == value]
    # if options share a class, the label is one of its settings
    classes = list(own_labels(group).values())
    return f"{group}={named[0]}" if named and classes.count(own_labels(group)[value]) == 1 else None


def _content(file: Path) -> Settings:
    node = OmegaConf.load(file)
    value = as_written(node) if isinstance(node, DictConfig) else None
    return value if isinstance(value, dict) else {}


def _targets(value: Value) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == TARGET and isinstance(inner, str):
            yield inner
        else:
            yield from _targets(inner)
