"""What all clients have in common."""

from __future__ import annotations

from typing import Any

from trinity_sync.actors.calls import Call


class Client:
    """A client of an actor.

    Args:
        handle: Ray's handle of the actor.
        who: what errors call it, such as ``"the checkpoint monitor"``.
    """

    def __init__(self, handle: Any, who: str) -> None:
        self.handle, self.who = handle, who

    def _call(self, what: str, method: str, *args: Any, **kwargs: Any) -> Call[Any]:
        """Begin a call.

        Args:
            what: the actor is to do, for errors.
            method: of the actor.
        """
        return Call(getattr(self.handle, method).remote(*args, **kwargs), self.who, what)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call, and wait for no answer."""
        getattr(self.handle, method).remote(*args, **kwargs)
