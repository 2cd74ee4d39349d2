"""The loss of a step in micro-batches, from log-probs that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trinity_sync.config.schema import RolloutCorrectionConfig
from trinity_sync.trainer.training_batch import grpo_batch

LENGTHS = ((3, 2), (2, 3), (4, 1), (1, 5))
ADVANTAGES = np.array([1.5, 0.7, -0.9, -2.0])
TOKENS = sum(response for _, response in LENGTHS)
HALVES = (slice(0, 1), slice(1, 4))


def drawn(seed: int, scale: float) -> list[np.ndarray]:
    """One row of float32 log-probs per response."""
    draw = np.random.default_rng(seed)
    return [(-scale * draw.random(response)).astype(np.float32) for _, response in LENGTHS]


def jagged(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.to_padded_tensor(jagged(rows), 0.0)


def model_output(log_probs: list[np.ndarray], of: slice, *, entropy: bool = False) -> dict[str, torch.Tensor]:
    """As an engine gives them: the log-prob of the next token at each position, jagged; to be differentiated. An
    entropy is made up of it.
    """
    rows = []
    for (prompt, response), row in list(zip(LENGTHS, log_probs, strict=True))[of]:
        whole = torch.full((prompt + response,), -9.0)
        whole[prompt - 1 : -1] = torch.from_numpy(row)
        rows.append(whole)
    output = {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged).requires_grad_()}
    return {**output, "entropy": output["log_probs"] * -0.5} if entropy else output


def of_responses(gradient: np.ndarray) -> list[np.ndarray]:
    """What a gradient by the log-probs has at the tokens of each response."""
    whole = np.split(gradient, np.cumsum([sum(both) for both in LENGTHS]))[:-1]
    return [row[prompt - 1 : -1] for (prompt, _), row in zip(LENGTHS, whole, strict=True)]


def loss(
    now: list[np.ndarray],
    sampled: list[np.ndarray],
    old: list[np.ndarray] | None = None,
    *,
    level: str | None = None,
    threshold: float = 2.0,
    rules: str | None = None,
    bounds: str | None = None,
    reference: list[np.ndarray] | None = None,
    staleness: list[np.ndarray] | None = None,
    settings: Mapping[str, Any] | None = None,
    micro_batches: tuple[slice, ...] = (slice(None),),
) -> tuple[float, np.ndarray, dict[str, Any]]:
    """The loss of a step, its gradient by the log-probs of `now`, and the metrics.

    Args:
        old: recomputed log-probs; None: there are none.
        level, threshold, rules, bounds: of `rollout_correction`.
        settings: of verl's `ActorConfig`.
        micro_batches: of the four sequences.
    """
    from verl.workers.config import ActorConfig

    from trinity_sync.trainer.algorithms.policy_loss import policy_loss

    common = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1, "clip_ratio_c": 3.0}
    correction = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=threshold, rollout_rs=rules, rollout_rs_threshold=bounds
    )
    function: Any = policy_loss(ActorConfig(**{**common, **(settings or {})}), correction, recomputed=old is not None)
    return step(function, now, sampled, old, reference=reference, staleness=staleness, micro_batches=micro_batches)


def step(
    function: Callable[..., Any],
    now: list[np.ndarray],
    sampled: list[np.ndarray],
    old: list[np.ndarray] | None = None,
    *,
    reference: list[np.ndarray] | None = None,
    staleness: list[np.ndarray] | None = None,
    entropy: bool = False,
    micro_batches: tuple[slice, ...] = (slice(None),),
) -> tuple[float, np.ndarray, dict[str, Any]]:
    """As `loss`, of a function that an algorithm has made.

    Args:
        function: as verl's worker calls it.
        entropy: the engine computes entropies, too.
    """
    from verl.utils import tensordict_utils as tu

    total, gradients, metrics = 0.0, [], {}
    for of in micro_batches:
        prompts = [np.arange(1, prompt + 1) for prompt, _ in LENGTHS[of]]
        responses = [np.arange(1, response + 1) for _, response in LENGTHS[of]]
        data = grpo_batch(
            prompts,
            responses,
            sampled[of],
            ADVANTAGES[of],
            temperature=1.0,
            micro_batch=4,
            global_mini_batch=4,
            entropy=entropy,
            staleness=None if staleness is None else staleness[of],
        )
        if old is not None:
            data["old_log_probs"] = jagged(old[of])
        if reference is not None:
            data["ref_log_prob"] = jagged(reference[of])
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=TOKENS)
        output = model_output(now, of, entropy=entropy)
        result, found = function(model_output=output, data=data, dp_group=None)
        (gradient,) = torch.autograd.grad(result, output["log_probs"])
        total += result.item()
        gradients.append(gradient.values().numpy())
        for name, metric in found.items():
            metrics.setdefault(name, metric.init_list()).append(metric)
    return total, np.concatenate(gradients), {name: metric.aggregate() for name, metric in metrics.items()}
