"""An engine that samples and scores with a vLLM server started by the user, inside the explorer actor.

vLLM need not be installed on the explorer's node. When the server dies, or holds other weights than it was given, the
explorer ends too (`EngineDeathError`); its successor waits for the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

import numpy as np
from transformers import AutoConfig

from trinity_sync.config.model_checks import SERVERS
from trinity_sync.errors import ConfigError, RunError, in_one_line
from trinity_sync.explorer.texts import (
    Responses,
    SampleRequest,
    TextSettings,
    VLLMBase,
    VLLMResponse,
    joined,
    sample_rows,
)
from trinity_sync.host.logs import story
from trinity_sync.host.masking import EnvironmentSecret
from trinity_sync.integrations.vllm import BACKEND
from trinity_sync.integrations.vllm.server import HttpControl, Json, ServerClient, ServerRoute, lock_server
from trinity_sync.integrations.vllm.target import FileTarget, WorkerTarget
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import rounds

if TYPE_CHECKING:
    from trinity_sync.sync.base import ExplorerSide, SyncMode
    from trinity_sync.sync.weight_loader import WeightTarget

_SHARE = 0.9
"""The server's share of a caller's timeout: this explorer's own error, with the cause, then comes first."""

_READS_FILES = ("auto", "hf", "safetensors", "pt", "fastsafetensors")
"""Values of the server's ``--load-format`` that can read a version's file."""

