"""Whether an error of Ray's tells of a process that is gone, and why it is."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError

DEATHS = (RayActorError, OutOfMemoryError)
"""What a call to an actor fails of whose process is gone; the second where Ray ended it for want of memory."""

_MOST = 300
"""Characters of a reason."""

_AROUND = re.compile(
    r"""
    ^\t\w+:.*$                                                  # the actor's class, id, pid ...
    | ^The\ actor\ (?:died|experienced)\ .*before\ finishing\ this\ task\.$
    | ^The\ actor\ (?:is\ dead|died)\ because\ (?:its\ worker\ process\ has\ died\..*?\ Worker\ exit\ detail:\ )?
    | \s*Some\ common\ causes\ include.*$
    | ,?\s*\b(?:(?:\w+\ )?[Ii][Dd]:\ )?[0-9a-f]{24,}\b         # ids
    """,
    re.VERBOSE | re.MULTILINE,
)
_EMPTIED = re.compile(r" \(\)|(?<=\(),\s*")
"""What is left of parentheses that an id stood in."""


def why_gone(error: Exception) -> str:
    """Say in one line why a process is gone, in Ray's words without ids and advice; empty where it tells nothing.

    Args:
        error: one of `DEATHS`.
    """
    text = " ".join(_EMPTIED.sub("", _AROUND.sub("", str(error))).split()).strip(" .,:")
    return text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} ..."
