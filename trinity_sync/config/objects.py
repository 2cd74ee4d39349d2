"""A configuration as objects of the schema's dataclasses."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from trinity_sync.config.composition import plain
from trinity_sync.config.schema import Config


def typed(cfg: DictConfig) -> Config:
    """A whole configuration as the dataclasses of the schema, interpolations resolved: what all read that are neither
    of `config` nor of `launch`. A key that only a class of the user's own has is an attribute, too; `task`, whose class
    may be anybody's, is a dictionary.
    """
    found = OmegaConf.to_object(cfg)
    assert isinstance(found, Config)
    found.task = plain(cfg.task)
    return found
