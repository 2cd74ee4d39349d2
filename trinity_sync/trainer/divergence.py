"""How far each response of a step is from a reference, by verl's estimators, and what verl's controller makes of it.
Called by trainer ranks.
"""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import AdaptiveKLController, kl_penalty
from verl.utils.torch_functional import masked_mean

from trinity_sync.actors.rank import Divergences
from trinity_sync.config.training_schema import InRewardConfig


def divergences(data: TensorDict, rows: np.ndarray, estimator: str) -> Divergences | None:
    """Measure a rank's share of a step.

    Args:
        data: with `old_log_probs` and `ref_log_prob`, as `with_log_probs` puts them in; None is returned without.
        rows: which of the step's samples these are.
        estimator: verl's name of it.
    """
    if "ref_log_prob" not in data:
        return None
    padded = data.select("response_mask", "old_log_probs", "ref_log_prob").to_padded_tensor()
    mask = padded["response_mask"]
    of_tokens = kl_penalty(padded["old_log_probs"], padded["ref_log_prob"], kl_penalty=estimator) * mask
    means = masked_mean(of_tokens, mask=mask, axis=-1)
    return Divergences(rows, of_tokens.double().sum(-1).numpy(), means.float().numpy())


def adapted(coefficient: float, divergence: float, samples: int, config: InRewardConfig) -> float:
    """Return the coefficient of the next step by verl's adaptive controller (Ziegler et al., "Fine-Tuning Language
    Models from Human Preferences", 2019).

    Args:
        coefficient: of this step.
        divergence: of this step, per token, nats.
        samples: of this step.
        config: what the divergence is to be, and how fast.
    """
    controller = AdaptiveKLController(coefficient, config.target_kl, config.horizon)
    controller.update(current_kl=divergence, n_steps=samples)
    return float(controller.value)
