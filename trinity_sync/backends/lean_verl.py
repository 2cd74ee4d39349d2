"""Imports verl's engines without Megatron's, which verl would load whenever megatron-core is installed: seconds and
hundreds of megabytes for every process of a run that trains with FSDP.

To be imported before anything of `verl.workers`. `backends.megatron.engine` imports what is left out here by itself.
"""

from __future__ import annotations

import sys
import warnings

_LEFT_OUT = ("verl.workers.engine.megatron", "verl.workers.engine.mindspeed")

if "verl.workers.engine" not in sys.modules:
    import verl

    # None in the table of modules makes an import of that name fail, and verl goes on without it.
    for _name in _LEFT_OUT:
        sys.modules[_name] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import verl.workers.engine  # noqa: F401
    finally:
        for _name in _LEFT_OUT:
            del sys.modules[_name]
