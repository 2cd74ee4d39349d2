"""The penalty on long responses is that of verl's reward manager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.samples.helpers import sample
from trinity_sync.samples.advantages import LengthPenalty, group_advantages
from trinity_sync.samples.batch import SampleBatch

LONGEST, BUFFER, PENALTY = 8, 3, 0.7
LENGTHS = np.arange(1, LONGEST + 1)
OVERLONG = LengthPenalty(longest=LONGEST, buffer=BUFFER, penalty=PENALTY)


class Tokenizer:
    """What verl's manager asks of one."""

    eos_token = "<eos>"

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(str, ids))


def verls_rewards() -> list[float]:
    """What verl gives to responses of 1 to `LONGEST` tokens that would all have a reward of 1."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.workers.reward_manager.dapo import DAPORewardManager

    rows = len(LENGTHS)
    there = (torch.arange(LONGEST)[None] < torch.from_numpy(LENGTHS)[:, None]).long()
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(rows, 2, dtype=torch.long),
            "responses": torch.ones(rows, LONGEST, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(rows, 2, dtype=torch.long), there], 1),
        },
        non_tensors={
            "data_source": np.array(["any"] * rows, object),
            "reward_model": np.array([{"ground_truth": ""}] * rows, object),
        },
    )
    config = OmegaConf.create({"enable": True, "len": BUFFER, "penalty_factor": PENALTY, "log": False})
    manager = DAPORewardManager(
        Tokenizer(), 0, compute_score=lambda **_: 1.0, max_resp_len=LONGEST, overlong_buffer_cfg=config
    )
    return [float(value) for value in manager(data).sum(-1)]


def test_it_is_verls() -> None:
    assert 1.0 - OVERLONG.penalties(LENGTHS) == pytest.approx(verls_rewards(), rel=1e-6)


def test_advantages_are_made_of_it_and_the_rewards_stay() -> None:
    lengths = (2, 6, 8)
    batch = SampleBatch.of(
        sample(number=number, response_ids=(7,) * length, reward=1.0) for number, length in enumerate(lengths)
    )
    taken = OVERLONG.penalties(np.array(lengths))
    assert group_advantages(batch, normalise=False, overlong=OVERLONG) == pytest.approx(taken.mean() - taken)
    assert set(batch.rewards) == {1.0}
    assert not group_advantages(batch, normalise=False).any()
