"""A function in a Python file of the user's: what can be told of it without running the file."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from trinity_sync.errors import ConfigError


def check_function_file(path: Path, name: str, arguments: Collection[str]) -> None:
    """See whether a file defines a function that can be called with certain keyword arguments. Of one that comes to its
    name in another way, as by an import, nothing more is said.

    Args:
        path: of the file.
        name: of the function.
        arguments: the keyword arguments.

    Raises:
        ConfigError: the file cannot be read or has no such name, or the function is asynchronous or takes others.
    """
    try:
        module = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"task.reward.function_path is {path}, which cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"task.reward.function_path is {path}, which is no Python: {error}") from error
    defined = [node for node in module.body if _defines(node, name)]
    if not defined:
        if any(_may_bind(node, name) for node in ast.walk(module)):
            return
        raise ConfigError(f"task.reward.function_name is {name}, which {path} does not have")
    function = defined[-1]
    if isinstance(function, ast.AsyncFunctionDef):
        raise ConfigError(f"{path}:{function.lineno}: {name} is asynchronous; make it a plain function")
    if isinstance(function, ast.FunctionDef) and not function.decorator_list:
        _check_arguments(f"{path}:{function.lineno}: {name}", function.args, arguments)


def _check_arguments(where: str, taken: ast.arguments, given: Collection[str]) -> None:
    by_place, by_name = [*taken.posonlyargs, *taken.args], taken.kwonlyargs
    named = {argument.arg for argument in [*taken.args, *by_name]}
    if taken.kwarg is None and (refused := sorted(set(given) - named)):
        raise ConfigError(f"{where} has no parameter {refused[0]}, which it is called with")
    required = [argument.arg for argument in by_place[: len(by_place) - len(taken.defaults)]]
    required += [argument.arg for argument, default in zip(by_name, taken.kw_defaults, strict=True) if default is None]
    if lacking := [argument for argument in required if argument not in set(given) & named]:
        raise ConfigError(
            f"{where} has a parameter {lacking[0]}, which it is not called with; give task.reward.reward_kwargs."
            f"{lacking[0]}, or it a default"
        )


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def _may_bind(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return name == (node.asname or node.name) or node.name == "*"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name in (name, "__getattr__")
    return isinstance(node, ast.Name) and node.id == name
