"""What is reported of samples: metrics of training batches and of validations, and some samples in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from trinity_sync.errors import RunError
from trinity_sync.samples.advantages import DrawnGroups, relative_rewards
from trinity_sync.samples.batch import PairBatch, SampleBatch
from trinity_sync.samples.record import Prompt


def batch_metrics(batch: SampleBatch | PairBatch) -> dict[str, float]:
    """Measure a batch.

    Returns:
        ``batch/samples``, ``batch/tokens`` (of responses) and, of samples: ``reward/mean``, ``std``, ``min``, ``max``
        (over those with a reward, if there are any), ``reward/exact`` (if the task gives it for all judged samples),
        ``reward/NAME`` (mean of each part of a reward), ``reward/failed`` (number that could not be judged),
        ``reward/flat_groups`` (share of groups of equal rewards),
        ``response_length/mean``, ``max`` and ``truncated`` (share that did not end by itself), ``prompt_length/mean``
        and ``max`` (over prompts); lengths in tokens.
    """
    counts = {"batch/samples": float(len(batch)), "batch/tokens": float(batch.token_count)}
    if not isinstance(batch, SampleBatch) or not len(batch):
        return counts
    lengths, prompts = batch.response_lengths, batch.prompt_rows.lengths
    relative, _, group = relative_rewards(batch)
    metrics = {
        **counts,
        **_of_rewards(batch.rewards[~np.isnan(batch.rewards)]),
        "reward/failed": float(sum(map(bool, batch.errors))),
        "reward/flat_groups": float((np.bincount(group, relative != 0) == 0).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(1.0 - batch.finished.mean()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
    }
    exact = batch.exact[[not error for error in batch.errors]]
    if len(exact) and np.isfinite(exact).all():
        metrics["reward/exact"] = float(exact.mean())
    return metrics | _of_parts(batch)


def drawn_metrics(drawn: DrawnGroups) -> dict[str, float]:
    """Measure everything drawn for a step that trains on a part of it.

    Returns:
        `batch_metrics` of all samples, without their number. They replace those of the batch: rewards of groups chosen
        for their difference do not measure the policy. And ``filter_groups/drawn``, ``flat``, ``filled``, ``surplus``,
        see `DrawnGroups`.
    """
    of_all = batch_metrics(drawn.samples)
    return {
        **{name: value for name, value in of_all.items() if not name.startswith("batch/")},
        "filter_groups/drawn": float(drawn.groups),
        "filter_groups/flat": float(drawn.flat),
        "filter_groups/filled": float(drawn.filled),
        "filter_groups/surplus": float(drawn.surplus),
    }


def _of_rewards(rewards: NDArray[np.float64]) -> dict[str, float]:
    """Measure rewards that are all numbers; empty without rewards."""
    if not len(rewards):
        return {}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }


def _of_parts(batch: SampleBatch) -> dict[str, float]:
    """Measure the parts of rewards, over the samples that have them."""
    return {f"reward/{name}": float(np.nanmean(of)) for name, of in batch.parts.items() if not np.isnan(of).all()}


# Samples in full: lines of samples.jsonl, rows of a tracker's table.

Line = dict[str, object]


def excerpt(
    batch: SampleBatch,
    advantages: np.ndarray | None,
    groups: int,
    prompt: Callable[[int, int], Prompt],
    *,
    validation: bool = False,
) -> list[Line]:
    """Return all samples of a batch's first groups in full.

    Returns:
        For each sample, in the order of the batch: ``validation``; ``for_step`` (the step of its prompt), ``prompt``
        and ``sample`` (numbers), ``text`` (the prompt; of a chat its last message), ``response``, ``reward`` (None: it
        is not trained on), ``exact``, ``advantage``, ``finished``, ``tokens`` (of the response), ``version`` (of
        several, the oldest), ``version_attempt`` (which published it) and ``spans`` (``[start, end, version]`` of its
        tokens).
    """
    firsts, group = batch.groups()
    texts = cache(lambda step, number: prompt(step, number).text)
    chosen = np.isin(group, np.argsort(firsts, kind="stable")[:groups])
    lines: list[Line] = []
    for row in np.flatnonzero(chosen).tolist():
        sample = batch[row]
        lines.append(
            {
                "validation": validation,
                "for_step": sample.step,
                "prompt": sample.prompt,
                "sample": sample.sample,
                "text": texts(sample.step, sample.prompt),
                "response": sample.text,
                "reward": sample.reward,
                "exact": sample.exact,
                "advantage": None if advantages is None else float(advantages[row]),
                "finished": sample.finished,
                "tokens": len(sample.response_ids),
                "version": sample.version[1],
                "version_attempt": sample.version[0],
                "spans": [list(span) for span in sample.spans],
            }
        )
    return lines


# Validations.


@dataclass(frozen=True, kw_only=True)
class ValidationTimes:
    """The steps whose versions are validated. `interval`: steps between validations, 0 for the last step only. `last`:
    the run's last step, which is always validated. `at_start`: whether the weights at the start of the run are
    validated.
    """

    interval: int
    last: int
    at_start: bool

    def due(self, step: int) -> bool:
        return step == self.last or bool(self.interval and step % self.interval == 0)


class ValidationAnswers:
    """The scored samples of one validation.

    Args:
        step: of the version that was to make them.
        total_s: seconds that the validation took.

    Attributes:
        failure: the first error of the reward function; empty: all responses were judged.

    Raises:
        RunError: another version made some of them.
    """

    def __init__(
        self, step: int, batches: Sequence[SampleBatch], prompts: Sequence[Prompt], total_s: float = 0.0
    ) -> None:
        self.step = step
        self.total_s = total_s
        self._prompts = prompts
        self._batch = SampleBatch.concatenate(batches)
        if odd := sorted({*np.unique(self._batch.version_steps).tolist()} - {step}):
            raise RunError(f"version {odd[0]} made samples for the validation of version {step}")
        self.failure = next(filter(None, self._batch.errors), "")
        self.metrics = validation_metrics(self._batch)

    def excerpt(self, groups: int) -> list[Line]:
        """Return the samples of the first prompts; see `excerpt`."""
        return excerpt(self._batch, None, groups, lambda step, number: self._prompts[number], validation=True)


def validation_metrics(batch: SampleBatch) -> dict[str, float]:
    """Measure the samples of a validation.

    Returns:
        ``val/prompts``, ``val/samples`` and ``val/failed`` (numbers; failed samples could not be judged);
        ``val/reward/mean``, ``std``, ``min``, ``max`` of samples with a reward, if there are any; ``val/reward/NAME``;
        ``val/response_length/mean`` and ``max`` (in tokens) and ``val/truncated`` (share that did not end by itself).
        If the task tells which samples are right: ``val/exact``, their share of the judged samples, and ``val/pass@k``
        over prompts whose samples were all judged, for k = 2, 4, 8 and so on up to the samples of a prompt, and for
        that number.
    """
    lengths = batch.response_lengths
    _, group = batch.groups()
    counts = np.bincount(group)
    failed = np.array([bool(error) for error in batch.errors])
    metrics = {
        "val/prompts": float(len(counts)),
        "val/samples": float(len(batch)),
        "val/failed": float(failed.sum()),
        **{f"val/{name}": value for name, value in _of_rewards(batch.rewards[~np.isnan(batch.rewards)]).items()},
        "val/response_length/mean": float(lengths.mean()),
        "val/response_length/max": float(lengths.max()),
        "val/truncated": float(1.0 - batch.finished.mean()),
    }
    exact = batch.exact[~failed]
    if len(exact) and np.isfinite(exact).all():
        metrics["val/exact"] = float(exact.mean())
        right = np.bincount(group, batch.exact == 1.0).astype(np.int64)
        judged = np.bincount(group, failed) == 0
        made = int(counts.min())
        metrics |= {f"val/pass@{k}": pass_at(k, right[judged], made) for k in _sizes(made) if judged.any()}
    return metrics | {f"val/{name}": value for name, value in _of_parts(batch).items()}


def pass_at(k: int, right: NDArray[np.int64], made: int) -> float:
    """Estimate without bias the probability that one of k samples of a prompt is right: 1 - C(made - right, k) /
    C(made, k), the mean over prompts (Chen et al.: "Evaluating Large Language Models Trained on Code", 2021).
    """
    return float(np.mean([1.0 - comb(made - count, k) / comb(made, k) for count in right.tolist()]))


def _sizes(made: int) -> list[int]:
    """Return the k of ``pass@k``; k = 1 is ``val/exact``."""
    powers = [1 << exponent for exponent in range(1, made.bit_length()) if 1 << exponent < made]
    return [*powers, made] if made > 1 else []
