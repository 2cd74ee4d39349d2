"""Generates and scores samples with vLLM. The engine inside the explorer actor.

vLLM runs in processes of its own (an engine core, and workers that hold the weights); here is its front end, in an
event loop of a thread. Where one of these processes dies, the explorer ends with it (`EngineDied`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import torch

from trinity_sync.config import dtype_name
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.explorer.policy import Made, asked_for, joined, log_probs_mode, shapes_of
from trinity_sync.explorer.texts import Texts, scored
from trinity_sync.host.interrupts import left_to_driver
from trinity_sync.host.logs import OwnOutput
from trinity_sync.host.origin import told
from trinity_sync.integrations.vllm import BACKEND
from trinity_sync.integrations.vllm.control import AsyncControl, OnUpdate
from trinity_sync.models.vllm_limits import model_problem
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt
from trinity_sync.tasks.base import Task
from trinity_sync.weights.tensors import to_torch

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from trinity_sync.integrations.vllm.target import WorkerTarget
    from trinity_sync.sync.base import ExplorerSide, SyncMode
    from trinity_sync.sync.weight_loader import WeightTarget

_START_S = 86_400.0
"""Until vLLM is up. Who asks for that waits as long as `cluster.start_timeout_s`."""

_TURN_S = 0.001

_GENERATE_S = 86_400.0
"""Until samples are made. Who asks for them waits as long as `explorer.timeout_s`, and kills who takes longer."""


class VLLMEngine(RolloutEngine):
    """A causal language model of vLLM that samples and scores.

    The random numbers of a sequence depend on (seed, step, prompt, sample) only. vLLM's own sampler draws with them, so
    samples are others than those of `HFEngine`; and what runs beside a request may change its logits in their last
    bits.

    Args:
        model_path: folder in Hugging Face format, or hub id. Config and tokenizer are read, weights are not.
        dtype: dtype in which the weights are held: ``bf16``, ``fp32`` or ``fp16``.
        temperature, top_k, top_p: as for `HFEngine`.
        batch_size: sequences that are generated at a time, at most.
        response_length: longest response in tokens.
        prompt_length: longest prompt in tokens; None: as long as the model's positions allow.
        truncate_prompts: cut longer ones on their left, rather than refuse them.
        chat_template: arguments of the tokenizer's chat template.
        seed: the run's seed.
        trust_remote_code: whether code that comes with the model may run.
        keep_fp32: as for `HFEngine`.
        tp: processes over which the model is spread.
        kv_cache_gb: memory for keys and values on a CPU, GB.
        eager: run operations one by one, uncompiled; None: on a CPU only.
        on_update: what becomes of requests under way when a version comes: ``wait`` (it is taken between `generate`s),
            ``keep`` (they go on with the new weights) or ``abort`` (they are made anew).
        engine: further arguments of `AsyncEngineArgs`.
        settings: of other engines; not used.

    Raises:
        ConfigError: vLLM is not installed, or cannot run this model so.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        batch_size: int,
        response_length: int,
        prompt_length: int | None = None,
        truncate_prompts: bool = False,
        chat_template: Mapping[str, object] | None = None,
        seed: int,
        trust_remote_code: bool = False,
        keep_fp32: Sequence[str] | None = None,
        tp: int = 1,
        kv_cache_gb: int | None = None,
        eager: bool | None = None,
        on_update: OnUpdate = "wait",
        engine: Mapping[str, Any] | None = None,
        **settings: object,
    ) -> None:
        self._seed = seed
        self._tp = tp
        self._texts = Texts(
            model_path,
            response_length=response_length,
            prompt_length=prompt_length,
            trust_remote_code=trust_remote_code,
            truncate_prompts=truncate_prompts,
            chat_template=chat_template,
        )
        if problem := model_problem(self._texts.config.to_dict(), on_cpu=not torch.cuda.is_available()):
            raise ConfigError(f"explorer=vllm {problem}")
        kind = to_torch(dtype_name(dtype))
        self._shapes = shapes_of(self._texts.config, dtype, keep_fp32, trust_remote_code=trust_remote_code)
        eager = not torch.cuda.is_available() if eager is None else eager
        _set_environment(kv_cache_gb, eager)
        self._loop = asyncio.new_event_loop()
        with left_to_driver():
            resource_tracker.ensure_running()  # where it starts, it has SIGINT and SIGTERM come again
        with left_to_driver():  # by the processes, too, that vLLM starts from there
            threading.Thread(target=self._loop.run_forever, name="vLLM", daemon=True).start()
        longest = response_length + prompt_length if prompt_length is not None else self._texts.positions
        arguments = {
            "model": model_path,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,
            "dtype": str(kind).removeprefix("torch."),
            "load_format": "dummy",  # the weights come by sync
            "tensor_parallel_size": tp,
            "distributed_executor_backend": "uni" if tp == 1 else "mp",
            "max_model_len": longest,
            "max_num_seqs": batch_size,
            "enforce_eager": eager,
            "disable_log_stats": True,
            "seed": seed % 2**32,
            "logprobs_mode": log_probs_mode(temperature),
            "weight_transfer_config": {"backend": BACKEND},
        }
        if not torch.cuda.is_available():
            # Of a prompt computed in pieces vLLM takes back the token that each piece drew, which random numbers of a
            # request's own do not let it on a CPU: the engine core dies. Linear attention needs the setting; there all
            # prompts of a batch fit into one pass.
            linear = "linear_attention" in (getattr(self._texts.config.get_text_config(), "layer_types", None) or ())
            whole = {"max_num_batched_tokens": batch_size * longest} if linear and longest else {}
            arguments |= {"enable_chunked_prefill": linear, **whole}
        arguments |= engine or {}
        self._llm = self._start(arguments)
        self._control = AsyncControl(self._llm, self._loop, "vLLM", _GENERATE_S)
        self._target: WorkerTarget | None = None
        self._on_update = on_update
        self._temperature = temperature
        self._sampling = partial(
            _sampling,
            top_k=top_k,
            top_p=top_p,
            length=response_length,
            ends=self._texts.ends,
            in_pieces=on_update == "keep",
        )
        self._asked: set[asyncio.Future[Made]] = set()
        self._switched: Version | None = None
        self._lost = False
        self._ids = itertools.count()

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """vLLM's workers, which receive by themselves."""
        from trinity_sync.integrations.vllm.target import WorkerTarget

        self._control = AsyncControl(self._llm, self._loop, f"vLLM of {side.name}", side.timeout_s)
        self._target = WorkerTarget(
            self._control,
            workers=self._tp,
            tensors=self._shapes,
            side=side,
            verify=verify,
            on_update=self._on_update,
            start_timeout_s=_START_S,
            on_switch=self._switch,
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
        self._llm.shutdown(timeout=0.0)  # no signal reaches its processes: they would only be waited for
        # removes the shared memory that they have left
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        self._loop.call_soon_threadsafe(self._loop.stop)

    def after_load(self) -> None:
        """Nothing is left to do: pausing has dropped all keys, values and prefixes of the weights before."""

    @property
    def takes_beside(self) -> bool:
        """Whether requests that are under way are kept, or made anew, when a version comes."""
        return self._on_update != "wait"

    def give_up(self) -> None:
        """See `RolloutEngine.give_up`."""

        def drop() -> None:
            self._lost = True
            for one in self._asked:
                one.cancel()

        self._loop.call_soon_threadsafe(drop)

    def _switch(self, version: Version) -> None:
        """Label tokens by a version from now on. The engine is paused; all tokens from before are waited for."""
        if self.takes_beside:
            self._control.wait(self._all_have_come(), "hand over what it made before an update")
        self._switched, self._lost = version, False

    async def _all_have_come(self) -> None:
        """Wait until what the paused engine has made is with those who asked for it. vLLM answers a pause before it
        has handed on all of that: by way of a queue, and of a place of each request.
        """
        queue, processor = self._llm.engine_core.outputs_queue, self._llm.output_processor
        while True:
            handler_waits = queue.empty() and bool(queue._getters)
            if handler_waits and all(one.queue.output is None for one in processor.request_states.values()):
                return
            await asyncio.sleep(_TURN_S)

    def generate(
        self,
        prompts: Sequence[Prompt],
        task: Task,
        *,
        step: int,
        samples_per_prompt: int,
        version: tuple[int, int],
        drawing: Drawing = FOR_TRAINING,
    ) -> SampleBatch:
        """Make scored samples for the prompts; see `RolloutEngine.generate`.

        Where versions are taken beside, `version` labels tokens only as long as none was taken.
        """
        asked = asked_for(
            self._texts,
            self._seed,
            prompts,
            step=step,
            samples_per_prompt=samples_per_prompt,
            purpose=drawing.purpose,
        )
        sampling = self._sampling(self._temperature if drawing.temperature is None else drawing.temperature)

        def label() -> int:
            return version[1] if self._switched is None or not self.takes_beside else self._switched.step

        doing = self._generate_all(asked.rows, asked.seeds, sampling, label)
        made = self._control.wait(doing, f"generate for step {step}", _GENERATE_S)
        return scored(self._texts, task, prompts, asked.prompt_ids, joined(made), step=step, version=version)

    async def _generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingParams,
        label: Callable[[], int],
    ) -> list[Made]:
        if self._lost:
            raise RunError("its weights were lost in an update")
        asked = [
            asyncio.ensure_future(self._generate_one(*one, sampling, label)) for one in zip(prompts, seeds, strict=True)
        ]
        self._asked.update(asked)
        try:
            return await asyncio.gather(*asked)
        except asyncio.CancelledError:
            if self._lost:
                raise RunError("its weights were lost in an update") from None
            raise
        finally:
            for one in asked:
                one.cancel()
            self._asked.difference_update(asked)

    async def _generate_one(
        self, prompt: Sequence[int], seed: int, sampling: SamplingParams, label: Callable[[], int]
    ) -> Made:
        sampling = sampling.clone()
        sampling.seed = seed
        while True:
            made = Made()
            async for output in self._llm.generate({"prompt_token_ids": list(prompt)}, sampling, str(next(self._ids))):
                piece = output.outputs[0]
                made.add(piece, label())
            if made.ended_by != "abort" or self._on_update != "abort":
                return made

    def _start(self, arguments: Mapping[str, Any]) -> AsyncLLM:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        unknown = arguments.keys() - AsyncEngineArgs.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"explorer.engine.{min(unknown)} is no argument of vLLM's AsyncEngineArgs")

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        said = OwnOutput()
        try:
            return asyncio.run_coroutine_threadsafe(start(), self._loop).result(_START_S)
        except Exception as error:  # of what went wrong in another process it says that it did
            why = said.last_error(but="Engine core initialization failed") or told(error)
            raise ConfigError(f"explorer=vllm cannot run model.path={arguments['model']}: {why}") from error


def _sampling(
    temperature: float, *, top_k: int, top_p: float, length: int, ends: Sequence[int], in_pieces: bool
) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=length,
        stop_token_ids=list(ends),
        ignore_eos=True,  # where the model names no other ends, vLLM takes those of its config for more of them
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if in_pieces else RequestOutputKind.FINAL_ONLY,
    )


def _set_environment(kv_cache_gb: int | None, eager: bool) -> None:
    """What vLLM reads from the environment, in this process and those that it starts."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gb or 1)
        if eager:  # each process would compile two small functions with a C++ compiler nevertheless
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Each explorer would bind its threads to the same cores, and several workers need a NUMA node each for that.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Lets the only worker live in the engine core's process; vLLM keeps them apart to bind threads.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
