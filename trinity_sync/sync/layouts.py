"""What an explorer asks the node agents: layouts, once and not once per version; and where a load went wrong."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.errors import RunError
from trinity_sync.protocol.parts import PartInfo
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.layout import PartLayout


class LayoutCache:
    """Layouts by digest, fetched from the agent that holds the part.

    Args:
        agents: Ray node id -> agent.
        timeout_s: limit of a fetch, seconds.
    """

    def __init__(self, agents: Mapping[str, AgentClient], timeout_s: float) -> None:
        self._agents = agents
        self._timeout_s = timeout_s
        self._known: dict[str, PartLayout] = {}

    def get(self, info: PartInfo) -> PartLayout:
        """Return the layout of a part.

        Raises:
            RunError: the agent answered with another one than the version was staged in.
        """
        if info.layout not in self._known:
            agent = self._agents[info.node]
            layout = agent.layout(info.part).result(self._timeout_s)
            if layout.digest != info.layout:
                raise RunError(
                    f"{agent.who} describes {info.part} by layout {layout.digest}, the version was staged in "
                    f"{info.layout}"
                )
            self._known[info.layout] = layout
        return self._known[info.layout]

    def learn(self, layout: PartLayout) -> None:
        """Remember a layout that somebody else has fetched."""
        self._known[layout.digest] = layout

    def tensor_digests(self, version: Version) -> dict[str, bytes]:
        """Return the 16-byte digests of a version's tensors as they were staged; empty where they are forgotten."""
        found: dict[str, bytes] = {}
        for agent in self._agents.values():
            found |= agent.tensor_digests(version).result(self._timeout_s)
        return found
