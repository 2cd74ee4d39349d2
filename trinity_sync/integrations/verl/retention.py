"""Which checkpoints of a verl program stay, beside what verl's own limits say: policies in a variable."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.retention import Policy, make_policies

RETENTION = "TRINITY_SYNC_RETENTION"
"""Policies as ``retention.policies`` has them, such as ``keep_last.n=2 keep_every.steps=100``."""


def policies_in(environment: Mapping[str, str]) -> tuple[Policy, ...]:
    """Read the policies that `RETENTION` names: ``POLICY`` or ``POLICY.FIELD=VALUE``, apart by spaces. A checkpoint
    stays if any of them keeps it. None where it is not set.

    Raises:
        ConfigError: it names what is no policy or field, or a value out of range.
    """
    named: dict[str, dict[str, object]] = {}
    for word in environment.get(RETENTION, "").split():
        key, has_value, text = word.partition("=")
        policy, _, name = key.partition(".")
        if bool(name) != bool(has_value):
            raise ConfigError(f"{RETENTION} has {word!r}; what it may have is POLICY or POLICY.FIELD=VALUE")
        fields = named.setdefault(policy, {})
        if name:
            fields[name] = _value(text)
    try:
        return make_policies(named)
    except ConfigError as error:
        raise ConfigError(f"{RETENTION}: {error}") from None


def _value(text: str) -> object:
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float) else text
