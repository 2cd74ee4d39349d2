"""What a run begins with that goes on from another engine's checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.checkpoint.test_export import committed, with_drafts
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError
from trinity_sync.launch.actors import Actors
from trinity_sync.launch.start import Start


def test_draft_heads_are_not_lost_when_the_engine_changes(tmp_path: Path) -> None:
    """What the new engine begins with has them; where they are gone, nothing begins."""
    drafts = with_drafts(tmp_path / "drafts")
    step = committed(tmp_path / "checkpoints", left_out=drafts)
    setup: Any = SimpleNamespace(
        cfg=typed(compose(["model.path=org/name"])),
        config_digest="",
        folder=SimpleNamespace(logs=tmp_path, model=tmp_path / "model"),
        start=Start(3, True, tmp_path / "checkpoints", step, weights_only=True),
        recorder=None,
        owner=None,
        mirror=None,
        kept=None,
        states=None,
        heals=False,
        cluster=None,
        run_key="run",
        use_gpu=False,
    )
    actors = Actors(setup)
    actors._make_model()
    assert load_file(Path(actors.model_path) / "model.safetensors").keys() > set(drafts["names"])
    Path(drafts["path"]).rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"would lose model\.layers\.9\.eh_.*: .*/drafts does not hold them"):
        actors._make_model()
    assert not Path(actors.model_path).exists()
