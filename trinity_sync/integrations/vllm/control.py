"""Control of a vLLM engine while its weights change; the engine is in this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Literal, Never, Protocol, TypeVar

from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.errors import RunError, WaitTimeout, grown
from trinity_sync.host.origin import error_text
from trinity_sync.integrations.vllm.worker_link import WorkerAddress

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

OnUpdate = Literal["wait", "keep", "abort"]
"""Handling of running requests: they finish first, continue with the new weights, or are aborted."""


def updating(version: str) -> str:
    """Return the version that an engine reports from its first changed byte until the version is complete."""
    return f"updating-{version}"


class EngineControl(Protocol):
    """Control of an engine. Each method waits for it, and raises `WaitTimeout`, `EngineDeathError` if it has died, and
    `RunError` if it fails.
    """

    def connect(self, address: WorkerAddress) -> None:
        """Have all workers connect to an address."""

    def pause(self, how: OnUpdate) -> None:
        """Stop generation and clear the caches of keys, values and prefixes."""

    def resume(self) -> None:
        """Start generation again."""

    def start_update(self, version: str) -> None:
        """Begin an update session; the engine reports `updating(version)` from now on."""

    def update(self, version: str | None, nbytes: int = 0) -> None:
        """Load the arrived version, of so many bytes, into the model; None gives the session up, which raises."""

    def finish_update(self, version: str) -> None:
        """End the session; the engine reports this version from now on."""


class AsyncControl:
    """Control of an `AsyncLLM` in this process. `loop`: the engine's event loop, running in another thread. `who`: the
    engine's name in errors. `timeout_s`: limit of each call, seconds; a `WaitLimit`
    grows with the bytes of an update.
    """

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, who: str, timeout_s: float) -> None:
        self._llm, self._loop, self._who, self._timeout_s = llm, loop, who, timeout_s
        self._giver: str | None = None

    def connect(self, address: WorkerAddress) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._giver = address.key
        request = WeightTransferInitRequest(init_info=address._asdict())
        self.wait(self._llm.init_weight_transfer_engine(request), "connect its workers")

    def pause(self, how: OnUpdate) -> None:
        self.wait(self._llm.pause_generation(mode=how, clear_cache=True), "pause")

    def resume(self) -> None:
        self.wait(self._llm.resume_generation(), "go on")

    def start_update(self, version: str) -> None:
        what = f"begin the update to version {version}"
        self.wait(self._llm.update_weight_version(updating(version)), what)
        self.wait(self._llm.start_weight_update(), what)

    def update(self, version: str | None, nbytes: int = 0) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info={"version": version, "giver": self._giver})
        limit_s = grown(self._timeout_s, nbytes)
        self.wait(self._llm.update_weights(request), f"put version {version} into its model", limit_s)

    def finish_update(self, version: str) -> None:
        self.wait(self._llm.finish_weight_update(weight_version=version), f"finish the update to version {version}")

    def wait(self, doing: Coroutine[object, Never, T], what: str, timeout_s: float | None = None) -> T:
        """Run a coroutine on the engine's loop and wait for it. `timeout_s`: in seconds; None: that of all calls."""
        from vllm.v1.engine.exceptions import EngineDeadError

        limit = self._timeout_s if timeout_s is None else timeout_s
        future = asyncio.run_coroutine_threadsafe(doing, self._loop)
        try:
            return future.result(limit)
        except LateError as error:
            if future.done():  # a timeout inside vLLM
                raise RunError(f"{self._who} failed to {what}: {error_text(error)}") from error
            future.cancel()
            raise WaitTimeout(self._who, what, limit) from None
        except EngineDeadError as error:
            raise EngineDeathError(f"{self._who} died before it could {what}") from error
        except Exception as error:
            raise RunError(f"{self._who} failed to {what}: {error_text(error)}") from error
