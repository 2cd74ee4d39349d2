"""Real vLLM servers, as a user starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from trinity_sync.integrations.vllm.server import ServerClient

UP_S = 240.0
PLUG_IN = ("--weight-transfer-config", '{"backend":"trinity"}')


class RealServer:
    """A server; `start` may be called again when it is gone.

    Args:
        model: folder of the model.
        log: where it says what it does.
        arguments: further ones.
        dev: whether it lets itself be given weights.
        environment: further variables of its processes.
        python: of the environment that it runs in.
        before: words of its command before that.
        host: where it listens.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        dev: bool = True,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        before: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self.model = model
        self._log = log
        self._arguments = arguments
        self._dev = dev
        self._environment = environment or {}
        self._python, self._before, self._host = python, before, host

    def start(self, *, wait: bool = True) -> None:
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_SERVER_DEV_MODE": str(int(self._dev)), **self._environment}
        command = [*self._before, self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", self._host, "--port", str(self.port), "--dtype", "bfloat16", "--enforce-eager"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                cwd=self._log.parent,  # not the checkout, from which -m would import
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            ServerClient(self.url, UP_S).wait_up(UP_S)

    def post(self, path: str, body: dict[str, object] | None = None, **params: str) -> None:
        httpx.post(self.url + path, json=body, params=params, timeout=60, trust_env=False).raise_for_status()

    def get(self, path: str) -> dict[str, object]:
        found: dict[str, object] = httpx.get(self.url + path, timeout=60, trust_env=False).json()
        return found

    def core(self) -> psutil.Process:
        """The process in which the model is."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        return next(one for one in below if "EngineCore" in " ".join(one.cmdline()))

    def kill(self) -> None:
        """Kill all of its processes; waits until they are gone."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        psutil.wait_procs(below, 60)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()


@contextmanager
def serving(
    model: Path, log: Path, *arguments: str, dev: bool = True, python: str = sys.executable
) -> Iterator[RealServer]:
    """A server for as long as the body runs."""
    server = RealServer(model, log, *arguments, dev=dev, python=python)
    server.start()
    try:
        yield server
    finally:
        server.close()
