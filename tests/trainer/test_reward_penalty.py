"""The divergence in rewards, against verl's `apply_kl_penalty` and its controllers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.samples.helpers import sample
from tests.trainer.ranks import Asked
from trinity_sync.actors.rank_client import Divergences, RankClient
from trinity_sync.config.schema import InRewardConfig
from trinity_sync.errors import RunError
from trinity_sync.samples.advantages import group_advantages
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.trainer.group import TrainerGroup
from trinity_sync.trainer.steps import RewardPenalty
from trinity_sync.trainer.training_batch import grpo_batch, share, with_advantages
from trinity_sync.trainer.worker import adapted, divergences

LENGTHS = (3, 1, 5, 2)
ADAPTIVE = InRewardConfig(coeff=0.5, estimator="kl", type="adaptive", target_kl=0.05, horizon=40)


def samples() -> SampleBatch:
    rewards = (1.0, 0.0, 0.25, 1.0)
    return SampleBatch.of(
        sample(prompt=row // 2, number=row % 2, reward=reward, response_ids=(7,) * length)
        for row, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=True))
    )


def log_probs(step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of the policy and of the reference."""
    random = np.random.default_rng(step)
    policy = [-random.random(length).astype(np.float32) for length in LENGTHS]
    return policy, [row + random.normal(0, 0.3, len(row)).astype(np.float32) for row in policy]


def nested(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


class Ranks:
    """Two of the last pipeline stage with a half of the samples each, and one of another stage."""

    def __init__(self, config: InRewardConfig) -> None:
        self._config = config
        me: Any = self
        self.ranks = [me]

    def all(self, ask: Callable[[RankClient], Any], timeout_s: float) -> Any:
        method, (step, batch) = ask(cast(RankClient, Asked()))
        assert method == "divergences"
        return [None, *(self._of_rank(step, share(len(batch), rank, 2, 1)) for rank in (0, 1))]

    def _of_rank(self, step: int, rows: np.ndarray) -> Divergences | None:
        policy, reference = log_probs(step)
        mine, theirs = [policy[row] for row in rows], [reference[row] for row in rows]
        tokens = [np.full(len(row), 7) for row in mine]
        data = grpo_batch(tokens, tokens, mine, None, temperature=1.0, micro_batch=2, global_mini_batch=4)
        assert divergences(data, rows, self._config.estimator) is None
        data["ref_log_prob"] = nested(theirs)
        return divergences(data, rows, self._config.estimator)

    def adapted(self, coefficient: float, divergence: float, many: int) -> Any:
        found = adapted(coefficient, divergence, many, self._config)

        class Answered:
            def result(self, timeout_s: float) -> float:
                return found

        return Answered()


def penalty(config: InRewardConfig, saved: Any = None) -> RewardPenalty:
    return RewardPenalty(cast(TrainerGroup, Ranks(config)), config, 1.0, saved)


def apply(made: RewardPenalty, step: int) -> tuple[SampleBatch, dict[str, float]]:
    batch = samples()
    shared: Any = batch
    return made.apply(step, batch, shared)


def verls(controller: Any, step: int, estimator: str) -> tuple[np.ndarray, dict[str, float]]:
    """Rewards of the responses, and metrics."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    policy, reference = log_probs(step)
    scores = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.float64)
    scores[range(4), [length - 1 for length in LENGTHS]] = torch.from_numpy(samples().rewards)
    tensors = {
        "response_mask": padded([np.ones(length, np.float32) for length in LENGTHS]),
        "token_level_scores": scores,
        "old_log_probs": padded(policy),
        "ref_log_prob": padded(reference),
    }
    data, metrics = apply_kl_penalty(DataProto.from_dict(tensors), controller, estimator)
    return data.batch["token_level_rewards"].sum(-1).numpy(), metrics


@pytest.mark.parametrize("estimator", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_rewards_and_metrics_are_those_of_verls_own_function(estimator: str) -> None:
    from verl.trainer.ppo.core_algos import FixedKLController

    config = replace(ADAPTIVE, estimator=estimator, type="fixed")
    judged, found = apply(penalty(config), 1)
    rewards, metrics = verls(FixedKLController(0.5), 1, estimator)
    assert judged.rewards == pytest.approx(rewards, abs=1e-6)
    assert found == pytest.approx(metrics)
    assert found["actor/reward_kl_penalty"] != 0
    assert group_advantages(judged) != pytest.approx(group_advantages(samples()))


def test_an_adaptive_coefficient_goes_the_way_of_verls_controller() -> None:
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    made, controller = penalty(ADAPTIVE), AdaptiveKLController(0.5, 0.05, 40)
    used = []
    for step in range(1, 6):
        judged, found = apply(made, step)
        rewards, metrics = verls(controller, step, "kl")
        assert judged.rewards == pytest.approx(rewards, abs=1e-6)
        assert found == pytest.approx(metrics)
        used.append(found["actor/reward_kl_penalty_coeff"])
    assert len({*used}) == 5
    assert made.coefficient == pytest.approx(controller.value)


def test_a_run_that_goes_on_has_the_coefficient_that_was_saved_bit_for_bit() -> None:
    import json

    whole = penalty(ADAPTIVE)
    expected = [apply(whole, step)[1] for step in range(1, 5)]
    begun = penalty(ADAPTIVE)
    for step in (1, 2):
        apply(begun, step)
    again = penalty(ADAPTIVE, json.loads(json.dumps(begun.state())))
    assert [apply(again, step)[1] for step in (3, 4)] == expected[2:]


def test_one_that_does_not_adapt_is_that_of_the_configuration_whatever_was_saved() -> None:
    fixed = replace(ADAPTIVE, type="fixed", coeff=0.25)
    assert penalty(fixed, {"reward_kl_coeff": 9.0}).coefficient == 0.25
    assert penalty(fixed).state() == {}


def test_a_sample_without_a_reward_stays_without_one() -> None:
    batch = samples()
    batch.rewards[1] = np.nan
    shared: Any = batch
    judged, _ = penalty(ADAPTIVE).apply(1, batch, shared)
    assert np.isnan(judged.rewards).tolist() == [False, True, False, False]


def test_advantages_that_are_given_later_are_the_same() -> None:
    policy, _ = log_probs(1)
    tokens = [np.full(len(row), 7) for row in policy]
    settings: dict[str, Any] = {"temperature": 1.0, "micro_batch": 2, "global_mini_batch": 4}
    advantages = np.array([0.5, -1.0, 2.0, 0.0])
    whole = grpo_batch(tokens, tokens, policy, advantages, **settings)
    later = with_advantages(grpo_batch(tokens, tokens, policy, None, **settings), advantages)
    assert torch.equal(whole["advantages"].values(), later["advantages"].values())
    assert later["advantages"].offsets().diff().tolist() == list(LENGTHS)


def test_a_divergence_that_is_not_finite_ends_the_run_and_is_saved_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = Ranks(ADAPTIVE)
    monkeypatch.setattr(ranks, "all", lambda ask, timeout_s: [None])  # no rank has measured any
    penalty = RewardPenalty(ranks, ADAPTIVE, 1.0)
    before = penalty.state()
    with pytest.raises(RunError, match="the divergence of step 3 from the reference is not finite"):
        penalty.apply(3, samples(), cast(Any, None))
    assert penalty.state() == before
