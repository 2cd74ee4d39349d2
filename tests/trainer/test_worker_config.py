"""What verl is told to build, of a model that is packed and of one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_sync.backends.option import ATTENTION
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError
from trinity_sync.models.architecture import make_model
from trinity_sync.trainer.worker import worker_config
from trinity_sync.trainer.worker_spec import worker_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(typed(compose()).model.architecture or {}, 0, folder)
    return folder


def built(model: Path, *overrides: str) -> tuple[bool, str]:
    """Whether without padding, and with which attention."""
    config = worker_config(worker_spec(typed(compose(list(overrides))), str(model), "logs")).model_config
    return config.use_remove_padding, config.hf_config._attn_implementation


def test_sequences_are_packed_where_the_model_can(model: Path) -> None:
    assert built(model) == (True, ATTENTION)


@pytest.mark.parametrize("override", ["trainer.remove_padding=never", "backend=megatron"])
def test_they_are_padded_where_that_is_asked_for_or_the_engine_cannot(model: Path, override: str) -> None:
    assert built(model, override) == (False, "sdpa")


def test_a_model_that_turns_out_not_to_pack_is_refused(model: Path) -> None:
    """The driver does not know those of the hub."""
    with pytest.raises(
        ConfigError, match=r"trainer\.remove_padding is always, but model\.attn_implementation is eager"
    ):
        built(model, "trainer.remove_padding=always", "model.attn_implementation=eager")
