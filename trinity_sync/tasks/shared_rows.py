"""Whether the rows of a validation are new ones."""

from __future__ import annotations

import json
from collections.abc import Iterable

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.conversations import Conversation
from trinity_sync.tasks.pairs import Pair

Item = Prompt | Pair | Conversation


def shared_rows(trained: Iterable[Item], validated: Iterable[tuple[str, Item]]) -> list[str]:
    """Find rows of a validation that are trained on, too: of prompts the same prompt, whatever its answer; else the
    same pair or conversation.

    Args:
        trained: what is trained on.
        validated: places and what is validated on.

    Returns:
        The places of those that are the same.
    """
    known = {_said(item) for item in trained}
    return [where for where, item in validated if _said(item) in known]


def _said(item: Item) -> str:
    """What counts of a row."""
    if not isinstance(item, Prompt):
        return json.dumps(item._replace(where=""), sort_keys=True, default=str)
    return item.text if item.messages is None else json.dumps(item.messages, sort_keys=True)
