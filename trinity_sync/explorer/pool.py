"""All explorers of a run: started together, given their prompts by a fixed rule, restarted where the config allows it.

What an explorer generates depends on the seed, the step, the prompt and the version only, so a restarted one that
loads the same version and generates again gives the same samples.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from trinity_sync.errors import RunError, WaitTimeout
from trinity_sync.explorer.actor import Explorer, Produced
from trinity_sync.explorer.spec import ExplorerSpec
from trinity_sync.protocol.members import Member
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.assignment import assign
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Delivery, LoadReport
from trinity_sync.sync.remote import MemberDied, resolve, resolve_one
from trinity_sync.sync.synchronizer import Synchronizer

log = logging.getLogger(__name__)

Deliver = Callable[[dict[str, Any], Version], Delivery]


class ExplorerPool:
    """The run's explorers by name.

    Args:
        spec: of each, but for who it is.
        replicas: how many.
        synchronizer: the run's synchronizer.
        num_gpus: GPUs reserved for each.
        max_restarts: deaths that the pool makes good, over the whole run.
        start_timeout_s: limit until one is up, seconds.
        timeout_s: limit of a generation, seconds.
        on_fault: told of each death that was made good: (where, error).
    """

    def __init__(
        self,
        spec: ExplorerSpec,
        *,
        replicas: int,
        synchronizer: Synchronizer,
        num_gpus: float,
        max_restarts: int,
        start_timeout_s: float,
        timeout_s: float,
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._spec = spec
        self._synchronizer = synchronizer
        self._num_gpus = num_gpus
        self._restarts_left = max_restarts
        self._lock = threading.Lock()
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._agents: dict[str, Any] = {}
        self._held: Version | None = None
        self._members: dict[str, Member] = {}
        self.handles: dict[str, Any] = {name: self._create(name) for name in (f"explorer-{i}" for i in range(replicas))}
        self._starting: dict[str, Any] = {}

    def _create(self, name: str) -> Any:
        actor = ray.remote(Explorer).options(num_cpus=1, num_gpus=self._num_gpus)
        self._members[name] = Member.new(name)
        handle = actor.remote(replace(self._spec, member=self._members[name]), self._synchronizer)
        handle.warm_up.remote()
        return handle

    def start(self) -> None:
        """Have all build their engines, once the model's folder is there. Does not wait; `attach` does."""
        self._starting = {name: handle.start.remote() for name, handle in self.handles.items()}

    def introduce(self, agents: dict[str, Any]) -> None:
        """Say which node agents there are; `join` connects explorers to them one by one."""
        self._agents = agents

    def join(self, name: str) -> None:
        """Connect one explorer to the node agents; waits until it is up. Any thread."""
        self._connect({name: self._starting.pop(name)})

    def attach(self, agents: dict[str, Any]) -> None:
        """Connect all to the node agents; waits until every explorer is up."""
        self.introduce(agents)
        starting, self._starting = self._starting, {}
        self._connect(starting)

    def _connect(self, starting: dict[str, Any]) -> None:
        resolve(starting, "start", self._start_timeout_s)
        calls = {name: self.handles[name].attach.remote(self._agents) for name in starting}
        resolve(calls, "attach to the node agents", self._start_timeout_s)

    def load(self, version: Version, deliver: Deliver) -> list[LoadReport]:
        """Have all explorers load a version through the sync mode's `deliver`.

        Raises:
            RunError: an explorer died and no restart is left.
        """
        reports = self._load(dict(self.handles), version, deliver)
        self._held = version
        return sorted(reports, key=lambda report: report.explorer)

    def _load(self, missing: dict[str, Any], version: Version, deliver: Deliver) -> list[LoadReport]:
        reports: list[LoadReport] = []
        while missing:
            try:
                delivery = deliver(missing, version)
            except MemberDied as death:
                if death.who not in self.handles:
                    raise
                self._replace(death)
                missing = {name: self.handles[name] for name in missing}
                continue
            reports += delivery.reports
            for lost in delivery.lost.values():
                self._replace(lost)
            missing = {name: self.handles[name] for name in delivery.lost}
        return reports

    def generate(self, step: int, prompts: Sequence[Prompt], samples_per_prompt: int, deliver: Deliver) -> SampleBatch:
        """Samples for all prompts of a step, sorted by prompt and sample.

        Raises:
            RunError: an explorer died and no restart is left, or did not finish in time.
        """
        shares = dict(zip(self.handles, assign(len(prompts), len(self.handles)), strict=True))
        while True:
            calls = {
                name: handle.generate.remote(step, [prompts[i] for i in shares[name]], samples_per_prompt)
                for name, handle in self.handles.items()
                if len(shares[name])
            }
            try:
                results = resolve(calls, f"generate for step {step}", self._timeout_s)
            except MemberDied as death:
                self._replace(death)
                assert self._held is not None, "explorers load before they generate"
                # The others hold it, and may be generating for longer than a load may take.
                self._load({death.who: self.handles[death.who]}, self._held, deliver)
                continue
            return SampleBatch.concatenate(list(results.values())).sorted()

    def produce(self, name: str, work: Sequence[tuple[int, Sequence[Prompt]]], samples_per_prompt: int) -> Produced:
        """Have one explorer take the newest version and make samples; see `Explorer.produce`. Any thread.

        Raises:
            LoadFailed: it could not take the newest version.
            MemberDied: it is gone.
            WaitTimeout: it did not answer in time.
            RunError: the samples cannot be made.
        """
        call = self.handles[name].produce.remote(work, samples_per_prompt)
        return resolve_one(call, name, "generate", self._timeout_s)

    def replace(self, name: str, why: Exception) -> bool:
        """Start an explorer again that is gone, hangs or loads nothing. Any thread; the others go on meanwhile.

        Returns:
            False: no restart is left; the explorer is gone for good.
        """
        while self._may_restart():
            self._on_fault(name, str(why))
            log.warning("%s; starting it again (%d restarts left)", why, self._restarts_left)
            self._forget(name)
            try:
                self._start_anew(name)
                return True
            except (MemberDied, WaitTimeout) as error:
                why = error
        self._forget(name)
        return False

    def end(self, name: str) -> None:
        """Kill an explorer, whatever it does; from now on none is started again."""
        with self._lock:
            self._restarts_left = 0
        ray.kill(self.handles[name])

    def _forget(self, name: str) -> None:
        """Make sure that nothing of an explorer is left: neither a process that hangs nor a lease."""
        ray.kill(self.handles[name])
        self._synchronizer.call("drop_reader", self._members[name])

    def _may_restart(self) -> bool:
        with self._lock:
            self._restarts_left -= 1
            return self._restarts_left >= 0

    def _start_anew(self, name: str) -> None:
        self.handles[name] = self._create(name)
        self._connect({name: self.handles[name].start.remote()})

    def _replace(self, death: Exception) -> None:
        assert isinstance(death, MemberDied)
        if not self._may_restart():
            raise RunError(
                f"{death}. See logs/{death.who}.log. Set explorer.max_restarts above 0 to have explorers restarted"
            ) from death
        self._on_fault(death.who, str(death))
        log.warning("%s; starting it again (%d restarts left)", death, self._restarts_left)
        self._synchronizer.call("drop_reader", self._members[death.who])
        self._start_anew(death.who)
