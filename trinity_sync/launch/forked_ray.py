"""Imported by the fork server before all that uses Ray: keeps Ray's generator of ids from beginning in the server.

Forks of a process in which it has begun draw the same ids, each of them, and objects of one replace another's. Ray's
library draws from the generator where a class becomes an actor's, `ray.remote`, which imports do.
"""

import os

import ray.actor

_ClassID = ray.actor.ActorClassID


class _DrawnByTheSystem:
    @staticmethod
    def from_random() -> object:
        return _ClassID(os.urandom(_ClassID.size()))


ray.actor.ActorClassID = _DrawnByTheSystem
