"""What vLLM made for a request, piece by piece, with the version of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trinity_sync.errors import RunError
from trinity_sync.explorer.texts import Responses
from trinity_sync.samples.batch import TokenRows
from trinity_sync.samples.spans import Span, VersionSpans

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


@dataclass
class Made:
    """A response in the making.

    Attributes:
        tokens, log_probs: of the response as far as it is there.
        spans: which version made which of the tokens.
        ended_by: vLLM's word for why it ended; None: it goes on.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ended_by: str | None = None

    def add(self, piece: CompletionOutput, step: int) -> None:
        """Add the tokens that came.

        Args:
            piece: what vLLM gave since the last time.
            step: of the version that made it.
        """
        start = len(self.tokens)
        self.tokens += piece.token_ids
        self.log_probs += [
            entry[token].logprob for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=True)
        ]
        if self.spans and self.spans[-1][2] == step:
            start = self.spans.pop()[0]
        if len(self.tokens) > start:
            self.spans.append((start, len(self.tokens), step))
        self.ended_by = piece.finish_reason


def joined(made: Sequence[Made]) -> Responses:
    """The responses, in the same order.

    Raises:
        RunError: one of them came to no end of its own.
    """
    if odd := {str(one.ended_by) for one in made} - {"stop", "length"}:
        raise RunError(f"vLLM ended requests by {', '.join(sorted(odd))}, so they are no samples")
    if not all(one.tokens for one in made):
        raise RunError("vLLM ended a request without a token, so it is no sample")
    return Responses(
        TokenRows.of([one.tokens for one in made]),
        np.array([value for one in made for value in one.log_probs], np.float32),
        np.array([one.ended_by == "stop" for one in made], np.bool_),
        VersionSpans.of([one.spans for one in made]),
    )
