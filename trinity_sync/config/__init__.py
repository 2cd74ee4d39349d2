"""The configuration: its schema, its composition from `conf/`, and the checks that run before anything starts.
`launch.py` and the command line compose and check a configuration and hand it to `trinity_sync.launch.launcher`.
Importing this package registers the schema with Hydra; it imports Hydra, OmegaConf and xxhash, nothing heavier.
"""

from __future__ import annotations

from trinity_sync.config.checks import check
from trinity_sync.config.comparison import ABSENT, Difference, RunConfig, config_diff, config_digest
from trinity_sync.config.composition import anchored, compose, conf_dir, dtype_name, from_here, plain
from trinity_sync.config.lookup import TARGET, build, chosen_by_option, load, load_class
from trinity_sync.config.model_checks import Check, Get, Problem
from trinity_sync.config.overrides import quote
from trinity_sync.config.saved_config import (
    Trust,
    asked_again,
    check_saved_target,
    only_trusted,
    only_trusted_places,
)
from trinity_sync.config.schema import (
    FORMER_MODULES,
    SCHEMA,
    Config,
    build_policy,
    register,
    retention_policies,
    typed,
)
from trinity_sync.config.targets import build_task, check_inputs, instantiate_target, validation_items, validation_task

__all__ = [
    "ABSENT",
    "FORMER_MODULES",
    "SCHEMA",
    "TARGET",
    "Check",
    "Config",
    "Difference",
    "Get",
    "Problem",
    "RunConfig",
    "Trust",
    "anchored",
    "asked_again",
    "build",
    "build_policy",
    "build_task",
    "check",
    "check_inputs",
    "check_saved_target",
    "chosen_by_option",
    "compose",
    "conf_dir",
    "config_diff",
    "config_digest",
    "dtype_name",
    "from_here",
    "instantiate_target",
    "load",
    "load_class",
    "only_trusted",
    "only_trusted_places",
    "plain",
    "quote",
    "register",
    "retention_policies",
    "typed",
    "validation_items",
    "validation_task",
]

register()
