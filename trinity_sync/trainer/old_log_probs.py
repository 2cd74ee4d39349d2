"""The log-probs of a step's samples under the trainer's own weights, before it trains on them."""

from __future__ import annotations

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from trinity_sync.backends.engines import Engine


def recomputed(engine: Engine, data: TensorDict) -> TensorDict:
    """Return a rank's share of a step with the log-probs that the engine computes as `old_log_probs`: with the dtypes,
    the temperature and the micro-batches of training, without dropout. Collective.

    Args:
        engine: at work on nothing else.
        data: from `grpo_batch`. On pipeline stages before the last, which compute no loss, it stays as it is.
    """
    data = data.copy()
    asked = data.copy()  # the engine notes in it what it has found
    tu.assign_non_tensor(asked, calculate_entropy=False)
    with engine.eval_mode():
        output = engine.infer_batch(asked)
    if output:
        log_probs = output["model_output"]["log_probs"].float().cpu()
        data["old_log_probs"] = response_from_nested(log_probs, data["response_mask"])
    return data
