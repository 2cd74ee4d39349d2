"""Processor time of a step's forward and backward: as verl does it, padded, and packed without padding.

    python benchmarks/training.py --json --rounds 9

One rank of `fsdp2` in this process, one thread. `default` is a rank's share of the default task at its start. `mixed`
has sequences of 8 to 120 tokens in no order, `alike` the same ones, those of one length together, which then need no
padding. Ways: `verl` is padded, with log-probs token by token; `padded` and `packed` are `trainer.remove_padding=never`
and `always`, `packed` with `trainer.max_tokens` for `mixed`. Ways are measured in turn, in every round; results are
medians of seconds of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

import numpy as np
import torch
import torch.distributed as dist
from engines import verl_engine
from verl.utils import torch_functional

from trinity_sync.config import compose, typed
from trinity_sync.models.architecture import make_model
from trinity_sync.trainer.training_batch import BatchSizes, grpo_batch, micro_batch_size
from trinity_sync.trainer.worker_spec import worker_spec

BY_TOKEN = torch_functional.logprobs_from_logits_v2
MAX_TOKENS = 2048

Lengths = list[tuple[int, int]]
"""Of prompt and response of each sequence."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        steps = _steps(Path(folder) / "model")
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if number:  # the first warms up
                rounds[name].append(time.process_time() - began)
    results = {name: statistics.median(found) for name, found in rounds.items()}
    ratios = {
        "default: packed / verl": results["default/packed"] / results["default/verl"],
        "default: padded / verl": results["default/padded"] / results["default/verl"],
        "mixed: packed / its tokens without padding": results["mixed/packed"] / results["alike/padded"],
        "mixed: padded / packed": results["mixed/padded"] / results["mixed/packed"],
    }
    said = {
        "command": f"python benchmarks/training.py --json --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "results": results,
        "ratios": ratios,
        "rounds": rounds,
    }
    print(json.dumps(said if arguments.json else {"results": results, "ratios": ratios}, indent=2))


def _steps(model: Path) -> dict[str, Callable[[], None]]:
    """Each way of each batch, by ``batch/way``."""
    draw = np.random.default_rng(0)
    alike = [(4, length - 4) for length in range(8, 121, 16) for _ in range(16)]
    mixed = [alike[index] for index in draw.permutation(len(alike))]
    default = [(4, 3 if draw.random() < 0.9 else 2) for _ in range(256)]
    make_model(typed(compose()).model.architecture or {}, 0, model)
    engines = {way: _engine(model, f"trainer.remove_padding={way}") for way in ("never", "always")}
    padded: BatchSizes = {"micro_batch": micro_batch_size(256, 256), "global_mini_batch": 256}
    by_sequences: BatchSizes = {"micro_batch": 64, "global_mini_batch": 128}
    by_length: BatchSizes = {"micro_batch": 16, "global_mini_batch": 128}
    by_tokens: BatchSizes = {"micro_batch": 128, "global_mini_batch": 128, "max_tokens": MAX_TOKENS, "packed": True}
    from trinity_sync.backends.lean_verl import log_probs

    return {
        "default/verl": _step(engines["never"], default, padded, BY_TOKEN),
        "default/padded": _step(engines["never"], default, padded, log_probs),
        "default/packed": _step(engines["always"], default, padded | {"packed": True}, log_probs),
        "mixed/padded": _step(engines["never"], mixed, by_sequences, log_probs),
        "mixed/packed": _step(engines["always"], mixed, by_tokens, log_probs),
        "alike/padded": _step(engines["never"], alike, by_length, log_probs),
    }


def _engine(model: Path, *overrides: str) -> Any:
    return verl_engine(worker_spec(typed(compose(["backend.ranks=1", *overrides])), str(model), "logs"))


def _step(engine: Any, lengths: Lengths, batching: Mapping[str, Any], log_probs: Any) -> Callable[[], None]:
    draw = np.random.default_rng(1)
    prompts, responses = ([draw.integers(3, 20, pair[part]) for pair in lengths] for part in (0, 1))
    sampled = [np.full(len(response), -3.0, np.float32) for response in responses]
    advantages = draw.normal(size=len(lengths))
    loss = worker_spec(typed(compose()), "unused", "logs").algorithm.loss("fsdp2")

    def step() -> None:
        torch_functional.logprobs_from_logits_v2 = log_probs
        data = grpo_batch(prompts, responses, sampled, advantages, temperature=1.0, **batching)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, loss)

    return step


if __name__ == "__main__":
    main()
