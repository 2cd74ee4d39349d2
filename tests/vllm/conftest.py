"""One vLLM for all tests of a module: it takes half a minute of a core to start."""

from __future__ import annotations

from tests.sync.conftest import cluster, make_agent, make_synchronizer, synchronizer

__all__ = ["cluster", "make_agent", "make_synchronizer", "synchronizer"]
