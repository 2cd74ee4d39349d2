"""A vLLM server of the user, called over HTTP. vLLM itself need not be installed here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.errors import ConfigError, RunError, WaitTimeout, grown, in_one_line
from trinity_sync.host.logs import story
from trinity_sync.host.masking import EnvironmentSecret, shown
from trinity_sync.host.origin import error_text
from trinity_sync.integrations.vllm.control import OnUpdate, updating
from trinity_sync.integrations.vllm.worker_link import WorkerAddress

Json = dict[str, Any]

logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for each request

_POLL_S = 0.5
"""Interval at which a server is asked whether it is up."""

_ANSWER_S = 10.0
"""Timeout of an answer that takes the server no time."""

_WATCH_S = 2.0
"""Interval at which a server that works at a call is asked whether it is still up."""

_SLOW = "it answers slowly or not at all"


class ServerFacts(NamedTuple):
    """A server's description of itself."""

    model: str  # name of its model in requests
    root: str  # folder or hub id of config and tokenizer
    longest: int  # prompt and response together, in tokens, at most
    dtype: str  # of its weights, as torch prints it
    log_probs_mode: str  # its ``--logprobs-mode``
    backend: str | None  # its weight-transfer backend
    workers: int  # processes that hold its weights (tensor times pipeline parallel)
    copies: int  # of the model (data parallel)
    load_format: str  # its ``--load-format``
    quantization: str | None  # of its weights
    version: str  # of vLLM


