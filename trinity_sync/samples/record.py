"""A single prompt and a single sample, for tasks, tests and reports, and how samples are drawn.

Explorers and trainer exchange whole batches: `trinity_sync.samples.batch`. Reward processes import this module: numpy
would start threads in them before the user's code can set their number.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Message = Mapping[str, str]
"""One turn of a chat: ``{"role": "user", "content": "..."}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a trainer step.

    Attributes:
        index: its number within the step, from 0. With seed, step and sample it determines the random numbers.
        text: the prompt; of a chat, the content of the last message.
        messages: the whole chat, for the tokenizer's chat template; None: `text` is the prompt.
        answer: the right answer, for the reward, or None.
        fields: further columns of a data file, for the reward.
    """

    index: int
    text: str
    messages: tuple[Message, ...] | None = None
    answer: object = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt, with its reward and the version that made it."""

    step: int  # the trainer step it was made for
    prompt: int  # number of the prompt within the step
    sample: int  # number of the sample within the prompt's group
    prompt_ids: tuple[int, ...]  # tokens of the prompt
    response_ids: tuple[int, ...]  # tokens of the response, the end-of-sequence token included where it was reached
    # Natural log-probability of each response token at the sampler's temperature, before truncation.
    log_probs: tuple[float, ...]
    version: tuple[int, int]  # (attempt, step) of the weights; of several, the oldest
    reward: float | None  # None: the response could not be judged and is not trained on
    exact: float | None  # 1.0 for a right answer, 0.0 for a wrong one, None if the task does not tell
    text: str  # the response, as given to the reward
    finished: bool  # whether the end-of-sequence token was reached
    # ``[start, end, step of the version]`` of the response's tokens; empty: `version` made all.
    spans: tuple[tuple[int, int, int], ...] = ()
    error: str = ""  # why the response could not be judged; empty: it was judged

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", ((0, len(self.response_ids), self.version[1]),))

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the order of training."""
        return self.step, self.prompt, self.sample


# How samples are drawn.


class Purpose(enum.IntEnum):
    """Separates the random numbers of one seed by their use."""

    SAMPLING = 0
    PROMPTS = 1
    ORDER = 2
    VALIDATION = 3
    VALIDATION_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of one request for samples. `purpose`: separates the random numbers of training and validation.
    `temperature`: None: `explorer.temperature`.
    """

    purpose: Purpose = Purpose.SAMPLING
    temperature: float | None = None


FOR_TRAINING = Drawing()
"""By the keys of `explorer`."""
