"""A process in which responses are judged: the program that `tasks.reward_processes` starts. One thread; the user's
function may hang in it, crash, or end it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from trinity_sync.host.lifeline import end_with
from trinity_sync.host.origin import ended, keep_origin
from trinity_sync.host.stacks import tell_stack
from trinity_sync.tasks.base import Failure, Response, judged


def serve(descriptor: int, stack: int, lifeline: int) -> None:
    """Judge what is sent, one answer for each response, until the connection is closed.

    Args:
        descriptor: of the connection. First comes the function, pickled; a `Failure` answers that it cannot be had,
            None that it is there. Then come lists of responses.
        stack: an empty file, for `tell_stack`.
        lifeline: see `end_with`.
    """
    for inherited in (descriptor, stack, lifeline):  # by no program that the function starts
        os.set_inheritable(inherited, False)
    end_with(lifeline)
    tell_stack(stack)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines: others write into the same file
            stream.reconfigure(line_buffering=True, write_through=False)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        try:
            reward = pickle.loads(connection.recv_bytes())
            getattr(reward, "warm_up", lambda: None)()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            connection.send(Failure(ended(error), keep_origin(error)))
            return
        connection.send(None)
        while True:
            responses: Sequence[Response] = connection.recv()
            for response in responses:
                connection.send(judged(reward, response))
            _flush()
    _flush()
    os._exit(0)  # whatever the function has left running


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
