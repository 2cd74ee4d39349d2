"""Whether the loss that a real engine measures for a validation is the mean over tokens, worked out by hand, and
whether the log-probs of samples that it computes as training does are those worked out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.samples.helpers import sample
from trinity_sync.backends.option import BackendOption


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
        as the engine takes them and of one sequence; empty where it is not computed. ``by_hand``: log-probs of each
        sample. ``recomputed``: rows and log-probs of this rank, end to end, without dropout and with. ``drawn``:
        whether random numbers were drawn.
    """
    import torch

    batch, wanted, log_probs = _batch_and_loss(engine, model)
    samples = _samples(batch)
    before = torch.random.get_rng_state()
    found, recomputed = [], [_recomputed(engine, samples, max_tokens, sharing)]
    with _all_dropped(engine):
        for micro_batch in (2, 1):
            one = _measured(engine, batch, micro_batch, max_tokens, sharing)
            if one is not None:
                found.append(list(one))
        recomputed.append(_recomputed(engine, samples, max_tokens, sharing))
    drawn = not torch.equal(before, torch.random.get_rng_state())
    recomputed = [[values.tolist() for values in one] for one in recomputed if one]
    return {"wanted": wanted, "found": found, "by_hand": log_probs, "recomputed": recomputed, "drawn": drawn}


def _measured(engine: Any, batch: Any, micro_batch: int, max_tokens: int | None, sharing: int) -> Any:
    from trinity_sync.trainer.worker import loss_sum

    return loss_sum(engine, _spec(micro_batch, max_tokens, sharing), batch)


def _recomputed(engine: Any, samples: Any, max_tokens: int | None, sharing: int) -> Any:
    from trinity_sync.trainer.worker import training_log_probs

    return training_log_probs(engine, _spec(2, max_tokens, sharing), samples)


def _spec(micro_batch: int, max_tokens: int | None, sharing: int) -> Any:
    kept = partial(BackendOption.random_numbers_kept, cast(BackendOption, None))
    backend = SimpleNamespace(ranks_per_sequence=sharing, random_numbers_kept=kept)
    return SimpleNamespace(micro_batch_size=micro_batch, max_tokens=max_tokens, backend=backend, temperature=1.0)


def _samples(batch: Any) -> Any:
    """Samples of the pairs of a batch."""
    from trinity_sync.samples.batch import SampleBatch

    return SampleBatch.of(
        sample(
            prompt=row,
            prompt_ids=tuple(batch.prompt_ids(row).tolist()),
            response_ids=tuple(batch.response_ids(row).tolist()),
        )
        for row in range(len(batch))
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


def assert_recomputed_as_by_hand(ranks: list[dict[str, Any]], *, drops: bool) -> None:
    """Hold the log-probs of samples that the ranks of a layout have computed against those by hand.

    Args:
        ranks: what each has found.
        drops: whether `_all_dropped` reaches these engines; verl turns dropout off in those of Megatron.
    """
    import pytest

    by_hand: list[list[float]] = ranks[0]["by_hand"]
    lengths, found = list(map(len, by_hand)), []
    for number in range(2):
        of_rows: dict[int, list[float]] = {}
        for rows, values in (one for rank in ranks for one in rank["recomputed"][number:][:1]):
            assert len(values) == sum(lengths[row] for row in rows)
            for row in rows:
                of_rows[row], values = values[: lengths[row]], values[lengths[row] :]
        found.append([of_rows[row] for row in range(len(by_hand))])
    for row, wanted in enumerate(by_hand):
        assert found[0][row] == pytest.approx(wanted, abs=0.05)
    assert (found[1] != found[0]) is drops
