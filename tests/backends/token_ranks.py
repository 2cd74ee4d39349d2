"""What each rank of `test_token_batches.py` runs: real engines, batched by tokens, padded and packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.backends import megatron_ranks
from tests.backends.engines import _facts_file, go_through, join_group, packing, padding
from tests.backends.gradients import gradients
from tests.backends.measuring import measuring
from tests.backends.recomputing import recomputing

MAX_TOKENS = 30
"""Of micro-batches: two sequences of the first rank fit, of the second one alone."""


def of_fsdp(
    rank: int, ranks: int, port: int, folder: Path, cases: list[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """Go through cases with `strategy`, `model`, `sharing` (ranks to a sequence; 0: padded) and `max_tokens`."""

    def examine(case: Mapping[str, Any], models: Path, _: Path, __: int, ___: int) -> dict[str, Any]:
        model, sharing = models / case["model"], case["sharing"]
        engine = packing(model, case["strategy"], sharing) if sharing else padding(model, case["strategy"])
        return _found(engine, model, max(sharing, 1), max_tokens=case["max_tokens"], packed=bool(sharing))

    go_through(examine, rank, ranks, port, folder, cases, saved)


def of_megatron(
    rank: int, ranks: int, port: int, folder: Path, cases: list[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """Go through cases as `megatron_ranks.build` takes them, all with so many tokens."""
    import warnings

    warnings.simplefilter("ignore")
    import torch.distributed as dist

    import trinity_sync.backends.lean_verl  # noqa: F401
    from trinity_sync.backends.megatron.megatron_engine import prepare

    prepare()
    join_group(port, rank, ranks)
    models = folder / "models"
    if rank == 0:
        megatron_ranks.make_models(models)
    dist.barrier()
    facts = []
    for case in cases:
        engine = megatron_ranks.build(case, models)
        facts.append(_found(engine, models / case["model"], max_tokens=MAX_TOKENS))
    _facts_file(folder, ranks, rank).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _found(engine: Any, model: Path, sharing: int = 1, **batching: Any) -> dict[str, Any]:
    micro_batches: list[int] = []
    forward_step = engine.forward_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        micro_batches.append(1)
        return forward_step(*args, **kwargs)

    engine.forward_step = counting
    measured = measuring(engine, model, max_tokens=batching["max_tokens"], sharing=sharing)
    micro_batches.clear()
    found = gradients(engine, model, longer=5, **batching)
    counted = len(micro_batches)
    if batching["max_tokens"]:  # for two sequences of six tokens each
        batching["max_tokens"] = 12 // sharing
    return {
        "gradients": found,
        "micro_batches": counted,
        "recomputing": recomputing(engine, **batching),
        "measuring": measured,
    }
