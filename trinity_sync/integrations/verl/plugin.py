"""What verl imports to know us: our checkpoints and our weight sync in a program of verl's that stays as it is.

::

    VERL_USE_EXTERNAL_MODULES=trinity_sync.integrations.verl.plugin VERL_ENGINE_VENDOR=trinity

verl imports this module while it is itself imported, in each of its processes, and at every start of any program that
uses it where the entry point ``verl.plugins`` names it. So nothing is loaded here, neither torch nor more of verl: what
there is to do for a module of verl's is done when that has been imported. Without `VERL_ENGINE_VENDOR` the engines stay
verl's own; the backend of weight sync is there to be chosen by its name.

What goes wrong is said on standard error, and leaves verl as it is: verl itself keeps quiet about plug-ins that fail.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from trinity_sync.integrations.verl import at_exit
from trinity_sync.integrations.verl.vendor import TESTED, is_on, is_tested, say


def _replace(module: ModuleType, name: str, instead_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(module, name, instead_of(getattr(module, name)))


def _resume(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import program_start

    _replace(module, "find_latest_ckpt_path", program_start.instead_of)


def _remote_copies(module: ModuleType) -> None:
    verls = module.copy

    @functools.wraps(verls)
    def copy(*args: Any, **kwargs: Any) -> Any:
        # Not before it is called: what that imports may be what has brought verl's module in.
        from trinity_sync.integrations.verl import remote_copies

        return remote_copies.instead_of(verls)(*args, **kwargs)

    module.copy = copy  # type: ignore[attr-defined]


def _engines(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import engine_registry

    engine_registry.register(module)


def _start_line(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import program_start

    program_start.register(module)


def _weight_sync(_: ModuleType) -> None:
    from trinity_sync.integrations.verl import weight_sync

    weight_sync.register()


def _driver(module: ModuleType) -> None:
    """Ray takes the signals to itself when it starts."""
    rays = module.init

    @functools.wraps(rays)
    def init(*args: Any, **kwargs: Any) -> Any:
        started = rays(*args, **kwargs)
        at_exit.finish_at_exit(at_exit.SavesOfWorkers())
        return started

    module.init = init  # type: ignore[attr-defined]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.engine.fsdp.transformer_impl": _engines,
    "verl.workers.engine.megatron.transformer_impl": _engines,
    "verl.utils.checkpoint.checkpoint_manager": _resume,
    "verl.utils.checkpoint.checkpoint_handler": _start_line,
    "verl.trainer.ppo.v1.trainer_base": _start_line,
    "verl.trainer.ppo.ray_trainer": _start_line,
    "verl.utils.hdfs_io": _remote_copies,
    "ray": _driver,
}
"""What is done for a module of verl's, or Ray, once it is imported, where the engines are to be ours."""

_ALWAYS: dict[str, Callable[[ModuleType], None]] = {"verl.checkpoint_engine.base": _weight_sync}
"""What is done in any case: it is chosen by its name."""


def _aloud(do: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    @functools.wraps(do)
    def hook(module: ModuleType) -> None:
        try:
            do(module)
        except Exception as error:
            say(f"{module.__name__} is left as it is, because of {type(error).__name__}: {error}")

    return hook


def _version() -> str:
    """verl's; it is being imported, and knows its number by now."""
    return str(getattr(sys.modules.get("verl"), "__version__", "")) or _installed()


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl")
    except PackageNotFoundError:
        return "of an unknown version"


def register() -> None:
    """Have verl's modules changed when they are imported; those that are, at once. Called by the import of this
    module, once in a process.
    """
    version = _version()
    if not is_tested(version):
        if is_on():
            known = ".".join(map(str, TESTED))
            say(f"verl {version} is not {known}.x, which this is written for: OFF, verl saves its checkpoints itself")
        return
    if is_on():
        atexit.register(at_exit.end_as_failed)  # so early that it runs last
    if os.environ.get("VERL_PLATFORM") == "cpu":
        importlib.import_module("trinity_sync.backends.cpu_platform")  # verl asks for it in a moment
    for name, do in (_ALWAYS | _HOOKS if is_on() else _ALWAYS).items():
        register_post_import_hook(_aloud(do), name)


register()
