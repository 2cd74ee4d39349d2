"""The HTTP client of a vLLM server that the user runs. vLLM need not be installed on this side."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from trinity_sync.actors.explorer_client import EngineDied
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.host.logs import story
from trinity_sync.host.origin import error_text
from trinity_sync.integrations.vllm.control import OnUpdate, updating
from trinity_sync.integrations.vllm.worker_link import WorkerAddress

Json = dict[str, Any]

logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for each request

_LOOK_S = 0.5
"""Between two looks whether a server is up."""

_ANSWER_S = 10.0
"""For an answer that takes the server no time."""

_WATCH_S = 2.0
"""Between two looks whether a server still is up that has something to do."""

_SLOW = "it answers slowly or not at all"


class ServerFacts(NamedTuple):
    """Settings that a server reports.

    Attributes:
        model: name by which requests name its model.
        root: folder or hub id from which it took config and tokenizer.
        longest: maximum of prompt and response together, in tokens.
        dtype: of its weights, as torch prints it.
        log_probs_mode: its ``--logprobs-mode``.
        backend: its weight-transfer backend; None: none.
        workers: processes that hold its weights (tensor times pipeline parallel).
        copies: of the model (data parallel).
        load_format: its ``--load-format``.
        quantization: of its weights; None: none.
        version: of vLLM.
    """

    model: str
    root: str
    longest: int
    dtype: str
    log_probs_mode: str
    backend: str | None
    workers: int
    copies: int
    load_format: str
    quantization: str | None
    version: str


def lock_server(url: str, timeout_s: float = 5.0) -> socket.socket:
    """Lock a server of this node against other programs that give it weights, of whatever user.

    The lock is an abstract socket: it ends with this process, and is seen where the server's port is. An address has
    several names, so the port alone counts.

    Args:
        timeout_s: how long an earlier explorer may take to end, seconds.
    """
    at = httpx.URL(url)
    name = f"\0trinity-sync-vllm-server-{at.port or at.scheme}"
    lock = socket.socket(socket.AF_UNIX)
    until = time.monotonic() + timeout_s
    while True:
        try:
            lock.bind(name)
            lock.listen()
            return lock
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                lock.close()
                raise ConfigError(
                    f"explorer.url: {_holder(name)} gives the vLLM server at {url} its weights; end that run first, or "
                    "start another server"
                ) from error
        time.sleep(_LOOK_S)


def _holder(name: str) -> str:
    """Name the process that listens at an address of this node."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(name)
        pid, *_ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return "another process"  # it has just ended, or many have asked