class ServerRoute(NamedTuple):
    """The addresses of this node and of a server, as they reach each other. Equal: the server is on this node."""

    here: str
    server: str

    @classmethod
    def to(cls, url: str) -> ServerRoute:
        """Look it up; sends nothing. OSError: there is no such host. RunError: there is no route to it."""
        at = httpx.URL(url)
        for family, kind, *_, address in socket.getaddrinfo(at.host, at.port or at.scheme, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as asking:  # such as ::1 where there is no IPv6
                asking.connect(address)
                here, server = asking.getsockname()[0], asking.getpeername()[0]
                return cls(here, here if ipaddress.ip_address(server).is_loopback else server)
        raise RunError(f"this node has no route to {at.host}, the host of explorer.url")

    @property
    def listening(self) -> str | None:
        """The address at which the server reaches this node; None: it is on the loopback interface."""
        return None if ipaddress.ip_address(self.here).is_loopback else self.here


def lock_server(url: str, timeout_s: float = 5.0) -> socket.socket:
    """Lock a server against other programs of this node that give it weights, of any user.

    The lock is an abstract socket: it ends with this process, and all who reach the server's port see it. An address
    has several names, so of a server on this node the port alone counts. `timeout_s`: timeout of the wait for the end
    of an earlier explorer, seconds.
    """
    at, route = httpx.URL(url), ServerRoute.to(url)
    elsewhere = "" if route.here == route.server else f"-{route.server}"
    name = f"\0trinity-sync-vllm-server{elsewhere}-{at.port or at.scheme}"
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
        time.sleep(_POLL_S)


def _holder(name: str) -> str:
    """Name the process that listens at an address of this node."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(name)
        pid, *_ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return "another process"  # it has just ended, or its queue is full


class ServerClient:
    """Client of a server. Each call raises `WaitTimeout` without an answer in time, `EngineDeathError` if it is gone,
    and `RunError` if it reports a failure. Called in threads without an event loop. `url`: such as
    ``http://127.0.0.1:8000``. `timeout_s`: timeout of each call, seconds; a `WaitLimit` grows with
    the bytes that a call moves. `key`: sent with each call. `who`: its name in errors.
    """

    def __init__(self, url: str, timeout_s: float, key: EnvironmentSecret | None = None) -> None:
        self.who = f"the vLLM server at {url}"
        self.timeout_s = timeout_s
        self._url, self._key = url, key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key.text}"}
        self._ssl = httpx.create_ssl_context(trust_env=False)
        # Without a proxy of the environment, which is for other places. Each call has a new connection: vLLM closes an
        # idle one, and a call at that moment would look like a death.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(
            base_url=url, headers=self._headers, trust_env=False, verify=self._ssl, limits=limits
        )

    def wait_up(self, timeout_s: float) -> None:
        """Wait until it answers, for so many seconds."""
        until = time.monotonic() + timeout_s
        why = self._not_up()
        if why is not None:
            story.info("waiting up to %g s for %s: %s", timeout_s, self.who, why)
        while why is not None:
            if time.monotonic() > until:
                raise WaitTimeout(self.who, f"come up ({why})", timeout_s)
            time.sleep(_POLL_S)
            why = self._not_up()

    def facts(self) -> ServerFacts:
        """Return its description of itself; ConfigError: it has none, or does not take weights."""
        try:
            info = self._send(_Request("GET", "/server_info", params={"config_format": "json"}), "describe itself")
        except _NotFoundError:
            raise ConfigError(
                f"{self.who} does not accept weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        models, version = self.get("/v1/models", "name its models"), self.get("/version", "name its version")
        try:
            config = info["vllm_config"]
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
            raise ConfigError(f"{self.who} reports its settings in an unknown form: {error_text(error)}") from error

    def get(self, path: str, what: str) -> Json:
        """Get an answer; `what` is said in errors."""
        return self._send(_Request("GET", path), what)

    def post(
        self,
        path: str,
        what: str,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
        nbytes: int = 0,
    ) -> Json:
        """Have it do something, and wait for its end; `what` is said in errors. `nbytes`: that it moves."""
        return self._send(_Request("POST", path, body, params), what, nbytes)

    def post_each(self, path: str, what: str, bodies: Sequence[Mapping[str, object]], at_a_time: int) -> list[Json]:
        """As `post` for each of many bodies, concurrently; the timeout is for all together."""
        return asyncio.run(self._send_each([_Request("POST", path, body) for body in bodies], what, at_a_time))

    def _send(self, request: _Request, what: str, nbytes: int = 0) -> Json:
        [answer] = asyncio.run(self._send_each([request], what, 1, nbytes))
        return answer

    async def _send_each(self, requests: Sequence[_Request], what: str, at_a_time: int, nbytes: int = 0) -> list[Json]:
        limits = httpx.Limits(max_connections=at_a_time, max_keepalive_connections=at_a_time)
        limit_s = grown(self.timeout_s, nbytes)
        until = time.monotonic() + limit_s

        # A new client each time: vLLM closes a connection after a failure, which the next call would take for a death.
        async with httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            trust_env=False,
            verify=self._ssl,
            limits=limits,
            timeout=None,
        ) as client:

            async def send(request: _Request) -> Json:
                with self._translated(what):
                    answer = await client.request(
                        request.method, request.path, json=request.body, params=request.params
                    )
                return self._checked(answer, what)

            calls = [asyncio.ensure_future(send(request)) for request in requests]
            waiting = set(calls)
            try:
                while waiting:
                    limit = max(min(_WATCH_S, until - time.monotonic()), 0.0)
                    done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
                    for one in done:
                        one.result()
                    if waiting and time.monotonic() >= until:
                        raise WaitTimeout(self.who, what, limit_s)
                    if waiting:
                        await asyncio.to_thread(self._check_alive, what)
            finally:
                for one in waiting:
                    one.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        return [one.result() for one in calls]

    def _not_up(self) -> str | None:
        """Return why it does not work; None: it does."""
        try:
            answer = self._client.get("/health", timeout=_ANSWER_S)
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"{self.who} cannot be called: {error}") from error
        except httpx.TimeoutException:
            return _SLOW
        except httpx.RequestError as error:
            return _reason(error)
        self._check_key(answer)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(f"explorer.url: {shown(self._url)} is not a vLLM server; it has no /health")
        return None if answer.is_success else f"status {answer.status_code}"

    def _check_alive(self, what: str) -> None:
        """Raise where the server is gone: vLLM never answers a call that its engine worked at when it died."""
        try:
            down = self._not_up()
        except ConfigError as error:
            down = str(error)
        if down is not None and down != _SLOW:
            raise EngineDeathError(f"{self.who} died ({down}) before it could {what}")

    def _check_key(self, answer: httpx.Response) -> None:
        """Raise ConfigError where the server refuses the key."""
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            told = "asks for a key; name the environment variable that has its --api-key"
            if self._key is not None:
                told = f"refuses the key in the environment variable {self._key.variable}; it must be its --api-key"
            raise ConfigError(f"explorer.key_env: {self.who} {told} (status {answer.status_code})")

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise EngineDeathError(f"{self.who} disconnected ({_reason(error)}) before it could {what}") from error
        except httpx.RequestError as error:
            raise RunError(
                f"{self.who} sent an unreadable answer ({_reason(error)}) to the request to {what}"
            ) from error

    def _checked(self, answer: httpx.Response, what: str) -> Json:
        if answer.is_success:
            return _json(answer)
        self._check_key(answer)
        message = _message(answer)
        if answer.is_server_error:
            self._check_alive(f"{what}: {message}")
        kind = _NotFoundError if answer.status_code == httpx.codes.NOT_FOUND else RunError
        raise kind(f"{self.who} failed to {what}: {message}")


class _NotFoundError(RunError):
    """The server does not know a path."""


class _Request(NamedTuple):
    method: str
    path: str
    body: Mapping[str, object] | None = None
    params: Mapping[str, str] | None = None


def _json(answer: httpx.Response) -> Json:
    with suppress(ValueError):
        if isinstance(found := answer.json(), dict):
            return found
    return {}


def _message(answer: httpx.Response) -> str:
    """Return the server's text about a failure; its form differs from path to path."""
    found = _json(answer)
    text = found.get("error", found.get("detail"))
    if isinstance(text, dict):
        text = text.get("message")
    return f"{text or answer.text[:500] or 'no reason given'} (status {answer.status_code})"


def _reason(error: httpx.RequestError) -> str:
    """Return the system's reason for it, which says more than its own text, if there is one."""
    root: BaseException = error
    while cause := root.exceptions[0] if isinstance(root, BaseExceptionGroup) else root.__cause__ or root.__context__:
        root = cause
    if isinstance(root, OSError) and root.errno is not None and root.errno > 0:
        return f"[Errno {root.errno}] {os.strerror(root.errno)}"
    return in_one_line(error)


class HttpControl:
    """The `EngineControl` of a server that was started with ``VLLM_SERVER_DEV_MODE=1``. It labels each version with a
    name of its own, by which `check` sees whether the server still holds that version.
    """

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._owner = secrets.token_hex(4)
        self._giver: str | None = None
        self._label: str | None = None  # the last one that the server has confirmed
        self._later: set[str] = set()  # those that it may have, since it did not answer in time

    def connect(self, address: WorkerAddress) -> None:
        self._giver = address.key
        try:
            self._server.post("/init_weight_transfer_engine", "connect its workers", {"init_info": address._asdict()})
        except EngineDeathError:
            raise
        except RunError as error:
            place = "" if address.host is None else f" or {address.host}:{address.port}"
            raise RunError(f"{error}; its workers have to reach the explorer at {address.path}{place}") from error

    def pause(self, how: OnUpdate) -> None:
        self.check()
        self._server.post("/pause", "pause", params={"mode": how})

    def resume(self) -> None:
        self.check()  # another program's update of the server must not be ended here
        self._server.post("/resume", "resume generation")

    def start_update(self, version: str) -> None:
        self._label_updating(version)
        try:
            self._start_update()
        except EngineDeathError:
            raise
        except RunError:
            # an earlier explorer may have died in its session, which has to end first
            with contextlib.suppress(RunError):
                self.update(None)
            self._start_update()

    def update(self, version: str | None, nbytes: int = 0) -> None:
        body = {"update_info": {"version": version, "giver": self._giver}}
        self._server.post("/update_weights", f"put version {version} into its model", body, nbytes=nbytes)

    def finish_update(self, version: str) -> None:
        self.check()  # no other program has given it weights in the meantime
        self._set_label("/finish_weight_update", f"finish the update to version {version}", "weight_version", version)

    def reload(self, folder: Path, version: str, nbytes: int = 0) -> None:
        """Have it read its weights, so many bytes, from a folder, and label them with this version."""
        self._label_updating(version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._server.post("/collective_rpc", f"load version {version}", body, nbytes=nbytes)
        self.check()
        self._set_label("/update_weight_version", f"note version {version}", "new_version", version)

    def check(self) -> None:
        """Check that the server has the label that it got last; EngineDeathError: it is another engine."""
        if self._label is None:
            return
        found = self._server.get("/weight_info", "name its version").get("weight_version")
        if found != self._label and found not in self._later:
            raise EngineDeathError(
                f"{self._server.who} says that it holds {found}, but it was given {self._label}: it was restarted, "
                "or another program has sent it weights"
            )

    def _start_update(self) -> None:
        self._server.post("/start_weight_update", "begin an update")

    def _label_updating(self, version: str) -> None:
        self._set_label(
            "/update_weight_version", f"note the update to version {version}", "new_version", updating(version)
        )

    def _set_label(self, path: str, what: str, field: str, name: str) -> None:
        label = f"{name}-{self._owner}"
        self._later.add(label)
        self._server.post(path, what, {field: label})
        self._label, self._later = label, set()
