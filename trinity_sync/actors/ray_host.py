"""What an actor of Ray's has to know of Ray."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.exceptions import RayError


class RayHost:
    """Ray, as the `hosting.Host` of the actor in this process."""

    @property
    def restarted(self) -> bool:
        """Whether Ray has started the actor again."""
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def call_id(self) -> str:
        """Return Ray's id of the current task."""
        return str(ray.get_runtime_context().get_task_id())

    async def outlived(self, owned: Sequence[object]) -> bool:
        """Wait for a reference, which fails with the process that it belongs to."""
        try:
            await owned[0]  # type: ignore[misc]
        except RayError:
            return True
        return False
