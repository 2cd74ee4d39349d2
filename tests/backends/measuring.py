"""Whether the loss that a real engine measures for a validation is the mean over tokens, worked out by hand, and
whether the gap to the log-probs of a sampler is the one that there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.samples.helpers import sample

BESIDE = 0.5
"""So much larger are the log-probs of a sampler, nats."""


def measuring(engine: Any, model: Path, *, max_tokens: int | None, sharing: int = 1) -> dict[str, Any]:
    """Measure the loss of as many pairs as no number of ranks or of a micro-batch divides. Collective; changes nothing
    of the engine.

    Args:
        engine: verl's, initialised, with the weights of `model`.
        model: a folder.
        max_tokens: of a micro-batch of this engine; None: two sequences make one.
        sharing: ranks to a sequence.

    Returns:
        ``wanted``: loss and tokens of all, by hand. ``found``: share, loss and tokens of this rank, with micro-batches
        as the engine takes them and of one sequence; empty where it is not computed. ``gaps``: likewise, the gap from
        log-probs that are `BESIDE` those by hand, without dropout and with. ``drawn``: whether random numbers were
        drawn.
    """
    import torch

    batch, wanted, log_probs = _batch_and_loss(engine, model)
    samples = _samples(batch, log_probs)
    before = torch.random.get_rng_state()
    found, gaps = [], [_gap(engine, samples, max_tokens, sharing)]
    with _all_dropped(engine):
        for micro_batch in (2, 1):
            one = _measured(engine, batch, micro_batch, max_tokens, sharing)
            if one is not None:
                found.append(list(one))
        gaps.append(_gap(engine, samples, max_tokens, sharing))
    drawn = not torch.equal(before, torch.random.get_rng_state())
    return {"wanted": wanted, "found": found, "gaps": [list(one) for one in gaps if one], "drawn": drawn}


def _measured(engine: Any, batch: Any, micro_batch: int, max_tokens: int | None, sharing: int) -> Any:
    from trinity_sync.trainer.measurements import loss_sum

    return loss_sum(engine, _spec(micro_batch, max_tokens, sharing), batch)


def _gap(engine: Any, samples: Any, max_tokens: int | None, sharing: int) -> Any:
    from trinity_sync.trainer.measurements import gap_sum

    return gap_sum(engine, _spec(2, max_tokens, sharing), samples)


def _spec(micro_batch: int, max_tokens: int | None, sharing: int) -> Any:
    backend = SimpleNamespace(ranks_per_sequence=sharing)
    return SimpleNamespace(micro_batch_size=micro_batch, max_tokens=max_tokens, backend=backend, temperature=1.0)


def _samples(batch: Any, log_probs: list[list[float]]) -> Any:
    """Samples of the pairs of a batch."""
    from trinity_sync.samples.batch import SampleBatch

    return SampleBatch.of(
        replace(
            sample(
                prompt=row,
                prompt_ids=tuple(batch.prompt_ids(row).tolist()),
                response_ids=tuple(batch.response_ids(row).tolist()),
            ),
            log_probs=tuple(value + BESIDE for value in values),
        )
        for row, values in enumerate(log_probs)
    )


def _batch_and_loss(engine: Any, model: Path) -> tuple[Any, list[float], list[list[float]]]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from trinity_sync.samples.batch import PairBatch

    config = engine.model_config.hf_config
    draw = np.random.default_rng(23)
    lengths = [(3, 4), (5, 2), (2, 9), (4, 1), (6, 6)]
    prompts = [draw.integers(0, config.vocab_size, length) for length, _ in lengths]
    responses = [draw.integers(0, config.vocab_size, length) for _, length in lengths]
    learnt = [np.arange(len(response)) % 3 != 1 for response in responses]
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", pad_token_id=config.pad_token_id
    )
    total, tokens = 0.0, 0
    log_probs = []
    for prompt, response, marks in zip(prompts, responses, learnt, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            every = reference(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        of_tokens = -every.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
        log_probs.append((-of_tokens).tolist())
        total, tokens = total + float(of_tokens[marks].sum()), tokens + int(marks.sum())
    batch = PairBatch.of(
        [prompt.tolist() for prompt in prompts],
        [response.tolist() for response in responses],
        [marks.tolist() for marks in learnt],
    )
    return batch, [total, tokens], log_probs


@contextmanager
def _all_dropped(engine: Any) -> Iterator[None]:
    """Inside, an engine that learns drops everything that attention gives."""
    import torch

    modules = [
        module
        for chunk in (engine.module if isinstance(engine.module, list) else [engine.module])
        for module in chunk.modules()
        if hasattr(module, "attention_dropout") and not isinstance(module.attention_dropout, torch.nn.Module)
    ]
    before = [module.attention_dropout for module in modules]
    for module in modules:
        module.attention_dropout = 0.9
    yield
    for module, dropout in zip(modules, before, strict=True):
        module.attention_dropout = dropout


def assert_measured(ranks: list[dict[str, Any]]) -> None:
    """Hold what the ranks of a layout have found against what is to be."""
    import pytest

    (loss, tokens), totals = ranks[0]["wanted"], []
    for number in range(2):
        shares = {share: (of_share, count) for rank in ranks for share, of_share, count in rank["found"][number:][:1]}
        assert sum(count for _, count in shares.values()) == tokens
        totals.append(sum(of_share for of_share, _ in shares.values()) / tokens)
    assert totals == pytest.approx([loss / tokens] * 2, rel=2e-3)
    assert totals[0] == pytest.approx(totals[1], rel=1e-3)
    assert not any(rank["drawn"] for rank in ranks)


def assert_gaps(ranks: list[dict[str, Any]], *, drops: bool) -> None:
    """Hold the gaps that the ranks of a layout have found against what is to be.

    Args:
        ranks: what each has found.
        drops: whether `_all_dropped` reaches these engines; verl turns dropout off in those of Megatron.
    """
    import pytest

    from trinity_sync.actors.rank import GapSum

    means, gaps = [], []
    for number in range(2):
        found = {one[0]: GapSum(*one) for rank in ranks for one in rank["gaps"][number:][:1]}.values()
        tokens = sum(one.tokens for one in found)
        assert tokens == 4 + 2 + 9 + 1 + 6
        means.append(sum(one.sampled - one.trained for one in found) / tokens)
        gaps.append(sum(one.gap for one in found) / tokens)
        assert max(one.largest for one in found) > gaps[-1]
    assert means[0] == pytest.approx(BESIDE, abs=0.02)
    assert gaps[0] == pytest.approx(BESIDE, abs=0.02)
    assert (gaps[1] != gaps[0]) is drops
