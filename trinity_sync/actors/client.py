"""What all clients have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from trinity_sync.actors.pending import CallTransport, Pending

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_sync.actors.calls import Call

T = TypeVar("T")


class Client:
    """A client of an actor.

    Args:
        handle: Ray's handle of the actor, or what else carries calls to it.
        who: what errors call it, such as ``"the checkpoint monitor"``.
    """

    def __init__(self, handle: ActorHandle | CallTransport, who: str) -> None:
        self.handle, self.who = handle, who
        self._transport = handle if isinstance(handle, CallTransport) else _ray(handle)

    def caller(self) -> tuple[str, str]:
        """Name the calling process, unlike all others that call the actor: (its node, itself)."""
        return self._transport.caller()

    def _call(self, what: str, method: str, *args: object, **kwargs: object) -> Pending[Any]:
        """Begin a call. What it answers with is for the caller to say, by the type of its own result.

        Args:
            what: what the actor is to do, for errors.
            method: name of the actor's method.
            args, kwargs: its arguments.
        """
        return self._transport.call(self.who, what, method, args, kwargs)


class RayClient(Client):
    """A client of an actor that is always one of Ray's, so that its calls may be waited for together
    (`calls.results`), and their references be passed on.

    Args:
        handle: Ray's handle of the actor.
        who: what errors call it.
    """

    handle: ActorHandle

    def __init__(self, handle: ActorHandle, who: str) -> None:
        super().__init__(handle, who)

    def _call(self, what: str, method: str, *args: object, **kwargs: object) -> Call[T]:
        call: Call[T] = self._transport.call(self.who, what, method, args, kwargs)  # type: ignore[assignment]
        return call

    def _tell(self, method: str, *args: object, **kwargs: object) -> None:
        """Call, and wait for no answer."""
        getattr(self.handle, method).remote(*args, **kwargs)


def _ray(handle: ActorHandle) -> CallTransport:
    from trinity_sync.actors.calls import RayTransport  # Ray takes a while to import, and a local actor needs none

    return RayTransport(handle)
