"""Many samples or pairs as a few numpy arrays, for the way from explorers to trainer ranks through Ray.

Pickling 512 `Sample` objects costs milliseconds and tens of kilobytes of overhead. Ray passes columns without a copy,
read-only. The accessors per sequence return copies, which may be written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trinity_sync.samples.record import Sample


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token sequences of different lengths, end to end. `ids`: int32, all tokens. `offsets`: int64 of shape (rows +
    1,); row i is ``ids[offsets[i]:offsets[i + 1]]``.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Build from one sequence of token ids per row."""
        return cls.joined([token for row in rows for token in row], [len(row) for row in rows])

    @classmethod
    def joined(
        cls, ids: Sequence[int] | NDArray[np.integer], lengths: Sequence[int] | NDArray[np.integer]
    ) -> TokenRows:
        """Build from all tokens end to end and the length of each row."""
        return cls(np.asarray(ids, np.int32), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def row(self, index: int) -> NDArray[np.int64]:
        """Return a copy of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def positions(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the positions of the rows' tokens in `ids`, row after row."""
        return positions(self.offsets, rows)

    def take(self, rows: NDArray[np.integer]) -> TokenRows:
        """Return these rows, in this order."""
        return TokenRows.joined(self.ids[self.positions(rows)], self.lengths[rows])

    @staticmethod
    def concatenate(parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts, one part after the other."""
        return TokenRows.joined(
            np.concatenate([part.ids for part in parts]), np.concatenate([part.lengths for part in parts])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Samples by column; all arrays have one entry per sample unless said otherwise.

    Samples of one prompt share a row of `prompt_rows`, so a long prompt is sent once.

    Attributes:
        steps, prompts, samples: int64; the trainer step, the prompt's number within it, the sample's within its group.
        version_attempts: int64; the attempt of the versions that made the sample.
        explorers: text; the name of the explorer that made the sample, empty where that is not known.
        rewards: float64; NaN where a response is left out of training, since it could not be judged.
        exact: float64; NaN where the task does not say.
        parts: float64 by name, the values that rewards are made of; NaN where a response could not be judged.
        errors: why a response could not be judged; empty where it was.
        finished: bool; the end-of-sequence token was reached.
        texts: the responses, as given to the reward.
        prompt_of: int64; the sample's row in `prompt_rows`.
        prompt_rows: tokens of the prompts; has as many rows as there are distinct prompts.
        responses: tokens of the responses, one row per sample, the end-of-sequence token included.
        spans: the versions of these tokens.
        log_probs: float32, one entry per token of `responses`, in the same order.
    """

    steps: NDArray[np.int64]
    prompts: NDArray[np.int64]
    samples: NDArray[np.int64]
    version_attempts: NDArray[np.int64]
    explorers: NDArray[np.str_]
    rewards: NDArray[np.float64]
    exact: NDArray[np.float64]
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    errors: tuple[str, ...]
    finished: NDArray[np.bool_]
    texts: tuple[str, ...]
    prompt_of: NDArray[np.int64]
    prompt_rows: TokenRows
    responses: TokenRows
    spans: VersionSpans
    log_probs: NDArray[np.float32]

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> SampleBatch:
        """Build from single samples, in their order."""
        items = list(samples)
        rows: dict[tuple[int, int, tuple[int, ...]], int] = {}
        prompt_of = [rows.setdefault((item.step, item.prompt, item.prompt_ids), len(rows)) for item in items]
        return cls(
            steps=np.array([item.step for item in items], np.int64),
            prompts=np.array([item.prompt for item in items], np.int64),
            samples=np.array([item.sample for item in items], np.int64),
            version_attempts=np.array([item.version[0] for item in items], np.int64),
            explorers=np.full(len(items), ""),
            rewards=np.array([np.nan if item.reward is None else item.reward for item in items], np.float64),
            exact=np.array([np.nan if item.exact is None else item.exact for item in items], np.float64),
            errors=tuple(item.error for item in items),
            finished=np.array([item.finished for item in items], np.bool_),
            texts=tuple(item.text for item in items),
            prompt_of=np.array(prompt_of, np.int64),
            prompt_rows=TokenRows.of([ids for _, _, ids in rows]),
            responses=TokenRows.of([item.response_ids for item in items]),
            spans=VersionSpans.of([item.spans for item in items]),
            log_probs=np.array([value for item in items for value in item.log_probs], np.float32),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SampleBatch]) -> SampleBatch:
        """Return the samples of all parts, one part after the other. Without parts: a batch without samples."""
        if not parts:
            return cls.of([])
        names = dict.fromkeys(name for part in parts for name in part.parts)
        firsts = np.cumsum([0, *(len(part.prompt_rows) for part in parts)])
        shifted = [part.prompt_of + first for part, first in zip(parts, firsts[:-1], strict=True)]
        return cls(
            steps=np.concatenate([part.steps for part in parts]),
            prompts=np.concatenate([part.prompts for part in parts]),
            samples=np.concatenate([part.samples for part in parts]),
            version_attempts=np.concatenate([part.version_attempts for part in parts]),
            explorers=np.concatenate([part.explorers for part in parts]),
            rewards=np.concatenate([part.rewards for part in parts]),
            exact=np.concatenate([part.exact for part in parts]),
            parts={name: np.concatenate([part.part(name) for part in parts]) for name in names},
            errors=tuple(error for part in parts for error in part.errors),
            finished=np.concatenate([part.finished for part in parts]),
            texts=tuple(text for part in parts for text in part.texts),
            prompt_of=np.concatenate(shifted),
            prompt_rows=TokenRows.concatenate([part.prompt_rows for part in parts]),
            responses=TokenRows.concatenate([part.responses for part in parts]),
            spans=VersionSpans.concatenate([part.spans for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
        )

    def sorted(self) -> SampleBatch:
        """Return the samples by step, then prompt, then sample: the order of training."""
        return self.take(np.lexsort((self.samples, self.prompts, self.steps)))

    def take(self, rows: NDArray[np.integer]) -> SampleBatch:
        """Return these samples, in this order, with their prompts."""
        kept, prompt_of = np.unique(self.prompt_of[rows], return_inverse=True)
        return SampleBatch(
            steps=self.steps[rows],
            prompts=self.prompts[rows],
            samples=self.samples[rows],
            version_attempts=self.version_attempts[rows],
            explorers=self.explorers[rows],
            rewards=self.rewards[rows],
            exact=self.exact[rows],
            parts={name: values[rows] for name, values in self.parts.items()},
            errors=tuple(self.errors[row] for row in rows),
            finished=self.finished[rows],
            texts=tuple(self.texts[row] for row in rows),
            prompt_of=prompt_of,
            prompt_rows=self.prompt_rows.take(kept),
            responses=self.responses.take(rows),
            spans=self.spans.take(rows),
            log_probs=self.log_probs[self.responses.positions(rows)],
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        reward, exact = float(self.rewards[index]), float(self.exact[index])
        spans = self.spans.of_sample(index)
        return Sample(
            step=int(self.steps[index]),
            prompt=int(self.prompts[index]),
            sample=int(self.samples[index]),
            prompt_ids=tuple(self.prompt_ids(index).tolist()),
            response_ids=tuple(self.response_ids(index).tolist()),
            log_probs=tuple(self.log_probs_of(index).tolist()),
            version=(int(self.version_attempts[index]), min(step for _, _, step in spans)),
            spans=spans,
            reward=None if np.isnan(reward) else reward,
            exact=None if np.isnan(exact) else exact,
            error=self.errors[index],
            text=self.texts[index],
            finished=bool(self.finished[index]),
        )

    def part(self, name: str) -> NDArray[np.float64]:
        """Return a part of the rewards; NaN where they do not have it."""
        return self.parts.get(name, np.full(len(self), np.nan))

    @property
    def version_steps(self) -> NDArray[np.int64]:
        """The step of the version that made each sample; of several, the oldest."""
        return self.spans.oldest

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Tokens of each response."""
        return self.responses.lengths

    @property
    def token_count(self) -> int:
        """Tokens of all responses."""
        return len(self.responses.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, prompt and response together."""
        return self.prompt_rows.lengths[self.prompt_of] + self.responses.lengths

    def groups(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Group the samples by step and prompt. Returns the first sample of each group, in the order of step and
        prompt, and each sample's group in that order.
        """
        pairs = np.stack([self.steps, self.prompts], axis=1)
        _, firsts, group = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        return firsts, group.reshape(-1)

    def prompt_ids(self, index: int) -> NDArray[np.int64]:
        """Return a copy of the prompt's tokens."""
        return self.prompt_rows.row(int(self.prompt_of[index]))

    def response_ids(self, index: int) -> NDArray[np.int64]:
        """Return a copy of the response's tokens."""
        return self.responses.row(index)

    def log_probs_of(self, index: int) -> NDArray[np.float32]:
        """Return a copy of the log-probabilities of the response's tokens."""
        start, stop = self.responses.offsets[index : index + 2]
        return self.log_probs[start:stop].copy()


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Prompts and responses of supervised training, by column. `prompt_rows`, `responses`: tokens, one row per pair.
    `learnt`: bool, marks the tokens of `responses` that count.
    """

    prompt_rows: TokenRows
    responses: TokenRows
    learnt: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        learnt: Sequence[Sequence[bool]] | None = None,
    ) -> PairBatch:
        """Build from one sequence of token ids per prompt and per response."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts do not pair with {len(responses)} responses")
        marks = [[True] * len(response) for response in responses] if learnt is None else learnt
        if [len(row) for row in marks] != [len(row) for row in responses]:
            raise ValueError("there is not one mark for each token of a response")
        whole = np.array([mark for row in marks for mark in row], np.bool_)
        return cls(TokenRows.of(prompts), TokenRows.of(responses), whole)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def token_count(self) -> int:
        """Tokens that count."""
        return int(self.learnt.sum())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each pair, prompt and response together."""
        return self.prompt_rows.lengths + self.responses.lengths

    def prompt_ids(self, index: int) -> NDArray[np.int64]:
        """Return a copy of the prompt's tokens."""
        return self.prompt_rows.row(index)

    def response_ids(self, index: int) -> NDArray[np.int64]:
        """Return a copy of the response's tokens."""
        return self.responses.row(index)

    def learnt_of(self, index: int) -> NDArray[np.bool_]:
        """Return a copy of the marks of the response's tokens."""
        return self.learnt[self.responses.offsets[index] : self.responses.offsets[index + 1]].copy()


# The prompts of each replica: a fixed rule, so that a repeated run makes the same calls.


def assign(n_prompts: int, replicas: int) -> list[range]:
    """Divide prompt numbers into contiguous blocks, one per replica; sizes differ by at most one, larger ones first."""
    if n_prompts < 0 or replicas < 1:
        raise ValueError(f"{n_prompts} prompts cannot be assigned to {replicas} replicas")
    size, larger = divmod(n_prompts, replicas)
    starts = [replica * size + min(replica, larger) for replica in range(replicas + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


# The versions of tokens, for engines that load while they generate.


Span = tuple[int, int, int]
"""``[start, end, version]``: the tokens of a response from start up to, not including, end; step of their version."""


@dataclass(frozen=True, slots=True)
class VersionSpans:
    """The spans of many samples, those of one sample end to end; at least one each. `rows`: int64 of shape (spans, 3),
    see `Span`. `offsets`: int64 of shape (samples + 1,); sample i has ``rows[offsets[i]:offsets[i + 1]]``.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]]) -> VersionSpans:
        """Build from the spans of each sample."""
        rows = np.array([span for sample in spans for span in sample], np.int64).reshape(-1, 3)
        return cls(rows, offsets_of([len(sample) for sample in spans]))

    @classmethod
    def whole(cls, lengths: NDArray[np.integer], step: int) -> VersionSpans:
        """Build for samples of a single version."""
        rows = np.stack([np.zeros_like(lengths), lengths, np.full_like(lengths, step)], axis=1).astype(np.int64)
        return cls(rows, np.arange(len(lengths) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def oldest(self) -> NDArray[np.int64]:
        """The step of the oldest version of each sample, which determines its staleness."""
        if not len(self):
            return np.zeros(0, np.int64)
        oldest: NDArray[np.int64] = np.minimum.reduceat(self.rows[:, 2], self.offsets[:-1])
        return oldest

    @property
    def mixed(self) -> NDArray[np.bool_]:
        """Whether each sample has more than one version."""
        return np.diff(self.offsets) > 1

    def of_sample(self, index: int) -> tuple[Span, ...]:
        """Return the spans of one sample."""
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]].tolist()
        return tuple((start, end, step) for start, end, step in rows)

    def staleness(self, index: int, step: int) -> NDArray[np.int64]:
        """Return the staleness of each token of a sample at the update of `step`, in steps."""
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]]
        return np.repeat(step - 1 - rows[:, 2], rows[:, 1] - rows[:, 0])

    def take(self, samples: NDArray[np.integer]) -> VersionSpans:
        """Return the spans of these samples, in this order."""
        return VersionSpans(self.rows[positions(self.offsets, samples)], offsets_of(np.diff(self.offsets)[samples]))

    @staticmethod
    def concatenate(parts: Sequence[VersionSpans]) -> VersionSpans:
        """Return the spans of all parts, one part after the other."""
        return VersionSpans(
            np.concatenate([part.rows for part in parts]),
            offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        )


def staleness(version_step: int, update_step: int) -> int:
    """Return the staleness of a sample at an update, in steps; 0 is on-policy."""
    if version_step >= update_step:
        raise ValueError(f"version {version_step} cannot exist before the update of step {update_step}")
    return update_step - 1 - version_step


# Rows of different lengths, end to end in one array.


def offsets_of(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the begin of each row and the end of the last: int64 of shape (rows + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions(offsets: NDArray[np.int64], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the positions of the items of some rows, row after row."""
    starts, lengths = offsets[rows], np.diff(offsets)[rows]
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(shifts, lengths) + np.arange(lengths.sum())
