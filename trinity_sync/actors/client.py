"""What all clients have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from trinity_sync.actors.calls import Call

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")


class Client:
    """A client of an actor.

    Args:
        handle: Ray's handle of the actor.
        who: what errors call it, such as ``"the checkpoint monitor"``.
    """

    def __init__(self, handle: ActorHandle, who: str) -> None:
        self.handle, self.who = handle, who

    def _call(self, what: str, method: str, *args: object, **kwargs: object) -> Call[T]:
        """Begin a call. What it answers with is for the caller to say, by the type of its own result.

        Args:
            what: what the actor is to do, for errors.
            method: name of the actor's method.
            args, kwargs: its arguments.
        """
        return Call(getattr(self.handle, method).remote(*args, **kwargs), self.who, what)

    def _tell(self, method: str, *args: object, **kwargs: object) -> None:
        """Call, and wait for no answer."""
        getattr(self.handle, method).remote(*args, **kwargs)
