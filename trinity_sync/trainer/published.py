"""What the explorers hold, kept in a full checkpoint where it is not the checkpoint's own weights.

Where `checkpoint.interval` is no multiple of `sync.interval`, the explorers are behind the trainer when a checkpoint is
saved. A resume that gave them the checkpoint's weights would sample other data than the run that went on. So the node
agents write the slot of the newest published version beside the training state, below ``explorer/``, and a resume
publishes that version again before anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trinity_sync.actors.agent import AgentClient
from trinity_sync.actors.calls import results
from trinity_sync.actors.synchronizer import SynchronizerClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shard_file import ShardFile

EXPLORER = "explorer"
"""Folder of the shard files below the checkpoint's."""

_FILE = "version.json"


class PublishedState:
    """Saves and restores the newest published version.

    Args:
        synchronizer: the run's synchronizer.
        agents: the agents of the nodes that hold parts, by Ray node id.
        timeout_s: limit of each wait, seconds.
    """

    def __init__(self, synchronizer: SynchronizerClient, agents: Mapping[str, AgentClient], timeout_s: float) -> None:
        self._synchronizer = synchronizer
        self._agents = agents
        self._timeout_s = timeout_s

    def parts(self) -> list[str]:
        """Name the parts that `save` adds to a checkpoint."""
        return [_part(node) for node in self._agents]

    def save(self, step: int, folder: Path) -> tuple[str, str]:
        """Have the agents write the newest published version into a staging folder, and report it; does not wait.

        Returns:
            (name below `folder`, contents) of a file that goes into the driver's part.
        """
        synchronizer = self._synchronizer
        newest = synchronizer.newest().result(synchronizer.timeout_s)
        assert newest is not None, "explorers hold a version before the first step"
        for node, agent in self._agents.items():
            leased = synchronizer.lease(f"{_part(node)} of step {step}", newest)
            agent.save_published(step, str(folder), _part(node), leased.result(synchronizer.timeout_s))
        return f"{EXPLORER}/{_FILE}", json.dumps({"step": newest.step}) + "\n"

    def restore(self, folder: Path, version: Version, slot: int) -> None:
        """Have the agents fill a slot with what `save` wrote below the checkpoint's `folder`, as the ranks would."""
        calls = [agent.restore_published(version, slot, str(folder / EXPLORER)) for agent in self._agents.values()]
        results(calls, self._timeout_s)


def published_step(folder: Path, layouts: Sequence[PartLayout]) -> int | None:
    """Read the step of the version in a checkpoint's folder that explorers held; None: there is none, or it cannot be
    restored part by part.

    Args:
        folder: the checkpoint's folder.
        layouts: of the run's parts. Those that were saved are others where other ranks saved them, or where something
            else was published, or in other dtypes.

    Raises:
        RunError: a file cannot be read.
    """
    path = folder / EXPLORER / _FILE
    if not path.exists():
        return None
    wanted = {f"{layout.part}.safetensors": layout for layout in layouts}
    saved = {file.name: file for file in (folder / EXPLORER).glob("*.safetensors")}
    if saved.keys() != wanted.keys() or not all(_layout_of(file).lies_as(wanted[name]) for name, file in saved.items()):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _layout_of(path: Path) -> PartLayout:
    with ShardFile(path) as file:
        return file.layout


def _part(node: str) -> str:
    return f"{EXPLORER}-{node}"
