"""The plug-in that verl imports: our checkpoints and our weight sync in an unchanged verl program.

::

    VERL_USE_EXTERNAL_MODULES=trinity_sync.integrations.verl.plugin VERL_ENGINE_VENDOR=trinity

verl imports this module during its own import, in each of its processes. Where the entry point ``verl.plugins`` names
it, any program that uses verl imports it. So it loads neither torch nor more of verl: hooks change verl's modules after
their import. Without `VERL_ENGINE_VENDOR` the engines stay verl's own, and only the backend of weight sync is
registered, under its name.

Errors of a hook are printed to standard error and leave verl's module unchanged: verl hides errors of plug-ins.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType

from wrapt import register_post_import_hook

from trinity_sync.host.package_source import installed_version
from trinity_sync.integrations.verl import at_exit
from trinity_sync.integrations.verl.vendor import TESTED, is_on, is_tested, say


def _resume(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import program_start

    module.find_latest_ckpt_path = program_start.instead_of(module.find_latest_ckpt_path)  # type: ignore[attr-defined]


def _remote_copies(module: ModuleType) -> None:
    verls = module.copy

    @functools.wraps(verls)
    def copy(*args: object, **kwargs: object) -> object:
        # Imported at the call: these imports may be what has imported verl's module.
        from trinity_sync.integrations.verl import remote_copies

        return remote_copies.instead_of(verls)(*args, **kwargs)

    module.copy = copy  # type: ignore[attr-defined]


def _engines(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import engine_registry

    engine_registry.register(module)


def _trainers(module: ModuleType) -> None:
    from trinity_sync.integrations.verl import memory_saves, program_start

    program_start.register(module)
    memory_saves.register(module)


def _weight_sync(_: ModuleType) -> None:
    # The import registers the backend. It may be under way, and be what has imported verl's module.
    importlib.import_module("trinity_sync.integrations.verl.weight_sync.checkpoint_engine")


def _driver(module: ModuleType) -> None:
    """Finish the workers' saves at the driver's end. Installed after Ray's start, which replaces signal handlers."""
    rays = module.init

    @functools.wraps(rays)
    def init(*args: object, **kwargs: object) -> object:
        started = rays(*args, **kwargs)
        at_exit.finish_at_exit(at_exit.SavesOfWorkers())
        return started

    module.init = init  # type: ignore[attr-defined]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.engine.fsdp.transformer_impl": _engines,
    "verl.workers.engine.megatron.transformer_impl": _engines,
    "verl.utils.checkpoint.checkpoint_manager": _resume,
    "verl.utils.checkpoint.checkpoint_handler": _trainers,
    "verl.trainer.ppo.v1.trainer_base": _trainers,
    "verl.trainer.ppo.ray_trainer": _trainers,
    "verl.trainer.sft_trainer": _trainers,
    "verl.trainer.sft_trainer_ray": _trainers,
    "verl.utils.hdfs_io": _remote_copies,
    "ray": _driver,
}
"""Hooks for modules of verl and Ray, if the engines are to be ours."""

_ALWAYS: dict[str, Callable[[ModuleType], None]] = {"verl.checkpoint_engine.base": _weight_sync}
"""Hooks that always run: the backend is chosen by its name."""


def _aloud(do: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    @functools.wraps(do)
    def hook(module: ModuleType) -> None:
        try:
            do(module)
        except Exception as error:
            say(f"{module.__name__} is not patched, because of {type(error).__name__}: {error}")

    return hook


def _version() -> str:
    """Return verl's version; verl is being imported and has set it."""
    return (
        str(getattr(sys.modules.get("verl"), "__version__", "")) or installed_version("verl") or "of an unknown version"
    )


def register() -> None:
    """Hook into verl's modules: those imported later, and at once those imported already. Runs on import of this
    module.
    """
    version = _version()
    if not is_tested(version):
        if is_on():
            tested = ".".join(map(str, TESTED))
            say(f"verl {version} is not {tested}.x, which this is written for: OFF, verl saves its checkpoints itself")
        return
    if is_on():
        atexit.register(at_exit.end_as_failed)  # registered first, so that it runs last
    if os.environ.get("VERL_PLATFORM") == "cpu":
        importlib.import_module("trinity_sync.backends.cpu_platform")  # verl asks for it next
    for name, do in (_ALWAYS | _HOOKS if is_on() else _ALWAYS).items():
        register_post_import_hook(_aloud(do), name)


register()
