"""A child of `tests.host.test_child_process`: does what each message says, one after another."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any


def serve(descriptor: int) -> None:
    connection = Connection(descriptor)
    connection.send("up")
    while True:
        time.sleep(0)
        code, given = connection.recv()
        scope: dict[str, Any] = {"connection": connection, "descriptor": descriptor, "given": given, "os": os}
        exec(code, scope)
        connection.send(scope.get("said"))