class Server:
    """A server. Each call raises `WaitTimeout` where it does not answer in time, `EngineDied` where it is gone, and
    `RunError` where it says that it failed.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        timeout_s: limit of each call, seconds.

    Attributes:
        who: what errors call it.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.who = f"the vLLM server at {url}"
        self.timeout_s = timeout_s
        self._url = url
        self._calls = ThreadPoolExecutor(thread_name_prefix="vLLM server")
        # Ignores the environment's proxy, which is for other hosts. vLLM closes a connection after it has reported a
        # failure; the next call on that connection would look like the death of the server.
        self._client = httpx.Client(base_url=url, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def wait_up(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Args:
            timeout_s: limit, seconds.
        """
        until = time.monotonic() + timeout_s
        why = self._not_up()
        if why is not None:
            story.info("waiting up to %g s for %s: %s", timeout_s, self.who, why)
        while why is not None:
            if time.monotonic() > until:
                raise WaitTimeout(self.who, f"come up ({why})", timeout_s)
            time.sleep(_LOOK_S)
            why = self._not_up()

    def facts(self) -> ServerFacts:
        """Return the server's settings."""
        answer = self._send("GET", "/server_info", "report its version and settings", params={"config_format": "json"})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(
                f"{self.who} does not accept weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        config = self._checked(answer, "report its version and settings")
        models = self.get("/v1/models", "name its models")
        version = self.get("/version", "say its version")
        try:
            config = config["vllm_config"]
            return ServerFacts(
                model=models["data"][0]["id"],
                root=models["data"][0]["root"],
                longest=config["model_config"]["max_model_len"],
                dtype=config["model_config"]["dtype"],
                log_probs_mode=config["model_config"]["logprobs_mode"],
                backend=(config["weight_transfer_config"] or {}).get("backend"),
                workers=config["parallel_config"]["world_size"],
                copies=config["parallel_config"]["data_parallel_size"],
                load_format=str(config["load_config"]["load_format"]),
                quantization=config["model_config"]["quantization"],
                version=version["version"],
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self.who} does not report the fields that a vLLM server reports: {error_text(error)}"
            ) from error

    def get(self, path: str, what: str) -> Json:
        """Ask for something."""
        return self._checked(self._send("GET", path, what), what)

    def post(
        self, path: str, what: str, body: Mapping[str, object] | None = None, params: Mapping[str, str] | None = None
    ) -> Json:
        """Have it do something; waits until it has. Arguments as of `get`."""
        return self._checked(self._send("POST", path, what, body=body, params=params), what)

    def post_each(self, path: str, what: str, bodies: Sequence[Mapping[str, object]], at_a_time: int) -> list[Json]:
        """As `post` for each of many bodies, side by side; the limit is for all together."""
        return asyncio.run(self._post_each(path, what, bodies, at_a_time))

    async def _post_each(
        self, path: str, what: str, bodies: Sequence[Mapping[str, object]], at_a_time: int
    ) -> list[Json]:
        limits = httpx.Limits(max_connections=at_a_time, max_keepalive_connections=at_a_time)
        until = time.monotonic() + self.timeout_s
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, limits=limits, timeout=None) as client:

            async def post(body: Mapping[str, object]) -> Json:
                with self._errors_of(what):
                    answer = await client.post(path, json=body)
                return self._checked(answer, what)

            asked = [asyncio.ensure_future(post(body)) for body in bodies]
            waiting = set(asked)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(waiting, timeout=_WATCH_S, return_when=asyncio.FIRST_EXCEPTION)
                    for one in done:
                        one.result()
                    if waiting:
                        await asyncio.to_thread(self._check_alive, what)
                    if waiting and time.monotonic() > until:
                        raise WaitTimeout(self.who, what, self.timeout_s)
            finally:
                for one in waiting:
                    one.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        return [one.result() for one in asked]

    def _not_up(self) -> str | None:
        try:
            answer = self._client.get("/health", timeout=_ANSWER_S)
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"{self.who} cannot be asked: {error}") from error
        except httpx.TimeoutException:
            return _SLOW
        except httpx.RequestError as error:
            return _reason(error)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(f"explorer.url: the server at {self._url} is not a vLLM server; it has no /health")
        return None if answer.is_success else f"it says {answer.status_code}"

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        asking = self._calls.submit(
            self._client.request, method, path, json=body, params=params, timeout=self.timeout_s
        )
        until = time.monotonic() + self.timeout_s + _LOOK_S
        while not wait([asking], _WATCH_S).done:
            if time.monotonic() > until:  # it sends little by little
                raise WaitTimeout(self.who, what, self.timeout_s)
            self._check_alive(what)
        with self._errors_of(what):
            return asking.result()

    def _check_alive(self, what: str) -> None:
        """Check that the server is alive: vLLM never answers a call that its engine was executing when it died."""
        try:
            down = self._not_up()
        except ConfigError as error:
            down = str(error)
        if down is not None and down != _SLOW:
            raise EngineDied(f"{self.who} died ({down}) before it could {what}")

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise WaitTimeout(self.who, what, self.timeout_s) from error
        except httpx.TransportError as error:
            raise EngineDied(f"{self.who} disconnected ({_reason(error)}) before it could {what}") from error
        except httpx.RequestError as error:
            raise RunError(
                f"{self.who} sent an unreadable answer ({_reason(error)}) to the request to {what}"
            ) from error

    def _checked(self, answer: httpx.Response, what: str) -> Json:
        if answer.is_success:
            return _json(answer)
        said = _message(answer)
        if answer.is_server_error:
            self._check_alive(f"{what}: {said}")
        raise RunError(f"{self.who} failed to {what}: {said}")


def _json(answer: httpx.Response) -> Json:
    with suppress(ValueError):
        if isinstance(found := answer.json(), dict):
            return found
    return {}


def _message(answer: httpx.Response) -> str:
    """Return the server's description of a failure; its form differs between paths."""
    found = _json(answer)
    said = found.get("error", found.get("detail"))
    if isinstance(said, dict):
        said = said.get("message")
    return f"{said or answer.text[:500] or 'no reason given'} (status {answer.status_code})"


def _reason(error: httpx.RequestError) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Control of a vLLM server's weights over HTTP, and the check that its weights are still ours.


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

    def connect(self, address: WorkerAddress) -> None:
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
        self.check()  # another program's update of the server must not be ended here
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
        self.check()  # no other program has given it weights in the meantime
        self._say("/finish_weight_update", f"finish the update to version {version}", "weight_version", version)

    def reload(self, folder: Path, version: str) -> None:
        """Let the server read its weights from a folder, and report this version from then on."""
        self._say_updating(version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._server.post("/collective_rpc", f"load version {version}", body)
        self.check()
        self._say("/update_weight_version", f"note version {version}", "new_version", version)

    def check(self) -> None:
        """Check that the server still reports the last version that it was given, or a later one whose update was not
        answered in time.

        Raises:
            EngineDied: it reports another one, so it is another engine now.
        """
        if self._given is None:
            return
        held = self._server.get("/weight_info", "report its weights").get("weight_version")
        if held != self._given and held not in self._said:
            raise EngineDied(
                f"{self._server.who} says that it holds {held}, but it was given {self._given}: it was restarted, "
                "or another program has sent it weights"
            )

    def _start_update(self) -> None:
        self._server.post("/start_weight_update", "begin an update")

    def _say_updating(self, version: str) -> None:
        self._say("/update_weight_version", f"note that version {version} comes", "new_version", updating(version))

    def _say(self, path: str, what: str, field: str, label: str) -> None:
        """Give the server a name for its weights, which it then reports."""
        name = f"{label}-{self._owner}"
        self._said.add(name)
        self._server.post(path, what, {field: name})
        self._given, self._said = name, set()
