"""Imports verl's engines without parts that a run here does not use, which cost seconds in every training process:

- Megatron's engines, which verl would load whenever megatron-core is installed. `backends.megatron.megatron_engine`
  imports them itself.
- The senders of verl that import vLLM, which verl would load whenever vLLM is installed.
- Runs of the garbage collector.

Import it before anything of `verl.workers` or `verl.checkpoint_engine`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_sync.host.process import without_collections

_LEFT_OUT = (
    "verl.workers.engine.megatron",
    "verl.workers.engine.mindspeed",
    "verl.checkpoint_engine.hccl_checkpoint_engine",
    "verl.checkpoint_engine.mooncake_checkpoint_engine",
)


@contextmanager
def _without_these() -> Iterator[None]:
    # None in the table of modules makes an import of that name fail, and verl continues without it.
    for name in _LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in _LEFT_OUT:
            del sys.modules[name]


if "verl.workers.engine" not in sys.modules:
    with without_collections(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl

        with _without_these():
            import verl.checkpoint_engine
            import verl.workers.engine  # noqa: F401