_UNIMPORTANT = ("name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "token_id")
"""Ends of the keys of a model's config that do not change what it computes."""

_PLUG_IN = f'--weight-transfer-config \'{{"backend":"{BACKEND}"}}\''


class VLLMServerEngine(VLLMBase):
    """A causal language model of a vLLM server.

    Samples are those of `VLLMEngine`. A server started with ``--weight-transfer-config '{"backend":"trinity"}'`` takes
    versions as that engine's workers do; any other reloads them from a file.

    Args:
        model_path, settings: as for `TextEngine`. The server has the same model, with any weights; `batch_size` limits
            concurrent requests.
        key: the server's key; None: it asks for none.
        timeout_s: the caller's limit of a generation, seconds.
        start_timeout_s: the caller's limit for this engine's start, seconds; the server may come up in this time.

    Raises:
        ConfigError: as `TextEngine`; or the URL has no vLLM server, or one that does not fit, or another program gives
            it weights.
        WaitTimeout: no server came up.
    """

    def __init__(
        self,
        model_path: str,
        *,
        url: str,
        key: EnvironmentSecret | None = None,
        timeout_s: float,
        start_timeout_s: float,
        **settings: Unpack[TextSettings],
    ) -> None:
        super().__init__(model_path, **settings)
        self._shapes = self._tensor_shapes()
        self._url, self._key = url.rstrip("/"), key
        self._server = ServerClient(self._url, timeout_s * _SHARE, key)
        self._server.wait_up(start_timeout_s * _SHARE)
        self._facts = self._server.facts()
        self._check_facts(settings["dtype"])
        self._check_model()
        self._control = HttpControl(self._server)
        self._lock = lock_server(self._url)
        self._sampling = {
            "model": self._facts.model,
            "max_tokens": self._response_length,
            "top_k": self._top_k,
            "top_p": self._top_p,
            # in place of the defaults of the server and of the model's generation config
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "watermarking": False,
            "stop_token_ids": list(self._ends),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def target(self, mode: SyncMode, side: ExplorerSide, verify: str) -> WeightTarget:
        """Return the server's workers, where it has the plug-in; else files that the server reloads."""
        self._drop_target()
        self._control = HttpControl(ServerClient(self._url, side.timeout_s, self._key))
        if self._facts.backend != BACKEND:
            story.info("%s reloads versions from files", self._server.who)
            return FileTarget(self._control, tensors=self._shapes, mode=mode, side=side, verify=verify)
        self._target = WorkerTarget(
            self._control,
            workers=self._facts.workers,
            tensors=self._shapes,
            mode=mode,
            side=side,
            verify=verify,
            on_update="wait",
            start_timeout_s=side.timeout_s,
            host=ServerRoute.to(self._url).listening,
        )
        return self._target

    def close(self) -> None:
        """Disconnect from the server's workers. The server keeps its weights."""
        if self._target is not None:
            self._target.close()
        self._lock.close()

    def respond(self, request: SampleRequest) -> Responses:
        self._control.check()
        sampling = self._sampling | {"temperature": request.temperature}
        bodies = [sampling | {"prompt": row, "seed": seed} for row, seed in sample_rows(request)]
        answers = self._server.post_each(
            "/v1/completions", f"generate for step {request.step}", bodies, self._batch_size
        )
        responses = joined([self._response(answer, request.version[1]) for answer in answers])
        self._control.check()  # still the same version: none is loaded twice
        return responses

    def _response(self, answer: Json, step: int) -> VLLMResponse:
        try:
            [choice] = answer["choices"]
            tokens, ended_by = choice["token_ids"], choice["finish_reason"]
            log_probs = choice["logprobs"]["token_logprobs"]
            if len(tokens) != len(log_probs) or not np.isfinite(np.array(log_probs, np.float64)).all():
                raise ValueError("each token has a log-prob")
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self._server.who} answered without tokens and their log-probs") from error
        if ended_by == "length" and len(tokens) < self._response_length:
            raise RunError(
                f"{self._server.who} ended a response after {len(tokens)} of {self._response_length} tokens; start it "
                "with --generation-config vllm, and a --max-model-len that has room for prompt and response"
            )
        return VLLMResponse(tokens, log_probs, [(0, len(tokens), step)], ended_by)

    # -- checks of the server

    def _check_facts(self, dtype: str) -> None:
        found, kind, mode = self._facts, str(self._torch_dtype), self._log_probs_mode
        longest = self._response_length + (self._prompt_length or 1)
        if not found.version.startswith(tuple(f"{version}." for version in SERVERS)):
            raise self._wrong(f"is of vLLM {found.version}; this works with {SERVERS[0]} to {SERVERS[-1]}")
        if found.copies > 1:
            raise self._wrong(f"has {found.copies} copies of its model; start it with --data-parallel-size 1")
        if found.dtype != kind:
            raise self._wrong(
                f"holds its weights in {found.dtype}, but explorer.dtype={dtype}; start it with --dtype "
                f"{kind.removeprefix('torch.')}"
            )
        if found.log_probs_mode != mode:
            raise self._wrong(
                f"tells {found.log_probs_mode}; with explorer.temperature={self._temperature:g} start it with "
                f"--logprobs-mode {mode}"
            )
        if found.quantization is not None:
            raise self._wrong(f"holds its weights in {found.quantization}; start it without --quantization")
        if found.backend != BACKEND and found.load_format.rpartition(".")[2].lower() not in _READS_FILES:
            raise self._wrong(
                f"was started with --load-format {found.load_format}, so it cannot reload weights; start it without, "
                f"or with {_PLUG_IN}"
            )
        if found.longest < longest:
            raise self._wrong(
                f"has room for {found.longest} tokens, but task.prompt_length and task.response_length ask for "
                f"{longest}; start it with --max-model-len {longest}"
            )
        rounded = sorted(name for name, (held, _) in self._shapes.items() if rounds(held, self._dtype))
        if rounded and found.backend != BACKEND:
            raise self._wrong(
                f"may round {listed(rounded)}, which come in fp32; start it with {_PLUG_IN}, which does not round, or "
                "leave them out of sync.keep_fp32"
            )

    def _check_model(self) -> None:
        """Check that the server's model is the run's, by their configs: an update does not notice every difference."""
        root = self._facts.root
        try:
            served = AutoConfig.from_pretrained(root, trust_remote_code=self._trust_remote_code)
        except (OSError, ValueError) as error:
            reason = in_one_line(error)
            raise self._wrong(f"serves {root}, whose config cannot be read here: {reason}") from error
        ours, theirs = _important(self._config.to_dict()), _important(served.to_dict())
        missing = object()
        names = sorted(ours.keys() | theirs.keys())
        differing = [name for name in names if ours.get(name, missing) != theirs.get(name, missing)]
        if differing:
            name = "vocab_size" if "vocab_size" in differing else differing[0]
            raise self._wrong(
                f"serves {root}, which is another model than model.path={self._model_path}: they differ in "
                f"{listed(differing)} ({name} is {theirs.get(name)} there and {ours.get(name)} here)"
            )

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"explorer.url: {self._server.who} {what}")


def _important(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of a model's config, and of the configs in it, that change what it computes."""
    return {
        str(name): _important(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not str(name).endswith(_UNIMPORTANT)
    }
