"""Generates and scores samples with a vLLM server that somebody runs. The engine inside the explorer actor.

vLLM need not be installed where the explorer is. A server that dies, or that turns out to hold other weights than it
was given, takes the explorer with it (`EngineDied`); one that is started in its place waits for the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoConfig

from trinity_sync.config import dtype_name
from trinity_sync.config.model_checks import TESTED
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.explorer.policy import Made, asked_for, joined, log_probs_mode, shapes_of
from trinity_sync.explorer.texts import Texts, scored
from trinity_sync.host.logs import story
from trinity_sync.integrations.vllm import BACKEND
from trinity_sync.integrations.vllm.file_target import FileTarget
from trinity_sync.integrations.vllm.server import HttpControl, Json, Server, lock_server
from trinity_sync.integrations.vllm.target import WorkerTarget
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt
from trinity_sync.tasks.base import Task
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import rounds, to_torch

if TYPE_CHECKING:
    from trinity_sync.sync.base import ExplorerSide, SyncMode
    from trinity_sync.sync.weight_loader import WeightTarget

_SHARE = 0.9
"""Of a limit that somebody waits for this explorer: what this explorer waits for its server. It can say more of why."""

_READS_FILES = ("auto", "hf", "safetensors", "pt", "fastsafetensors")
"""Ways of a server to load, of those that can read a version's file."""

