"""The log-probs of a step's samples before it is trained on them: under the trainer's own weights, and under those of
a reference.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from trinity_sync.backends.engines import Engine


def recomputed(engine: Engine, data: TensorDict) -> TensorDict:
    """Return a rank's share of a step with the log-probs that the engine computes as `old_log_probs`. Collective; see
    `with_log_probs`.
    """
    return with_log_probs(engine, data, "old_log_probs")


def with_log_probs(
    engine: Engine, data: TensorDict, name: str, inside: AbstractContextManager[None] | None = None
) -> TensorDict:
    """Return a rank's share of a step with the log-probs that an engine computes of the responses' tokens: with the
    dtypes, the temperature and the micro-batches of training, without dropout. Collective.

    Args:
        engine: at work on nothing else.
        data: from `grpo_batch`. On pipeline stages before the last, which compute no loss, it stays as it is.
        name: under which they are put in.
        inside: entered once the engine infers; left when it has.
    """
    data = data.copy()
    log_probs = inferred(engine, data, inside)
    if log_probs is not None:
        data[name] = response_from_nested(log_probs, data["response_mask"])
    return data


def inferred(
    engine: Engine, data: TensorDict, inside: AbstractContextManager[None] | None = None, *, training: bool = False
) -> torch.Tensor | None:
    """Return the log-prob that an engine gives each next token of a rank's sequences: nested, float32, on the CPU; None
    on pipeline stages before the last. Collective; arguments as of `with_log_probs`, where `data` may be from
    `sft_batch`, too, and stays as it is; with `training` dropout is on, as when it trains.
    """
    asked = data.copy()  # the engine notes in it what it has found
    # a reference may be of a family that packs no sequences, or be one where the trained model is none
    packed = engine.model_config.use_remove_padding
    tu.assign_non_tensor(asked, calculate_entropy=False, use_remove_padding=packed)
    with engine.train_mode() if training else engine.eval_mode(), inside or nullcontext(), torch.no_grad():
        output = engine.infer_batch(asked)
    if not output:
        return None
    log_probs: torch.Tensor = output["model_output"]["log_probs"].float().cpu()
    return log_probs
