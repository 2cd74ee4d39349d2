"""A store of versions without a run: what the publisher hands over, copied by `VersionCopies`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpoint import written
from tests.checkpoint.histories import commit_weights
from tests.checkpoint.mirror_places import OWNER, Events, quick
from trinity_sync.checkpoint.folder.owner import Owner
from trinity_sync.checkpoint.mirror import follower, run_mirror
from trinity_sync.checkpoint.mirror.copies import DamagedError, ForeignError, Mirror, Storage
from trinity_sync.checkpoint.mirror.run_mirror import MirrorError, MirrorSettings, RunMirror, VersionCopies, described
from trinity_sync.protocol.parts import delta_file
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.part_delta import PartEncoder
from trinity_sync.weights.shard_file import open_shard_file
from trinity_sync.weights.tensors import saved_tensors, state_digest

LIMIT_S = 60.0


def call_here(
    place: str,
    settings: MirrorSettings,
    owner: Owner,
    work: Callable[[Mirror], object],
    *,
    say: Callable[[str], object] = lambda text: None,
    **_: object,
) -> object:
    """As `run_mirror.call`, without a process of its own, which takes a second."""
    try:
        return work(Mirror(lambda: Storage(place, settings.options), owner, say, key=settings.key))
    except Exception as error:
        raise MirrorError(described(error), final=isinstance(error, DamagedError | ForeignError)) from error


@contextmanager
def calls_here() -> Iterator[pytest.MonkeyPatch]:
    """Work at the store is done in this process meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_mirror, "call", call_here)
        patch.setattr(run_mirror, "run_when_idle", lambda: None)
        patch.setattr(follower, "call", call_here)
        yield patch


def state(number: int) -> Mapping[str, torch.Tensor]:
    """The weights of a version: a few elements differ from one to the next."""
    found = {name: tensor.bfloat16() for name, tensor in saved_tensors(written.small_model("tied")).items()}
    for tensor in found.values():
        tensor.view(-1)[: number + 1] += number + 1
    return found


class PretendRun:
    """Publishes versions of a small model in two parts to a store; every third in full."""

    def __init__(self, folder: Path, place: str, *, attempt: int = 0, owner: Owner = OWNER, **settings: object) -> None:
        self.checkpoints, self.attempt, self.events = folder / "checkpoints", attempt, Events()
        written.write_companions(written.small_model("tied"), folder / "model")
        keep: dict[str, object] = {"keep": "bases", "key": "sync.store", "options": {}, **settings}
        self.store = RunMirror(place, quick(**keep), owner)
        self.copies = VersionCopies(
            self.checkpoints,
            self.store,
            model=folder / "model" / "huggingface",
            start=None,
            report=self.events.report,
        )
        self._encoders: dict[str, PartEncoder] = {}
        self._before: tuple[int, list[Path]] | None = None
        self._count = 0

    def publish(self, step: int) -> str:
        """Publish the weights of a step; return their digest."""
        weights, full, deltas = state(step), None, []
        folder = self.checkpoints / ".deltas" / f"{self.attempt}-{step}"
        files = written.write_parts(folder, weights, 2)
        if self._count % 3 == 0:
            full = commit_weights(self.checkpoints, step, weights, attempt=self.attempt)
            shutil.rmtree(full / "actor" / "huggingface")  # of a checkpoint for versions
        if self._before is not None:
            start = (self.attempt, self._before[0])
            with ThreadPoolExecutor(1) as pool:
                for old, new in zip(self._before[1], files, strict=True):
                    (layout, newer), (_, older) = open_shard_file(new), open_shard_file(old)
                    encoder = self._encoders.setdefault(layout.part, PartEncoder(layout, "gap8z"))
                    one, *_ = encoder.encode(start, (self.attempt, step), (older, newer), pool)
                    deltas.append(folder / delta_file(layout.part, one.start))
                    deltas[-1].write_bytes(b"".join(one.parts))
        digest = state_digest(dict(weights), "BF16")
        self.copies.add(Version(self.attempt, step), digest, full, deltas)
        self._before, self._count = (step, files), self._count + 1
        return digest

    def publish_all(self, *steps: int) -> None:
        """Publish these, and wait until they are copied."""
        for step in steps:
            self.publish(step)
        assert self.copies.finish(LIMIT_S) == {}
