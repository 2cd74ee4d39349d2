"""An explorer without a model, for the tests of the pool. Apart from them, so that its process starts in a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import ExplorerProcess, LoadReport, Production
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.explorer.actor import ExplorerSpec
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt, Sample

NEWEST = Version(0, 5)
"""What `produce` loads."""


class StandIn:
    """Samples that depend on step, prompt and version, and in a last digit on the batch, as an explorer's do.

    It dies in the method whose name stands first in ``<spec.log_dir>/<name>``, a name a line; its successor finds
    the rest.
    """

    def __init__(self, spec: ExplorerSpec, synchronizer: SynchronizerClient) -> None:
        self._spec = spec
        self._synchronizer = synchronizer
        self._order = Path(str(spec.log_dir)) / spec.name
        self._held: Version | None = None

    def _die_if_told_to(self, method: str) -> None:
        orders = self._order.read_text().split() if self._order.exists() else []
        if orders[:1] == [method]:
            self._order.write_text("\n".join(orders[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    def warm_up(self) -> None:
        pass

    def start(self) -> str:
        self._die_if_told_to("start")
        return "node"

    def leave(self) -> Version | None:
        return self._held

    def rejoin(self, member: RoundMember, synchronizer: SynchronizerClient) -> str:
        self._die_if_told_to("rejoin")
        self._spec, self._synchronizer, self._held = replace(self._spec, member=member), synchronizer, None
        return "node"

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def attach(self, agents: dict[str, AgentClient]) -> ExplorerProcess:
        self._die_if_told_to("attach")
        self._agents = agents
        return {"pid": os.getpid(), "node": "node", "base": self._spec.engine.get("base"), "closes": False}

    def lease(self, version: Version) -> RoundMember:
        """Begin a load that does not end; who it is."""
        self._synchronizer.lease(self._spec.member, version).result(self._synchronizer.timeout_s)
        return self._spec.member

    def load(self, version: Version, broadcast: Broadcast | None = None) -> LoadReport:
        self._die_if_told_to("load")
        assert [(node, agent.handle) for node, agent in self._agents.items()] == [("node", "agent")]
        self._held = version
        return LoadReport(
            explorer=self._spec.name, version=version, digest=None, bytes_moved=1, total_s=0, paused_s=0, peak_rss=1
        )

    def generate(
        self, step: int, prompts: Sequence[Prompt], samples_per_prompt: int, drawing: Drawing = FOR_TRAINING
    ) -> SampleBatch:
        self._die_if_told_to("generate")
        assert self._held is not None
        return SampleBatch.of(
            Sample(
                step=step,
                prompt=prompt.index,
                sample=number,
                prompt_ids=(1, prompt.index),
                response_ids=(step, prompt.index, number),
                log_probs=(-1.0, -2.0, -float(len(prompts))),
                version=self._held,
                reward=float(number),
                exact=None,
                text=prompt.text,
                finished=True,
            )
            for prompt in reversed(prompts)
            for number in range(samples_per_prompt)
        )

    def produce(self, work: Sequence[tuple[int, Sequence[Prompt]]], samples_per_prompt: int) -> Production:
        self._die_if_told_to("produce")
        report = self.load(NEWEST) if self._held != NEWEST else None
        batches = [self.generate(step, prompts, samples_per_prompt) for step, prompts in work]
        return Production(SampleBatch.concatenate(batches), report)