_UNIMPORTANT = ("name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "token_id")
"""Ends of keys of a model's config that change nothing of what it computes."""


class VLLMServerEngine(RolloutEngine):
    """A causal language model of a vLLM server that samples and scores.

    Samples are those of `VLLMEngine`. A server that was started with ``--weight-transfer-config
    '{"backend":"trinity"}'`` takes versions as that engine's workers do; any other one reloads them from a file.

    Args:
        model_path: folder in Hugging Face format, or hub id; the server serves the same model, with any weights.
        url: of the server.
        dtype: dtype in which the server holds the weights: ``bf16``, ``fp32`` or ``fp16``.
        temperature, top_k, top_p: as for `HFEngine`.
        batch_size: requests that are under way at a time, at most.
        response_length: longest response in tokens.
        prompt_length: longest prompt in tokens; None: as long as the model's positions, and the server, allow.
        truncate_prompts: cut longer ones on their left, rather than refuse them.
        chat_template: arguments of the tokenizer's chat template.
        seed: the run's seed.
        trust_remote_code: whether code that comes with the model may run.
        keep_fp32: as for `HFEngine`.
        timeout_s: how long somebody waits for samples, seconds.
        start_timeout_s: how long somebody waits for this engine, seconds; the server may come up meanwhile.
        settings: of other engines; not used.

    Raises:
        ConfigError: what is at the URL is no vLLM server, or not one that can do this; or another program gives it
            weights.
        WaitTimeout: no server came up.
    """

    def __init__(
        self,
        model_path: str,
        *,
        url: str,
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
        timeout_s: float,
        start_timeout_s: float,
        **settings: object,
    ) -> None:
        self._seed = seed
        self._batch_size = batch_size
        self._response_length = response_length
        self._texts = Texts(
            model_path,
            response_length=response_length,
            prompt_length=prompt_length,
            trust_remote_code=trust_remote_code,
            truncate_prompts=truncate_prompts,
            chat_template=chat_template,
        )
        self._shapes = shapes_of(self._texts.config, dtype, keep_fp32, trust_remote_code=trust_remote_code)
        self._url = url.rstrip("/")
        self._server = Server(self._url, timeout_s * _SHARE)
        self._server.wait_up(start_timeout_s * _SHARE)
        self._facts = self._server.facts()
        self._check_facts(dtype, temperature, response_length + (prompt_length or 1))
        self._check_model(model_path, trust_remote_code)
        self._control = HttpControl(self._server)
        self._target: WorkerTarget | None = None
        self._lock = lock_server(self._url)
        self._sampling = {
            "model": self._facts.model,
            "max_tokens": response_length,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            # whatever the model's generation config, or the server, says of these
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "watermarking": False,
            "stop_token_ids": list(self._texts.ends),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """The server's workers, which receive by themselves, where they can; else files that the server reloads."""
        self._control = HttpControl(Server(self._url, side.timeout_s))
        if self._facts.backend != BACKEND:
            story.info("%s reloads versions from files", self._server.who)
            return FileTarget(self._control, tensors=self._shapes, mode=mode, side=side, verify=verify)
        self._target = WorkerTarget(
            self._control,
            workers=self._facts.workers,
            tensors=self._shapes,
            side=side,
            verify=verify,
            on_update="wait",
            start_timeout_s=side.timeout_s,
        )
        return self._target

    def close(self) -> None:
        """Let the server's workers go. The server goes on with the weights that it has."""
        if self._target is not None:
            self._target.close()
        self._lock.close()

    def after_load(self) -> None:
        """Nothing is left to do: pausing has dropped all keys, values and prefixes of the weights before."""

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
        """Make scored samples for the prompts; see `RolloutEngine.generate`."""
        asked = asked_for(
            self._texts,
            self._seed,
            prompts,
            step=step,
            samples_per_prompt=samples_per_prompt,
            purpose=drawing.purpose,
        )
        self._control.check()
        sampling = dict(self._sampling)
        if drawing.temperature is not None:
            sampling["temperature"] = drawing.temperature
        bodies = [sampling | {"prompt": row, "seed": seed} for row, seed in zip(asked.rows, asked.seeds, strict=True)]
        made = self._server.post_each("/v1/completions", f"generate for step {step}", bodies, self._batch_size)
        responses = joined([self._made(one, version[1]) for one in made])
        self._control.check()  # it held the version all the while: nobody gives it the same one twice
        return scored(self._texts, task, prompts, asked.prompt_ids, responses, step=step, version=version)

    def _made(self, answer: Json, step: int) -> Made:
        try:
            [made] = answer["choices"]
            tokens, ended_by = made["token_ids"], made["finish_reason"]
            log_probs = made["logprobs"]["token_logprobs"]
            if len(tokens) != len(log_probs) or not np.isfinite(np.array(log_probs, np.float64)).all():
                raise ValueError("each token has a log-prob")
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self._server.who} answered without tokens and their log-probs") from error
        if ended_by == "length" and len(tokens) < self._response_length:
            raise RunError(
                f"{self._server.who} ended a response after {len(tokens)} of {self._response_length} tokens; start it "
                "with --generation-config vllm, and a --max-model-len that has room for prompt and response"
            )
        return Made(tokens, log_probs, [(0, len(tokens), step)], ended_by)

    # -- what the server has to be

    def _check_facts(self, dtype: str, temperature: float, longest: int) -> None:
        found = self._facts
        kind, mode = to_torch(dtype_name(dtype)), log_probs_mode(temperature)
        if not found.version.startswith(f"{TESTED}."):
            raise self._wrong(f"is of vLLM {found.version}; this works with {TESTED}")
        if found.copies > 1:
            raise self._wrong(f"has {found.copies} copies of its model; start it with --data-parallel-size 1")
        if found.dtype != str(kind):
            raise self._wrong(
                f"holds its weights in {found.dtype}, but explorer.dtype={dtype}; start it with --dtype "
                f"{str(kind).removeprefix('torch.')}"
            )
        if found.log_probs_mode != mode:
            raise self._wrong(
                f"tells {found.log_probs_mode}; with explorer.temperature={temperature:g} start it with "
                f"--logprobs-mode {mode}"
            )
        if found.quantization is not None:
            raise self._wrong(f"holds its weights in {found.quantization}; start it without --quantization")
        if found.backend != BACKEND and found.load_format.rpartition(".")[2].lower() not in _READS_FILES:
            raise self._wrong(
                f"was started with --load-format {found.load_format}, so it cannot reload weights; start it without, "
                f'or with --weight-transfer-config \'{{"backend":"{BACKEND}"}}\''
            )
        if found.longest < longest:
            raise self._wrong(
                f"has room for {found.longest} tokens, but task.prompt_length and task.response_length ask for "
                f"{longest}; start it with --max-model-len {longest}"
            )
        rounded = sorted(name for name, (held, _) in self._shapes.items() if rounds(held, dtype_name(dtype)))
        if rounded and found.backend != BACKEND:
            raise self._wrong(
                f"may round {listed(rounded)}, which come in fp32; start it with --weight-transfer-config "
                f'\'{{"backend":"{BACKEND}"}}\', which sees to that, or leave them out of sync.keep_fp32'
            )

    def _check_model(self, model_path: str, trust_remote_code: bool) -> None:
        """See whether the server's model is the run's, by their configs: an update would not find out of all that they
        may differ in.
        """
        root = self._facts.root
        try:
            served = AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise self._wrong(f"serves {root}, whose config cannot be read here: {reason}") from error
        ours, theirs = _important(self._texts.config.to_dict()), _important(served.to_dict())
        missing = object()
        names = sorted(ours.keys() | theirs.keys())
        differing = [name for name in names if ours.get(name, missing) != theirs.get(name, missing)]
        if differing:
            name = "vocab_size" if "vocab_size" in differing else differing[0]
            raise self._wrong(
                f"serves {root}, which is another model than model.path={model_path}: they differ in "
                f"{listed(differing)} ({name} is {theirs.get(name)} there and {ours.get(name)} here)"
            )

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"explorer.url: {self._server.who} {what}")


def _important(config: Mapping[Any, object]) -> dict[Any, object]:
    """What of a model's config, and of the configs in it, says what is computed."""
    return {
        name: _important(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not str(name).endswith(_UNIMPORTANT)
    }
