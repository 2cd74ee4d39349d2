"""What makes tokens of a task's rows, by the keys of `task`: the same before a run and in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_sync.models.tokens import ModelTokens
    from trinity_sync.tasks.encoding import PromptEncoder
    from trinity_sync.tasks.pair_encoding import PairEncoder


def prompt_encoder(task: Mapping[str, Any], tokens: ModelTokens) -> PromptEncoder:
    """For tasks with prompts; explorers have theirs in `explorer.texts.Texts`.

    Args:
        task: the keys of `task`; those of a user's own class need not be ours.
        tokens: of the model.

    Raises:
        ConfigError: the keys do not fit the model.
    """
    from trinity_sync.tasks.encoding import PromptEncoder, positions_of

    return PromptEncoder(
        tokens.tokenizer,
        response_length=task["response_length"],
        prompt_length=task.get("prompt_length"),
        positions=positions_of(tokens.config),
        truncate=task.get("too_long") == "truncate",
        chat_template=task.get("chat_template"),
        embedded=tokens.embedded,
    )


def pair_encoder(task: Mapping[str, Any], tokens: ModelTokens) -> PairEncoder:
    """For tasks with pairs or conversations; arguments and errors as for `prompt_encoder`."""
    from trinity_sync.tasks.encoding import positions_of
    from trinity_sync.tasks.pair_encoding import PairEncoder

    return PairEncoder(
        tokens.tokenizer,
        max_length=task["max_length"],
        positions=positions_of(tokens.config),
        truncate=task.get("too_long") == "truncate",
        chat_template=task.get("chat_template"),
        ignore_mismatch=bool(task.get("ignore_input_ids_mismatch")),
        ends=tokens.ends,
        embedded=tokens.embedded,
    )
