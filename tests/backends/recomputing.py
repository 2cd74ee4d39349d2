"""Whether the log-probs that a real engine recomputes are those with which it trains."""

from __future__ import annotations

from typing import Any

SAMPLED = -9.0
"""The sampler's log-prob of each token: one that no small model gives any."""


def recomputing(engine: Any, **batching: Any) -> dict[str, Any]:
    """Recompute log-probs of samples, and go forward and backward with the loss as a step does. Collective; changes
    nothing of the engine.

    Args:
        engine: verl's, initialised.
        batching: of `grpo_batch`, in place of two sequences in a micro-batch; two micro-batches, too.

    Returns:
        ``changed``: how many of this rank's tokens have another log-prob than the sampler's. ``ppo_kl`` and
        ``clipped``, by micro-batch: what the loss finds between the recomputed log-probs and its own; empty where it
        is not computed. ``mismatch``: likewise, the largest difference from the sampler's.
    """
    import numpy as np
    from verl.workers.config import ActorConfig

    from tests.backends.engines import drawn_pairs
    from trinity_sync.config.schema import RolloutCorrectionConfig
    from trinity_sync.trainer.algorithms.policy_loss import policy_loss
    from trinity_sync.trainer.training_batch import grpo_batch
    from trinity_sync.trainer.worker import recomputed

    drawn = drawn_pairs(7, engine.get_data_parallel_rank())
    prompts = [prompt[: 2 + index] for index, (prompt, _) in enumerate(drawn)]
    answers = [answer[: 4 - index] for index, (_, answer) in enumerate(drawn)]
    sampled = [np.full(len(answer), SAMPLED, np.float32) for answer in answers]
    size = len(drawn) * engine.get_data_parallel_size()
    data = recomputed(
        engine,
        grpo_batch(
            prompts,
            answers,
            sampled,
            np.ones(4),
            temperature=0.7,
            **{"micro_batch": 2, "global_mini_batch": size} | batching,
        ),
    )
    config = ActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None, rollout_rs_threshold=None
    )
    loss = policy_loss(config, correction, recomputed=True)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, loss).get("metrics", {})

    def of_micro_batches(name: str) -> list[float]:
        return list(metrics[name].values) if metrics else []

    return {
        "changed": int((data["old_log_probs"].values() != SAMPLED).sum()),
        "ppo_kl": of_micro_batches("actor/ppo_kl"),
        "clipped": of_micro_batches("actor/pg_clipfrac"),
        "mismatch": of_micro_batches("rollout_corr/log_prob_abs_diff_max"),
    }


def assert_recomputed(ranks: list[dict[str, Any]]) -> None:
    """Hold what the ranks of a layout have found against what is to be."""
    found = [rank for rank in ranks if rank["ppo_kl"]]
    assert found, "no rank computes the loss"
    for rank in found:
        assert rank["changed"] == 10
        assert rank["ppo_kl"] == rank["clipped"] == [0.0, 0.0]
        assert min(rank["mismatch"]) > 1
    assert all(rank["changed"] == 0 for rank in ranks if rank not in found)


def divided_by_hand(engine: Any) -> float:
    """The largest difference of an FSDP engine's log-probs at a temperature from those of its logits divided in fp32,
    as explorers divide them. Collective.
    """
    import numpy as np
    import torch

    from trinity_sync.trainer.training_batch import grpo_batch

    draw, logits = np.random.default_rng(3), []
    prompts, answers = ([draw.integers(3, 30, length) for length in lengths] for lengths in ((2, 4, 3), (5, 2, 4)))
    log_probs = [np.zeros(len(answer), np.float32) for answer in answers]
    data = grpo_batch(prompts, answers, log_probs, np.ones(3), temperature=0.3, micro_batch=3, global_mini_batch=3)
    watching = engine.module.register_forward_hook(lambda *given: logits.append(given[-1].logits.detach().float()))
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]["log_probs"].unbind()
    watching.remove()
    most = 0.0
    for row, log_prob, prompt, answer in zip(logits[0], found, prompts, answers, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, answer]))
        wanted = (row[: len(ids) - 1] / 0.3).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        most = max(most, (wanted - log_prob[:-1]).abs().max().item())
    return most
