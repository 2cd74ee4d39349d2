"""The schema under the names by which Hydra and option files know it."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from trinity_sync.config.lookup import LABELS
from trinity_sync.config.schema import (
    SCHEMA,
    BackendConfig,
    CheckpointConfig,
    ConversationsConfig,
    PairsConfig,
    PromptFileConfig,
    VllmConfig,
)

_PASSED_ON: tuple[tuple[type, str], ...] = (
    (BackendConfig, "overrides"),
    (VllmConfig, "engine"),
    (CheckpointConfig, "mirror_options"),
    (CheckpointConfig, "monitor"),
    (CheckpointConfig, "coordinator"),
    (PromptFileConfig, "chat_template"),
    (PairsConfig, "chat_template"),
    (ConversationsConfig, "chat_template"),
)
"""Keys that hold what is handed as it is to verl, to fsspec, to a chat template, or to the class that stands there."""


def register() -> None:
    """Give the schema to Hydra's ConfigStore and the resolver `sum` to OmegaConf. Runs when the package is imported."""
    store = ConfigStore.instance()
    for name, schema in SCHEMA.items():
        node = OmegaConf.structured(schema)
        for key in (key for owner, key in _PASSED_ON if issubclass(schema, owner)):
            # its keys are for others to check: any of them can be set without a '+' in front
            node[key] = {}
            node[key]._set_flag("struct", False)
        store.store(group="schema", name=name, node=node)
    # an option file of the user's own lists this where its class has keys that no option of ours has
    any_key = OmegaConf.create({}, flags={"struct": False})
    store.store(group="schema", name="own_keys", node=any_key)
    # and this comes when all option files have been read: what none has given is no setting, but with a '+' in front
    closed = OmegaConf.create({group: {} for group in LABELS} | {"backend": {"overrides": any_key}})
    for group in LABELS:
        closed[group]._set_flag("struct", True)
    store.store(group="schema", name="closed", node=closed)
    OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
