"""The modules that the fork server imports of Ray, verl and this package, when the first worker is requested. Ray draws
its ids from a generator seeded at the first draw. Forks of a process that has drawn an id would all draw the same ids
and mix up their tasks and objects. Defining an actor class draws an id, so that one comes from elsewhere here, and the
module checks that two forks draw different ids.
"""

from __future__ import annotations

import os

import ray.actor
from ray._raylet import ActorClassID, UniqueID


class _OtherIds:
    @staticmethod
    def from_random() -> ActorClassID:
        return ActorClassID(os.urandom(ActorClassID.size()))


def _drawn_by_a_fork() -> bytes:
    """Return the first id that a fork of this process draws."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, UniqueID.from_random().binary())
        os._exit(0)
    os.close(write)
    drawn = os.read(read, UniqueID.size())
    os.close(read)
    os.waitpid(pid, 0)
    return drawn


ray.actor.ActorClassID = _OtherIds
try:
    import trinity_sync.explorer.hf
    import trinity_sync.sync.synchronizer
    import trinity_sync.trainer.worker  # noqa: F401
finally:
    ray.actor.ActorClassID = ActorClassID

if _drawn_by_a_fork() == _drawn_by_a_fork():
    raise ImportError("forks of this process would all draw the same ids from Ray: an import has drawn one already")
