"""What the control of a server makes of answers that come late; the server is made up."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_sync.actors.explorer import EngineDied
from trinity_sync.errors import WaitTimeout
from trinity_sync.integrations.vllm.http_control import HttpControl


class LateServer:
    """Does what it is told, and may answer too late."""

    who = "the vLLM server at nowhere"

    def __init__(self) -> None:
        self.held = "default"
        self.late = False

    def get(self, path: str, what: str) -> dict[str, Any]:
        return {"weight_version": self.held}

    def post(self, path: str, what: str, body: Any = None, params: Any = None) -> dict[str, Any]:
        if path == "/finish_weight_update":
            self.held = body["weight_version"]
        if self.late:
            raise WaitTimeout(self.who, what, 1.0)
        return {}


def test_an_own_name_whose_answer_came_too_late_is_nobody_elses() -> None:
    server = LateServer()
    control = HttpControl(server)  # type: ignore[arg-type]
    control.finish_update("0.1")
    server.late = True
    with pytest.raises(WaitTimeout):
        control.finish_update("0.2")
    server.late = False
    control.check()
    control.pause("wait")
    control.finish_update("0.3")
    control.check()
    server.held = "0.3-of-somebody"
    with pytest.raises(EngineDied, match=r"says that it holds 0\.3-of-somebody, but it was given 0\.3-"):
        control.check()
