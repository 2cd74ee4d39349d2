"""Keeps explorers alive between a failed attempt and the next attempt of the same program (`healing`), because an
engine is slow to start. Only with a local Ray, which is kept as well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_sync.host.logs import story

if TYPE_CHECKING:
    from trinity_sync.explorer.actor import ExplorerSpec
    from trinity_sync.explorer.pool import ExplorerPool, LiveExplorer
    from trinity_sync.explorer.rollout import FreeRollout

_HAND_OVER_S = 15.0
"""Limit of an explorer's call when the next attempt is ready for it."""


class KeptExplorers:
    """Holds the explorers between two attempts. `after`: whether explorers live on after an error."""

    def __init__(self, after: Callable[[BaseException], bool]) -> None:
        self._after = after
        self._alive: dict[str, LiveExplorer] = {}
        self._spec: ExplorerSpec | None = None
        self._connection: str | None = None  # to Ray, by which the handles can be used
        self._rollout: FreeRollout | None = None

    @property
    def generates(self) -> bool:
        """Whether they go on generating."""
        return self._rollout is not None

    def keep(self, pool: ExplorerPool, error: Exception, rollout: FreeRollout | None = None) -> None:
        """Take the explorers of an attempt that has ended by an error, but not those that the error names. A rollout
        that is paused goes on with them.
        """
        self.end_rollout(0.0)
        if self._after(error):
            told = str(error)
            self._alive = pool.hand_over(lambda name: name in told)
            self._spec, self._connection = pool.spec, _connection()
            if rollout is not None and rollout.paused and self._alive:
                self._rollout = rollout
                rollout.go_on_alone(self._alive)

    def end_rollout(self, grace_s: float = _HAND_OVER_S) -> int:
        """End the generation, with calls that end within `grace_s`; return how many groups were made."""
        if self._rollout is None:
            return 0
        self._rollout.close(grace_s)
        made, self._rollout = self._rollout.made, None  # after it: an interrupt leaves it to `close`
        return made

    def pids(self) -> list[int]:
        """Return their processes."""
        return [one.pid for one in self._alive.values()]

    def take(self, spec: ExplorerSpec) -> dict[str, LiveExplorer]:
        """Give them, by name, to an attempt whose explorers have this spec; those of another one end."""
        import ray

        if self._spec is None or replace(self._spec, member=spec.member) != spec:
            self.close()
        taken = self._alive if self._connection == _connection() else {}
        self._alive = {}
        for name in sorted(taken.keys() & (self._rollout.lost if self._rollout is not None else ())):
            story.warning("%s does not live on: it died or hung while the run went on", name)
            ray.kill(taken.pop(name).handle)
        return taken

    def close(self) -> None:
        """End those that no attempt has taken, and the generation."""
        import ray

        self.end_rollout(0.0)
        alive, self._alive = self._alive, {}
        if alive and self._connection == _connection():
            for one in alive.values():
                with suppress(Exception):  # Ray may be lost
                    ray.kill(one.handle)


def _connection() -> str | None:
    """Return what tells this program's connection to Ray from a later one; None: there is none."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    # the first connection to any Ray has the same worker id
    return None if context is None else f"{context.get_node_id()} {context.get_worker_id()}"
