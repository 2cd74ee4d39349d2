"""Group-relative advantages: each sample judged against the others of its prompt. Called by the driver once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import RunError
from trinity_sync.samples.batch import SampleBatch

Judge = Callable[[SampleBatch], NDArray[np.float64]]
"""Makes the advantages of a batch, one per sample: `group_advantages` with the settings of a run."""

#: Added to the standard deviation, which may be almost nothing.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What is taken from the rewards of long responses (Yu et al., "DAPO", 2025), as verl's reward manager of that name
    does it: nothing up to `longest - buffer` tokens, from there evenly more, and `penalty` at `longest`.

    Attributes:
        longest: tokens of the longest response.
        buffer: tokens over which the penalty grows, at least 1.
        penalty: of a response of `longest` tokens.
    """

    longest: int
    buffer: int
    penalty: float

    def penalties(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what is taken from the rewards of responses of so many tokens."""
        beyond = np.maximum(lengths - (self.longest - self.buffer), 0)
        return np.asarray(beyond / self.buffer * self.penalty, np.float64)


def group_advantages(
    batch: SampleBatch, normalise: bool = True, overlong: Overlong | None = None
) -> NDArray[np.float64]:
    """Compute GRPO's advantages (Shao et al., "DeepSeekMath", 2024): ``(r - mean) / (std + 1e-4)`` within each group.

    A group is what has step and prompt in common, in whatever order the batch has it. The standard deviation is the
    unbiased one, as `torch.std` and verl have it. A group whose rewards are all equal gets exactly 0, and so does a
    group of one. A sample without a reward gets exactly 0, and the others of its group what they would get without it.

    Args:
        batch: samples with rewards that are finite, or NaN where there is none.
        normalise: divide by the standard deviation; False gives ``r - mean`` (Liu et al., "Dr. GRPO", 2025).
        overlong: rewards bear this penalty; None: none. The rewards of the batch stay as they are.

    Returns:
        float64 of shape (samples,), in the order of the batch.
    """
    if overlong is not None:
        batch = replace(batch, rewards=batch.rewards - overlong.penalties(batch.response_lengths))
    relative, judged, group = relative_rewards(batch)
    size = np.bincount(group, judged)
    deviation = np.where(judged, relative - (np.bincount(group, relative) / np.maximum(size, 1))[group], 0.0)
    if not normalise:
        return deviation
    variance = np.bincount(group, deviation**2) / np.maximum(size - 1, 1)
    scaled: NDArray[np.float64] = deviation / (np.sqrt(variance) + _EPSILON)[group]
    return scaled


def relative_rewards(batch: SampleBatch) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Measure rewards from that of one member of the group: so equal rewards are exact zeros, whatever sums round to.

    Returns:
        For each sample the reward from there on (0 where it has none), whether it has one, and the number of its group.
    """
    _, group = batch.groups()
    judged = ~np.isnan(batch.rewards)
    reference = np.zeros(int(group.max(initial=-1)) + 1)
    reference[group[judged][::-1]] = batch.rewards[judged][::-1]  # of several the last one stays, which is the first
    return np.where(judged, batch.rewards - reference[group], 0.0), judged, group


# DAPO's dynamic sampling (Yu et al., "DAPO", 2025): groups whose samples are all worth the same teach nothing, so
# they are left out of the batch, and further prompts are answered until the step has enough others. Called by the
# driver.


KEYS = "algorithm.filter_groups"


@dataclass(frozen=True)
class Drawn:
    """All that was drawn for a step, where only some of it is trained on.

    Attributes:
        samples: of all groups, those of the batch included.
        groups: how many groups these are.
        flat: how many of them have no difference.
        filled: how many of these are in the batch after all.
        surplus: how many that have a difference are not in the batch.
    """

    samples: SampleBatch
    groups: int
    flat: int
    filled: int
    surplus: int


@dataclass(frozen=True)
class Chosen:
    """What becomes of the groups that were drawn for a step.

    Attributes:
        batch: what is trained on.
        drawn: all of it.
        used: how many of the step's prompts are done with; those after them are to be answered again, by the next step.
    """

    batch: SampleBatch
    drawn: Drawn
    used: int


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Which groups are left out.

    Attributes:
        wanted: groups that a step trains on.
        metric: what has to differ within a group, by verl's names: ``reward`` (the task's, less the penalty on long
            responses), ``score`` (the task's alone), ``acc`` (whether a response is right).
        batches: how many times `wanted` prompts are answered for a step, at most.
        fill: whether a step without enough groups takes others; else it ends the run.
        overlong: the penalty on long responses; None: there is none.
    """

    wanted: int
    metric: str
    batches: int
    fill: bool
    overlong: Overlong | None = None

    @property
    def most(self) -> int:
        """Prompts that are answered for a step, at most."""
        return self.wanted * self.batches

    def differing(self, batch: SampleBatch) -> NDArray[np.bool_]:
        """Tell of each group whether its samples differ, those left out that could not be judged.

        Args:
            batch: whole groups.

        Returns:
            One entry per group, in the order of `SampleBatch.groups`.

        Raises:
            RunError: the task does not say what `metric` is.
        """
        relative, _, group = relative_rewards(replace(batch, rewards=self._values(batch)))
        return np.asarray(np.bincount(group, relative != 0) > 0)

    def _values(self, batch: SampleBatch) -> NDArray[np.float64]:
        if self.metric == "acc":
            judged = np.array([not error for error in batch.errors], np.bool_)
            if np.isnan(batch.exact[judged]).any():
                raise RunError(
                    f"{KEYS}.metric is acc, but the task does not say whether a response is right; set it to reward, "
                    "or have the task say so (exact)"
                )
            return np.where(judged, batch.exact, np.nan)
        if self.metric == "reward" and self.overlong is not None:
            return batch.rewards - self.overlong.penalties(batch.response_lengths)
        return batch.rewards

    def choose(self, step: int, drawn: SampleBatch) -> Chosen | None:
        """Choose the groups of a step: the first that differ, in the order of their prompts.

        Args:
            step: the step.
            drawn: whole groups, sorted, of the step's first prompts.

        Returns:
            None: too few differ, and more may be drawn.

        Raises:
            RunError: as `check_filled`.
        """
        _, group = drawn.groups()
        differs = self.differing(drawn)
        taken = np.flatnonzero(differs)[: self.wanted]
        missing = self.wanted - len(taken)
        if missing and len(differs) < self.most:
            return None
        self.check_filled(step, missing, len(differs))
        chosen = np.concatenate([taken, np.flatnonzero(~differs)[:missing]])
        found = int(differs.sum())
        return Chosen(
            drawn.take(np.flatnonzero(np.isin(group, chosen))),
            Drawn(drawn, len(differs), len(differs) - found, missing, found - len(taken)),
            len(differs) if missing else int(taken[-1]) + 1,
        )

    def check_filled(self, step: int, missing: int, made: int) -> None:
        """Check that a step may take groups that do not differ, where it needs some.

        Raises:
            RunError: it may not.
        """
        if missing and not self.fill:
            raise RunError(
                f"of the {made} prompts that were answered for step {step}, {self.wanted - missing} have samples whose "
                f"{self.metric} differs, and a step needs {self.wanted}: the prompts are too hard or too easy. Raise "
                f"{KEYS}.max_num_gen_batches ({self.batches}), or set {KEYS}.on_shortage=fill to train on groups "
                "without a difference where there are no others"
            )
