"""The base of engines that generate with vLLM, in processes of their own or in a server. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import numpy as np

from trinity_sync.errors import RunError
from trinity_sync.explorer.texts import Responses, SampleRequest, TextEngine, TextSettings
from trinity_sync.models.architecture import unfilled_model
from trinity_sync.samples.batch import Span, TokenRows, VersionSpans
from trinity_sync.weights.tensors import hold_fp32, kept_by_class, saved_list, to_torch

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from trinity_sync.integrations.vllm.target import WorkerTarget
    from trinity_sync.sync.arrivals import Shapes


class VLLMBase(TextEngine):
    """A causal language model of vLLM. vLLM's own sampler draws the tokens, from seeds that follow from the run's.

    Args:
        model_path, settings: as for `TextEngine`.
        attn_implementation, adapter: of `HFEngine`; not used.
    """

    def __init__(
        self,
        model_path: str,
        *,
        attn_implementation: str = "",
        adapter: object = None,
        **settings: Unpack[TextSettings],
    ) -> None:
        super().__init__(model_path, **settings)
        self._torch_dtype = to_torch(self._dtype)
        # in which vLLM gives log-probs of the softmax over all tokens at the temperature
        self._log_probs_mode = "raw_logprobs" if self._temperature in (0.0, 1.0) else "processed_logprobs"
        self._target: WorkerTarget | None = None

    def _tensor_shapes(self) -> Shapes:
        """Return dtype and shape of the tensors of a version."""
        model = unfilled_model(
            self._config,
            self._torch_dtype,
            "meta",
            attn_implementation="eager",
            trust_remote_code=self._trust_remote_code,
        )
        hold_fp32(model, kept_by_class(model, self._dtype) if self._keep_fp32 is None else self._keep_fp32)
        return {name: (saved.dtype, saved.shape) for name, saved in saved_list(model).items()}


def sample_rows(request: SampleRequest) -> list[tuple[list[int], int]]:
    """Return the prompt's tokens and the seed, at least 0 and below 2**63, of each sample."""
    rows = [request.prompt_ids[row] for row in request.prompt_of]
    return [(row, key & (2**63 - 1)) for row, key in zip(rows, request.keys.tolist(), strict=True)]


@dataclass
class VLLMResponse:
    """One response, complete or not.

    Attributes:
        spans: the versions that made the tokens.
        finish_reason: vLLM's word for why it ended; None: it goes on.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: CompletionOutput, step: int) -> None:
        """Append the tokens of vLLM's latest output, made by the version of a step."""
        start = len(self.tokens)
        self.tokens += piece.token_ids
        self.log_probs += [
            entry[token].logprob for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=True)
        ]
        if self.spans and self.spans[-1][2] == step:
            start = self.spans.pop()[0]
        if len(self.tokens) > start:
            self.spans.append((start, len(self.tokens), step))
        self.finish_reason = piece.finish_reason


def joined(responses: Sequence[VLLMResponse]) -> Responses:
    """Return the responses as arrays, in the same order."""
    if odd := {str(one.finish_reason) for one in responses} - {"stop", "length"}:
        raise RunError(f"vLLM ended requests by {', '.join(sorted(odd))}, so they are not samples")
    if not all(one.tokens for one in responses):
        raise RunError("vLLM ended a request without a token, so it is not a sample")
    return Responses(
        TokenRows.of([one.tokens for one in responses]),
        np.array([value for one in responses for value in one.log_probs], np.float32),
        np.array([one.finish_reason == "stop" for one in responses], np.bool_),
        VersionSpans.of([one.spans for one in responses]),
    )
