"""Keeps explorers alive between a failed attempt and the next attempt of the same program (`healing`), because an
engine is slow to start. Only with a local Ray, which is kept as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_sync.explorer.actor import ExplorerSpec
    from trinity_sync.explorer.pool import ExplorerPool, LiveExplorer


class KeptExplorers:
    """Holds the explorers between two attempts. `after`: whether explorers live on after an error."""

    def __init__(self, after: Callable[[BaseException], bool]) -> None:
        self._after = after
        self._alive: dict[str, LiveExplorer] = {}
        self._spec: ExplorerSpec | None = None
        self._connection: str | None = None  # to Ray, by which the handles can be used

    def keep(self, pool: ExplorerPool, error: Exception) -> None:
        """Take the explorers of an attempt that has ended by an error, but not those that the error names."""
        if self._after(error):
            told = str(error)
            self._alive = pool.hand_over(lambda name: name in told)
            self._spec, self._connection = pool.spec, _connection()

    def pids(self) -> list[int]:
        """Return their processes."""
        return [one.pid for one in self._alive.values()]

    def take(self, spec: ExplorerSpec) -> dict[str, LiveExplorer]:
        """Give them, by name, to an attempt whose explorers have this spec; those of another one end."""
        if self._spec is None or replace(self._spec, member=spec.member) != spec:
            self.close()
        taken = self._alive if self._connection == _connection() else {}
        self._alive = {}
        return taken

    def close(self) -> None:
        """End those that no attempt has taken."""
        import ray

        if self._alive and self._connection == _connection():
            for one in self._alive.values():
                ray.kill(one.handle)
        self._alive = {}


def _connection() -> str | None:
    """Return what tells this program's connection to Ray from a later one; None: there is none."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    # the first connection to any Ray has the same worker id
    return None if context is None else f"{context.get_node_id()} {context.get_worker_id()}"
