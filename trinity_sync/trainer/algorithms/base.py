"""The base class of algorithms. The driver imports the subclasses to check a config, so only the methods that trainer
ranks call import torch or verl.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from trinity_sync.config import Check, Get, Problem, build
from trinity_sync.config.schema import AlgorithmConfig, InRewardConfig

MISMATCH = "rollout_corr/"
"""verl's prefix of metrics that compare the samplers' log-probs with the trainer's. They refer to the weights before
the step, so without `Algorithm.recomputes` only its first optimizer step counts.
"""


REJECTED = MISMATCH + "rollout_rs_masked_fraction"
"""The metric of the share of rejected tokens."""


class Algorithm(ABC):
    """An algorithm; the keys of `algorithm` are its attributes. An algorithm of your own is a dataclass that inherits
    `trinity_sync.config.schema.AlgorithmConfig`, or one of ours.

    Attributes:
        explores: explorers generate its samples, in groups of `samples_per_prompt` for `prompts_per_step` prompts;
            advantages are computed within the group, divided by its deviation with `normalise_advantages`. Otherwise
            its data are pairs of the task, `batch_size` a step.
        task_methods: methods that its task must have.
        tasks: our tasks with these methods.
        checks: checks of the configuration, in addition to the ranges of the schema.
        advice: checks whose findings are printed when a run begins, and do not refuse it.
    """

    kind: str

    explores: ClassVar[bool] = True
    task_methods: ClassVar[tuple[str, ...]] = ("prompts", "reward")
    tasks: ClassVar[str] = "task=copy_digits or task=jsonl"
    checks: ClassVar[tuple[Check, ...]] = ()
    advice: ClassVar[tuple[Check, ...]] = ()

    @classmethod
    def all_checks(cls) -> tuple[Check, ...]:
        """Return its own checks and those of every algorithm."""
        return (*(() if cls.explores else (_check_schedule,)), *cls.checks)

    @classmethod
    @abstractmethod
    def sequences(cls, get: Get) -> tuple[int, str, str]:
        """Return the number of sequences of a step, the key that determines it, and words for both that follow the
        key.
        """

    @property
    def recomputes(self) -> bool:
        """Whether the trainer recomputes the log-probs of a step's samples before training; the loss gets them as
        `old_log_probs`. Otherwise those are the samplers'.
        """
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether the trainer computes the entropy of each token's distribution, for the loss."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference are computed, which the loss gets as `ref_log_prob`."""
        return False

    @property
    def in_reward(self) -> InRewardConfig | None:
        """The share of the divergence from the reference that is subtracted from rewards; None: none."""
        return None

    @property
    def reference_path(self) -> str | None:
        """Folder or hub id of the reference; None: the run's initial model."""
        return None

    @abstractmethod
    def loss(self, strategy: str) -> Callable[..., object]:
        """Return the loss for verl's `TrainingWorker.set_loss_fn`. Called in trainer ranks.

        Args:
            strategy: `backend.strategy`.
        """


def algorithm_of(node: AlgorithmConfig) -> Algorithm:
    """Build the algorithm of a configuration. Raises ConfigError if the class cannot be used."""
    return build("algorithm", vars(node), Algorithm)  # type: ignore[type-abstract]


def _check_schedule(get: Get) -> Iterator[Problem]:
    if get("trainer.schedule") == "free":
        yield Problem(
            "trainer.schedule",
            f"is free, but algorithm={get('algorithm.kind')} has no explorers that could run ahead; "
            f"set trainer.schedule=lockstep",
        )
