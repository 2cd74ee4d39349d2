"""A prompt, and what became of one sample of it. The forms in which tasks, tests and reports see single items.

Explorers and trainer pass whole batches: `trinity_sync.samples.batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Message = Mapping[str, str]
"""One turn of a chat: ``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a trainer step.

    Attributes:
        index: its number within the step, from 0. With seed, step and sample it determines the random numbers.
        text: what the model is asked; of a chat, the content of the last message.
        messages: the whole chat, to be rendered by the tokenizer's chat template; None where `text` is the prompt.
        answer: what the reward goes by, or None.
        fields: further columns of a data file, for rewards that want them.
    """

    index: int
    text: str
    messages: tuple[Message, ...] | None = None
    answer: object = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt, with its reward and the version that made it.

    Attributes:
        step: the trainer step it was made for.
        prompt: number of the prompt within the step.
        sample: number of the sample within the prompt's group.
        prompt_ids: tokens of the prompt.
        response_ids: tokens of the response, the end-of-sequence token included where it was reached.
        log_probs: natural log-probability of each response token under the sampler's temperature, before truncation.
        version: (attempt, step) of the weights; of several, the oldest.
        reward: what the task gave; None where the response is left out of training, since it could not be judged.
        exact: 1.0 for a right answer, 0.0 for a wrong one, None where the task does not say.
        text: the response as the reward saw it.
        finished: whether the end-of-sequence token was reached.
        spans: ``[start, end, step of the version]`` of stretches of the response's tokens; empty: `version` made all.
        error: why the response could not be judged; empty: it was.
    """

    step: int
    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: tuple[int, int]
    reward: float | None
    exact: float | None
    text: str
    finished: bool
    spans: tuple[tuple[int, int, int], ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", ((0, len(self.response_ids), self.version[1]),))

    @property
    def order(self) -> tuple[int, int, int]:
        """Samples are trained on in the order of these: step, prompt, sample."""
        return self.step, self.prompt, self.sample
