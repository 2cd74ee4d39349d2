"""Classes that the configuration names by path, as text: whether there is such a one, told without importing anything,
and the class itself, for the process in which it runs.
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

from omegaconf import OmegaConf

from trinity_sync.config.composition import conf_dir
from trinity_sync.errors import ConfigError, TrinityError
from trinity_sync.host.origin import error_text, origin
from trinity_sync.protocol.typed import mistyped

T = TypeVar("T")
_CODE = (".py", ".so", ".pyc")


class ModuleSource(NamedTuple):
    """Where a top-level module is: its folder, and sha256 hex of its file, or of all code files of a package."""

    folder: str
    digest: str


def module_source(module: str, folders: Iterable[Path] = ()) -> ModuleSource | None:
    """Find a top-level module without an import, where an import would find it or else in these folders; None: it is
    not there.

    Raises:
        OSError: a file of it cannot be read.
    """
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


def missing(name: str) -> str | None:
    """Why there is nothing of that name, as far as that can be told without importing; None: nothing speaks against it.

    Looks for the module where an import would, and reads its source for the name. Of a module without source, or one
    that makes its names as it is asked for them, nothing is said.

    Args:
        name: dotted, of a class or a function.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "it is no dotted name, such as my_package.my_module.MyClass"
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
    if not left:
        return f"{module.name} is a module; name a class of it"
    names = _names(module)
    if names is None or left[0] in names:
        return None
    return f"{module.name} has no {left[0]}"


def load(key: str, name: str) -> Any:
    """Import what a dotted name names.

    Args:
        key: of the configuration, that names it.

    Raises:
        ConfigError: it cannot be imported; the message names key and name.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
                continue  # a class within a class has no module in the middle
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
    """Import a class, as `load` does.

    Args:
        kind: what it has to be a subclass of.

    Raises:
        ConfigError: it cannot be imported, or is none.
    """
    found = load(key, name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{key} is {name}, which is no subclass of {kind.__module__}.{kind.__name__}")
    return found


def build(key: str, values: Mapping[str, Any], kind: type[T]) -> T:
    """Build what a part of the configuration names by `_target_`, from all its other keys.

    Args:
        key: of the part.
        values: of the part, plain.
        kind: what the class has to be a subclass of.

    Raises:
        ConfigError: the class cannot be imported, is none of that kind, or refuses a value.
    """
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
    """What an import raised, and where; a `SyntaxError` says that itself."""
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
            continue  # an import would say what is wrong with it
        if found is not None:
            return found
    return None


def _names(module: ModuleSpec) -> set[str] | None:
    """What a module defines or imports at its top; None: nobody knows."""
    if module.origin is None or not module.origin.endswith(".py"):
        return None
    try:
        names = set(_bound(ast.parse(Path(module.origin).read_bytes()).body))
    except (OSError, SyntaxError, ValueError):
        return None
    return None if names & {"*", "__getattr__"} else names


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


# The option files that come with this program, read as they stand: what they name may be named by any configuration,
# and what they call themselves by none of the user's own, but for the names of engines.


TARGET = "_target_"
"""The key that names a class."""

LABELS = {"algorithm": "kind", "backend": "strategy", "explorer": "kind", "sync": "mode"}
"""Groups with one option at a time that names the class it configures, and the key by which that option calls itself:
what users, events and reports name it by.
"""

OF_ENGINES = ("backend",)
"""Of these, the groups whose label is a name of another program's, so that a class of the user's own may have it, too:
verl's of the engine, by which a checkpoint says who can load it.
"""

GROUPS = (*LABELS, "checkpoint", "retention")
"""All groups whose options name the class that they configure."""


@cache
def own_options(group: str) -> Mapping[str, Mapping[str, object]]:
    """Our options of a group by name, each with what stands in its file: nothing is merged or resolved."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return {file.stem: _content(OmegaConf.to_container(OmegaConf.load(file), resolve=False)) for file in files}


@cache
def own_targets() -> frozenset[str]:
    """The classes that our options name."""
    return frozenset(name for group in GROUPS for name in own_targets_of(group))


@cache
def own_targets_of(group: str) -> frozenset[str]:
    """The classes that our options of a group name; none where they name no class that they configure."""
    options = own_options(group).values() if group in GROUPS else ()
    return frozenset(name for option in options for name in _targets(option))


@cache
def own_labels(group: str) -> Mapping[str, str]:
    """What our options of a group call themselves, and the class that each names."""
    options = own_options(group).values()
    return {str(option[LABELS[group]]): str(option[TARGET]) for option in options}


def chosen_by_option(overrides: Sequence[str]) -> list[str]:
    """Overrides of a run, with those that name one of our classes by its label, as runs could once, put as the choice
    of its option: ``sync.mode=nccl`` as ``sync=nccl``. Where the run has chosen a class of the user's own they stay.
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
    # Where options share a class, the label is a setting of it.
    classes = list(own_labels(group).values())
    return f"{group}={named[0]}" if named and classes.count(own_labels(group)[value]) == 1 else None


def _content(value: object) -> dict[str, object]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, dict) else {}


def _targets(value: object) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == TARGET and isinstance(inner, str):
            yield inner
        else:
            yield from _targets(inner)
