"""What an explorer asks the node agents: layouts, once and not once per version; and where a load went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_sync.errors import RunError
from trinity_sync.protocol.versions import Version
from trinity_sync.sync.parts import PartInfo
from trinity_sync.sync.remote import resolve_one
from trinity_sync.weights.layout import PartLayout


class LayoutCache:
    """Layouts by digest, fetched from the agent that holds the part.

    Args:
        agents: Ray node id -> agent handle.
        timeout_s: limit of a fetch, seconds.
    """

    def __init__(self, agents: Mapping[str, Any], timeout_s: float) -> None:
        self._agents = agents
        self._timeout_s = timeout_s
        self._known: dict[str, PartLayout] = {}

    def get(self, info: PartInfo) -> PartLayout:
        """The layout of a part.

        Raises:
            RunError: the agent answered with another one than the version was staged in.
        """
        if info.layout not in self._known:
            call = self._agents[info.node].layout.remote(info.part)
            who = f"the agent of node {info.node}"
            layout = PartLayout.from_json(resolve_one(call, who, f"describe {info.part}", self._timeout_s))
            if layout.digest != info.layout:
                raise RunError(
                    f"{who} describes {info.part} by layout {layout.digest}, the version was staged in {info.layout}"
                )
            self._known[info.layout] = layout
        return self._known[info.layout]

    def tensor_digests(self, version: Version) -> dict[str, bytes]:
        """The 16-byte digests of a version's tensors as they were staged; empty where they are not known any more."""
        found: dict[str, bytes] = {}
        for node, agent in self._agents.items():
            who = f"the agent of node {node}"
            call = agent.tensor_digests.remote(version)
            found |= resolve_one(call, who, f"tell the digests of version {version}", self._timeout_s)
        return found
