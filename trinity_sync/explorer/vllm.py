"""An engine that samples and scores with vLLM, inside the explorer actor.

vLLM runs in processes of its own: an engine core, and workers that hold the weights. Its front end runs here, in the
event loop of a thread. When one of these processes dies, the explorer ends too (`EngineDeathError`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Unpack

import torch

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer import texts
from trinity_sync.host.interrupts import left_to_driver
from trinity_sync.host.logs import OwnOutput
from trinity_sync.host.origin import error_text
from trinity_sync.integrations.vllm import BACKEND
from trinity_sync.integrations.vllm.control import AsyncControl, OnUpdate
from trinity_sync.models.families import vllm_problem
from trinity_sync.protocol.versions import Version

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from trinity_sync.sync.base import ExplorerSide, SyncMode
    from trinity_sync.sync.weight_loader import WeightTarget

_START_S = 86_400.0
"""Limit of vLLM's start; the caller's own, `cluster.start_timeout_s`, is shorter."""

_GENERATE_S = 86_400.0
"""Limit of a generation; the caller's own, `explorer.timeout_s`, is shorter, and ends a slow explorer."""

_POLL_S = 0.001


class VLLMEngine(texts.VLLMBase):
    """A causal language model of vLLM in processes of its own.

    Samples differ from those of `HFEngine`, as vLLM's own sampler draws them. Concurrent requests may change the last
    bits of each other's logits.

    Args:
        model_path, settings: as for `TextEngine`; no weights are read.
        tp: processes over which the model is spread.
        kv_cache_gb: memory for keys and values on a CPU, GB.
        eager: run operations one by one, uncompiled; None: on a CPU only.
        on_update: what a new version does to running requests: ``wait`` (it is loaded between calls of `generate`),
            ``keep`` (they go on with the new weights) or ``abort`` (they start again).
        engine: further arguments of `AsyncEngineArgs`.

    Raises:
        ConfigError: as `TextEngine`; or vLLM is not installed, or cannot run this model.
    """

    def __init__(
        self,
        model_path: str,
        *,
        tp: int = 1,
        kv_cache_gb: int | None = None,
        eager: bool | None = None,
        on_update: OnUpdate = "wait",
        engine: Mapping[str, object] | None = None,
        **settings: Unpack[texts.TextSettings],
    ) -> None:
        super().__init__(model_path, **settings)
        on_cpu = not torch.cuda.is_available()
        if problem := vllm_problem(self._config.to_dict(), on_cpu=on_cpu):
            raise ConfigError(f"explorer=vllm {problem}")
        self._tp = tp
        self._on_update = on_update
        self._shapes = self._tensor_shapes()
        eager = on_cpu if eager is None else eager
        _set_environment(kv_cache_gb, eager, on_cpu)
        self._loop = asyncio.new_event_loop()
        with left_to_driver():
            resource_tracker.ensure_running()  # its start has SIGINT and SIGTERM come again
        with left_to_driver():  # inherited by the processes that vLLM starts in this thread
            threading.Thread(target=self._loop.run_forever, name="vLLM", daemon=True).start()
        self._llm = self._start({**self._arguments(eager, on_cpu), **(engine or {})})
        self._control = AsyncControl(self._llm, self._loop, "vLLM", _GENERATE_S)
        self._requests: set[asyncio.Future[texts.VLLMResponse]] = set()
        self._request_ids = itertools.count()
        self._loaded: Version | None = None
        self._lost = False

    def _arguments(self, eager: bool, on_cpu: bool) -> Mapping[str, object]:
        length, prompt_length = self._response_length, self._prompt_length
        longest = length + prompt_length if prompt_length is not None else self._positions
        arguments = {
            "model": self._model_path,
            "trust_remote_code": self._trust_remote_code,
            "skip_tokenizer_init": True,
            "dtype": str(self._torch_dtype).removeprefix("torch."),
            "load_format": "dummy",  # the weights come by sync
            "tensor_parallel_size": self._tp,
            "distributed_executor_backend": "uni" if self._tp == 1 else "mp",
            "max_model_len": longest,
            "max_num_seqs": self._batch_size,
            "enforce_eager": eager,
            "disable_log_stats": True,
            "seed": self._seed % 2**32,
            "logprobs_mode": self._log_probs_mode,
            "weight_transfer_config": {"backend": BACKEND},
        }
        if on_cpu:
            # With chunked prefill vLLM discards the token that each chunk drew. On a CPU that fails for requests with
            # a seed: the engine core dies. Linear attention needs chunks; there one pass takes all prompts of a batch.
            linear = "linear_attention" in (getattr(self._config.get_text_config(), "layer_types", None) or ())
            arguments["enable_chunked_prefill"] = linear
            if linear and longest:
                arguments["max_num_batched_tokens"] = self._batch_size * longest
        return arguments

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """Return vLLM's workers, which receive versions themselves."""
        from trinity_sync.integrations.vllm.target import WorkerTarget

        self._drop_target()
        self._control = AsyncControl(self._llm, self._loop, f"vLLM of {side.name}", side.timeout_s)
        self._target = WorkerTarget(
            self._control,
            workers=self._tp,
            tensors=self._shapes,
            mode=mode,
            side=side,
            verify=verify,
            on_update=self._on_update,
            start_timeout_s=_START_S,
            on_switch=self._switch,
            copies=mode.copies(side),
        )
        return self._target

    @property
    def workers(self) -> list[int]:
        """The pids of the processes that hold the weights, by their ranks."""
        return self._target.workers if self._target is not None else []

    def close(self) -> None:
        """End vLLM's processes."""
        if self._target is not None:
            self._target.close()
        self._llm.shutdown(timeout=0.0)  # its processes ignore signals, so waiting would not help
        # removes the shared memory that they leave behind
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def takes_beside(self) -> bool:
        return self._on_update != "wait"

    def give_up(self) -> None:
        def cancel() -> None:
            self._lost = True
            for one in self._requests:
                one.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _switch(self, version: Version) -> None:
        """Label tokens by a version from now on. Called while the engine is paused."""
        if self.takes_beside:
            self._control.wait(self._outputs_delivered(), "hand over what it made before an update")
        self._loaded, self._lost = version, False

    async def _outputs_delivered(self) -> None:
        """Wait until the paused engine's tokens have reached their requests. vLLM answers a pause before it has passed
        them all through its queue and the slot of each request.
        """
        queue, processor = self._llm.engine_core.outputs_queue, self._llm.output_processor
        while True:
            handler_waits = queue.empty() and bool(queue._getters)
            if handler_waits and all(one.queue.output is None for one in processor.request_states.values()):
                return
            await asyncio.sleep(_POLL_S)

    def respond(self, request: texts.SampleRequest) -> texts.Responses:
        """Generate the responses. `SampleRequest.version` labels their tokens until another version is loaded
        concurrently.
        """

        def label() -> int:
            return request.version[1] if self._loaded is None or not self.takes_beside else self._loaded.step

        generation = self._generate_all(request, label)
        return texts.joined(self._control.wait(generation, f"generate for step {request.step}", _GENERATE_S))

    async def _generate_all(self, request: texts.SampleRequest, label: Callable[[], int]) -> list[texts.VLLMResponse]:
        if self._lost:
            raise RunError("its weights were lost in an update")
        requests = [
            asyncio.ensure_future(self._generate_one(prompt, self._sampling(request.temperature, seed), label))
            for prompt, seed in texts.sample_rows(request)
        ]
        self._requests.update(requests)
        try:
            return await asyncio.gather(*requests)
        except asyncio.CancelledError:
            if self._lost:
                raise RunError("its weights were lost in an update") from None
            raise
        finally:
            for one in requests:
                one.cancel()
            self._requests.difference_update(requests)

    async def _generate_one(
        self, prompt: list[int], sampling: SamplingParams, label: Callable[[], int]
    ) -> texts.VLLMResponse:
        while True:
            response = texts.VLLMResponse()
            inputs = {"prompt_token_ids": list(prompt)}
            async for output in self._llm.generate(inputs, sampling, str(next(self._request_ids))):
                response.add(output.outputs[0], label())
            if response.finish_reason != "abort" or self._on_update != "abort":
                return response

    def _sampling(self, temperature: float, seed: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        in_pieces = self._on_update == "keep"
        return SamplingParams(
            temperature=temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            max_tokens=self._response_length,
            stop_token_ids=list(self._ends),
            ignore_eos=True,  # else vLLM adds the end tokens of its own config
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if in_pieces else RequestOutputKind.FINAL_ONLY,
            seed=seed,
        )

    def _start(self, arguments: Mapping[str, object]) -> AsyncLLM:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        unknown = arguments.keys() - AsyncEngineArgs.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"explorer.engine.{min(unknown)} is not an argument of vLLM's AsyncEngineArgs")

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        output = OwnOutput()
        try:
            return asyncio.run_coroutine_threadsafe(start(), self._loop).result(_START_S)
        except Exception as error:  # the cause, in another process, is in its output only
            why = output.last_error(but="Engine core initialization failed") or error_text(error)
            raise ConfigError(f"explorer=vllm cannot run model.path={self._model_path}: {why}") from error


def _set_environment(kv_cache_gb: int | None, eager: bool, on_cpu: bool) -> None:
    """Set the environment variables that vLLM reads, in this process and in those that it starts."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if on_cpu:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gb or 1)
        if eager:  # else each process compiles two small functions with a C++ compiler
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Otherwise each explorer binds its threads to the same cores, and several workers need a NUMA node each.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Allows the only worker to live in the engine core's process; vLLM separates them to bind threads.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
