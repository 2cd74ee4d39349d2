"""The seam between the algorithms and the rest. A subclass of `Algorithm` is light: the driver checks a configuration
with it, so what imports torch or verl is imported in the method that a trainer's rank calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from trinity_sync.config import Check, Get, Problem, build
from trinity_sync.config.schema import AlgorithmConfig, InRewardConfig

MISMATCH = "rollout_corr/"
"""Metrics of a loss that say how far the samplers' log-probs are from the trainer's own, under verl's prefix. They mean
the weights before the step, so without `Algorithm.recomputes` those of its first optimizer step count.
"""


REJECTED = MISMATCH + "rollout_rs_masked_fraction"
"""The metric that says which share of the tokens was left out."""


class Algorithm(ABC):
    """An algorithm as the keys of `algorithm` configure it, which are its attributes. One of your own is a dataclass
    that inherits `trinity_sync.config.schema.AlgorithmConfig`, or one of ours.

    Attributes:
        explores: explorers make its samples, in groups of `samples_per_prompt` for `prompts_per_step` prompts, whose
            advantages are made within the group, divided by its deviation with `normalise_advantages`. Otherwise its
            data are pairs of the task, `batch_size` a step.
        task_methods: what it needs of a task.
        tasks: of ours that have those.
        checks: on the configuration, beside the ranges that the schema has.
        advice: likewise, but what they find is told when a run begins, and refuses nothing.
    """

    kind: str

    explores: ClassVar[bool] = True
    task_methods: ClassVar[tuple[str, ...]] = ("prompts", "reward")
    tasks: ClassVar[str] = "task=copy_digits or task=jsonl"
    checks: ClassVar[tuple[Check, ...]] = ()
    advice: ClassVar[tuple[Check, ...]] = ()

    @classmethod
    def all_checks(cls) -> tuple[Check, ...]:
        """Its own, and those of every algorithm."""
        return (*(() if cls.explores else (_check_schedule,)), *cls.checks)

    @classmethod
    @abstractmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        """How many sequences a step has: the number, the key that it hangs on, and words for both that follow the
        key.
        """

    @property
    def recomputes(self) -> bool:
        """Whether the trainer computes the log-probs of a step's samples once more before it trains on them; its loss
        then finds them as `old_log_probs`. Otherwise those are the samplers'.
        """
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether the trainer computes the entropy of the distribution of each token, which its loss then finds."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference are computed of a step's samples, which its loss finds as
        `ref_log_prob`.
        """
        return False

    @property
    def in_reward(self) -> InRewardConfig | None:
        """What of the divergence from that reference is taken from rewards; None: nothing."""
        return None

    @property
    def reference_path(self) -> str | None:
        """Folder or hub id of that reference; None: the model that the run was given."""
        return None

    @abstractmethod
    def loss(self, strategy: str) -> Callable[..., object]:
        """The loss, as verl's `TrainingWorker.set_loss_fn` takes it; called in a rank of the trainer.

        Args:
            strategy: `backend.strategy`.
        """


def algorithm_of(node: AlgorithmConfig) -> Algorithm:
    """What the configuration's option of `algorithm` names, with its keys.

    Raises:
        ConfigError: the class cannot be used.
    """
    return build("algorithm", vars(node), Algorithm)  # type: ignore[type-abstract]


def _check_schedule(get: Get) -> Iterator[Problem]:
    if get("trainer.schedule") == "free":
        yield Problem(
            "trainer.schedule",
            f"is free, but algorithm={get('algorithm.kind')} has no explorers that could run ahead; "
            f"set trainer.schedule=lockstep",
        )
