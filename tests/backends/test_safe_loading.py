"""Nothing that is pickled in a checkpoint runs, on any path by which a library comes to it."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from trinity_sync.backends.safe_loading import nothing_runs
from trinity_sync.errors import RunError


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return eval, (f"open({str(self._mark)!r}, 'w').close()",)


def distributed(folder: Path) -> dict[str, Any]:
    state = {"weight": torch.arange(4.0), "rng": {"python": random.getstate(), "numpy": np.random.get_state()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def load(folder: Path) -> dict[str, Any]:
    state = {"weight": torch.zeros(4), "rng": {"python": None, "numpy": None}}
    with warnings.catch_warnings(), nothing_runs(folder):
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def spoil_metadata(folder: Path, mark: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_object(folder: Path, mark: Path) -> None:
    written = io.BytesIO()
    torch.save([Evil(mark)], written)
    (folder / "evil").write_bytes(written.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if "rng" in index.fqn)
    place.relative_path, place.offset, place.length = "evil", 0, len(written.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("spoil", [spoil_metadata, spoil_object])
def test_what_is_pickled_in_a_distributed_checkpoint_does_not_run(
    tmp_path: Path, spoil: Callable[[Path, Path], None]
) -> None:
    saved = distributed(tmp_path / "dcp")
    loaded = load(tmp_path / "dcp")
    assert torch.equal(loaded["weight"], saved["weight"])
    assert loaded["rng"]["python"] == saved["rng"]["python"]
    spoil(tmp_path / "dcp", tmp_path / "mark")
    with pytest.raises(RunError, match=f"{tmp_path}/dcp.*eval"):
        load(tmp_path / "dcp")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_random_states_that_another_numpy_has_pickled_are_loaded(tmp_path: Path, module: str) -> None:
    """numpy 1 names what makes an array in `numpy.core`, numpy 2 in `numpy._core`."""
    saved = {"rng": np.random.get_state()}
    torch.save(saved, tmp_path / "own.pt")
    with zipfile.ZipFile(tmp_path / "own.pt") as own, zipfile.ZipFile(tmp_path / "other.pt", "w") as other:
        for name in own.namelist():
            pickled = re.sub(rb"cnumpy\.(_core|core)\.multiarray\n", f"c{module}\n".encode(), own.read(name))
            other.writestr(name, pickled)
    with nothing_runs(tmp_path):
        loaded = torch.load(tmp_path / "other.pt")
    np.testing.assert_array_equal(loaded["rng"][1], saved["rng"][1])


def test_a_library_that_asks_torch_to_run_pickles_does_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    torch.save(Evil(tmp_path / "mark"), tmp_path / "file.pt")
    with pytest.raises(RunError, match="cannot be loaded"), nothing_runs(tmp_path):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert not (tmp_path / "mark").exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
