"""The control of a vLLM server's weights over HTTP, and the proof that it still holds what it was given.

Each version is known to the server by a name that nobody else gives it, so a server that was started again, or that
somebody else has given weights, is never taken for one that holds the version. Before the first byte changes, the
server says that it is being updated: its label never stands on other bytes than its own, whoever dies when.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from trinity_sync.actors.explorer import EngineDied
from trinity_sync.errors import RunError
from trinity_sync.integrations.vllm.control import OnUpdate, updating
from trinity_sync.integrations.vllm.link import Address
from trinity_sync.integrations.vllm.server import Server


class HttpControl:
    """The `EngineControl` of a server.

    Args:
        server: the server; started with ``VLLM_SERVER_DEV_MODE=1``.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._owner = secrets.token_hex(4)
        self._giver: str | None = None
        self._given: str | None = None
        self._said: set[str] = set()

    def connect(self, address: Address) -> None:
        self._giver = address.key
        try:
            self._server.post("/init_weight_transfer_engine", "connect its workers", {"init_info": address._asdict()})
        except EngineDied:
            raise
        except RunError as error:
            raise RunError(f"{error}; it has to run on the node of the explorer, as the same user") from error

    def pause(self, how: OnUpdate) -> None:
        self.check()
        self._server.post("/pause", "pause", params={"mode": how})

    def resume(self) -> None:
        self.check()  # what somebody else does with the server is not ours to end
        self._server.post("/resume", "go on")

    def start_update(self, version: str) -> None:
        self._say_updating(version)
        try:
            self._start_update()
        except EngineDied:
            raise
        except RunError:
            # who gave it a version before may have died in the session, after which none can be begun
            with contextlib.suppress(RunError):
                self.update(None)
            self._start_update()

    def update(self, version: str | None) -> None:
        body = {"update_info": {"version": version, "giver": self._giver}}
        self._server.post("/update_weights", f"put version {version} into its model", body)

    def finish_update(self, version: str) -> None:
        self.check()  # nobody else has given it weights in between
        self._say("/finish_weight_update", f"finish the update to version {version}", "weight_version", version)

    def reload(self, folder: Path, version: str) -> None:
        """Have it read its weights from a folder, and say from now on that they are this version."""
        self._say_updating(version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._server.post("/collective_rpc", f"load version {version}", body)
        self.check()
        self._say("/update_weight_version", f"note version {version}", "new_version", version)

    def check(self) -> None:
        """See whether the server still says what it was told last, if it was told anything, or since then without an
        answer in time.

        Raises:
            EngineDied: it does not: it is another engine now.
        """
        if self._given is None:
            return
        held = self._server.get("/weight_info", "say what it holds").get("weight_version")
        if held != self._given and held not in self._said:
            raise EngineDied(
                f"{self._server.who} says that it holds {held}, but it was given {self._given}: it was started again, "
                "or somebody else has given it weights"
            )

    def _start_update(self) -> None:
        self._server.post("/start_weight_update", "begin an update")

    def _say_updating(self, version: str) -> None:
        self._say("/update_weight_version", f"note that version {version} comes", "new_version", updating(version))

    def _say(self, path: str, what: str, field: str, label: str) -> None:
        """Have the server say what it holds."""
        name = f"{label}-{self._owner}"
        self._said.add(name)
        self._server.post(path, what, {field: name})
        self._given, self._said = name, set()
