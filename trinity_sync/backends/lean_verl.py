"""Imports verl's engines without what a run here does not use, which costs seconds in every process that trains:

- Megatron's engines, which verl would load whenever megatron-core is installed. `backends.megatron.engine` imports what
  is left out here by itself.
- verl's own data sets, which bring Hugging Face's `datasets`, pandas and pyarrow. They import as ever afterwards.
- Runs of the garbage collector.

To be imported before anything of `verl.workers`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.host.process import without_collections

_LEFT_OUT = ("verl.workers.engine.megatron", "verl.workers.engine.mindspeed")
_DATA_SETS = "verl.utils.dataset"


@contextmanager
def _without_engines() -> Iterator[None]:
    # None in the table of modules makes an import of that name fail, and verl goes on without it.
    for name in _LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in _LEFT_OUT:
            del sys.modules[name]


@contextmanager
def _without_data_sets() -> Iterator[None]:
    """Modules of verl's data-set package can be imported, but its ``__init__``, which imports them all, is not run."""
    spec = importlib.util.find_spec(_DATA_SETS)
    if spec is None or _DATA_SETS in sys.modules:
        yield
        return
    package = types.ModuleType(_DATA_SETS)
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules[_DATA_SETS] = package
    try:
        yield
    finally:
        del sys.modules[_DATA_SETS]


if "verl.workers.engine" not in sys.modules:
    with without_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl

        with _without_engines(), _without_data_sets():
            import verl.workers.engine  # noqa: F401
