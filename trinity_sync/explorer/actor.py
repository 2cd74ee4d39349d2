"""An explorer: one rollout replica as a Ray actor. It loads versions and generates samples with them.

An explorer that holds no version (before its first load, during a load, after a failed one) refuses to generate. An
engine with `RolloutEngine.takes_beside` may load and generate at the same time; it labels each token with its version.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import ray

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import EngineDeathError, ExplorerProcess, LoadError, LoadReport, Production
from trinity_sync.actors.rank_client import Broadcast
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.config import TARGET, build, build_task, dtype_name, load
from trinity_sync.config.checks import sync_settings
from trinity_sync.config.lora_settings import adapter_of, travels
from trinity_sync.config.schema import Config, VllmConfig, VllmServerConfig
from trinity_sync.errors import ProcessLoss, RunError, TrinityError, WaitTimeout, grown
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.host.hardware import peak_memory_with_children
from trinity_sync.host.logs import own_log, story
from trinity_sync.host.masking import EnvironmentSecret
from trinity_sync.host.origin import error_text
from trinity_sync.host.process import without_collections
from trinity_sync.host.references import Settings, path_list
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import LOAD_HOPS, Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import FOR_TRAINING, Drawing, Prompt
from trinity_sync.sync.base import ExplorerSide, LayoutCache, SyncMode
from trinity_sync.tasks.base import Judge
from trinity_sync.tracking import units

if TYPE_CHECKING:
    from trinity_sync.sync.weight_loader import WeightLoader


class Explorer:
    """The actor's body; one call at a time."""

    def __init__(self, spec: ExplorerSpec, synchronizer: SynchronizerClient) -> None:
        own_log(spec.log_dir, spec.name)
        self._spec = spec
        self._synchronizer = synchronizer
        self._loader: WeightLoader | None = None
        self._left_with: Version | None = None  # held since `leave`

    def warm_up(self) -> None:
        """Import what `start` needs. Called at once, before the folder of the model exists."""
        with without_collections():
            import trinity_sync.sync.weight_loader  # noqa: F401

            load(f"explorer.{TARGET}", str(self._spec.engine[TARGET]))

    def start(self) -> str:
        """Build engine and task; return Ray's id of the node. Not `__init__`, whose errors Ray reports as a death."""
        self._task = build_task(self._spec.task, self._spec.seed)
        judge: Judge | None = getattr(self._task, "reward_judge", None)
        if judge is not None:  # its processes begin while the model loads
            judge.warm_up()
        if self._spec.deterministic:
            from trinity_sync.models.families import use_deterministic_kernels

            use_deterministic_kernels()
        self._engine: RolloutEngine = build("explorer", self._spec.engine, RolloutEngine)  # type: ignore[type-abstract]
        self._base = self._engine.base_digest(dtype_name(str(self._spec.sync["wire_dtype"])))
        story.info("up: %s of %s", type(self._engine).__name__, self._spec.engine["model_path"])
        return str(ray.get_runtime_context().get_node_id())

    def leave(self) -> Version | None:
        """Drop everything of an attempt that has ended but engine, task and the held version, by which `generate` still
        works; return that version. `rejoin` follows.
        """
        self._left_with, self._loader = None if self._loader is None else self._loader.held, None
        return self._left_with

    def rejoin(self, member: RoundMember, synchronizer: SynchronizerClient) -> str:
        """Leave an attempt that has ended, in place of a `start` for the next one; `attach` follows. Everything of that
        attempt is dropped but engine and task, so this explorer holds no version.
        """
        self._loader = self._left_with = None
        self._spec = replace(self._spec, member=member)
        self._synchronizer = synchronizer
        return str(ray.get_runtime_context().get_node_id())

    def attach(self, agents: dict[str, AgentClient]) -> ExplorerProcess:
        """Connect to the node agents (by Ray node id), whose slots exist by then; return where this explorer runs."""
        spec = self._spec
        from trinity_sync.sync.weight_loader import WeightLoader

        layouts = LayoutCache(agents, spec.sync_timeout_s)
        mode = build("sync", spec.sync, SyncMode)  # type: ignore[type-abstract]
        node = ray.get_runtime_context().get_node_id()
        side = ExplorerSide(
            name=spec.name,
            node=node,
            agents=agents,
            layouts=layouts,
            timeout_s=spec.sync_timeout_s,
            settings=spec.sync,
            lease_folder=partial(_lease_folder, spec),
            still_leased=lambda lease_id: self._synchronizer.holds(lease_id).result(self._synchronizer.timeout_s),
            on_fault=self._note_fault,
        )
        target = self._engine.target(mode, side, spec.verify)
        self._loader = WeightLoader(spec.member, target, self._synchronizer)
        closes = type(self._engine).close is not RolloutEngine.close
        return {"pid": os.getpid(), "node": node, "base": self._base, "closes": closes}

    def _note_fault(self, error: str) -> None:
        assert self._loader is not None, "a load found it"
        self._loader.note_fault(error)

    def load(self, version: Version | None, broadcast: Broadcast | None = None) -> LoadReport:
        """Load a committed version, the newest for None."""
        assert self._loader is not None, "attach() comes first"
        with _engine_alive():
            report = self._loader.load(version, broadcast)
            self._engine.after_load()
        story.info(
            "loaded version %s: %s in %s, paused %s%s",
            report.version,
            units.size(report.bytes_moved),
            units.seconds(report.total_s),
            units.seconds(report.paused_s),
            f", digest {report.digest}" if report.digest else "",
        )
        return replace(report, base=self._base)

    def generate(
        self, step: int, prompts: Sequence[Prompt], samples_per_prompt: int, drawing: Drawing = FOR_TRAINING
    ) -> SampleBatch:
        """Generate samples for the prompts, scored and labelled with their version."""
        return self._generate(step, prompts, samples_per_prompt, self._held_for(step), drawing)

    def _held_for(self, step: int) -> Version:
        held = self._loader.held if self._loader is not None else self._left_with
        if held is None:
            raise RunError(f"{self._spec.name} holds no version, so it cannot generate for step {step}")
        return held

    def _generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        held: Version,
        drawing: Drawing = FOR_TRAINING,
    ) -> SampleBatch:
        started = time.perf_counter()
        otherwise = {} if drawing == FOR_TRAINING else {"drawing": drawing}  # see `RolloutEngine.generate`
        with _engine_alive():
            batch = self._engine.generate(
                prompts, self._task, step=step, samples_per_prompt=samples_per_prompt, version=held, **otherwise
            )
        took = units.seconds(time.perf_counter() - started)
        story.info("made %d samples for step %d by version %s in %s", len(batch), step, held, took)
        return replace(batch, explorers=np.full(len(batch), self._spec.name))

    def produce(self, work: Sequence[tuple[int, Sequence[Prompt]]], samples_per_prompt: int) -> Production:
        """Load the newest version, unless it is loaded, then generate for prompts of several steps. An engine with
        `takes_beside` loads further versions at the same time. Raises LoadError if a load failed and the version
        before is lost; the next call repeats the load.
        """
        report = self._take_newest()
        if not self._engine.takes_beside:
            batches = [self.generate(step, prompts, samples_per_prompt) for step, prompts in work]
            return Production(SampleBatch.concatenate(batches), report)
        follower = Follower(self._newer, partial(self._loaded, None), self._holds, self._engine.give_up)
        try:
            with follower:
                batches = []
                for step, prompts in work:
                    with follower.paused():
                        held = self._held_for(step)
                    batches.append(self._generate(step, prompts, samples_per_prompt, held))
        except LoadError as error:
            raise error.after(report, follower.loads) from error.__cause__
        return Production(SampleBatch.concatenate(batches), report, tuple(follower.loads), follower.failed)

    def _holds(self) -> bool:
        return self._loader is not None and self._loader.held is not None

    def _take_newest(self) -> LoadReport | None:
        assert self._loader is not None, "attach() comes first"
        if self._loader.held == self._synchronizer.newest().result(self._synchronizer.timeout_s):
            return None
        return self._loaded(None)

    def _newer(self, timeout_s: float) -> Version | None:
        assert self._loader is not None, "attach() comes first"
        return self._synchronizer.wait_newer(self._loader.held, timeout_s).result(self._synchronizer.timeout_s)

    def _loaded(self, version: Version | None) -> LoadReport:
        try:
            return self.load(version)
        except Exception as error:  # a newer version may have replaced it, and its files or the lease are gone
            why = error if isinstance(error, TrinityError) else error_text(error)
            told, lost = f"{self._spec.name} could not load the newest version: {why}", isinstance(error, ProcessLoss)
            raise LoadError(told, lost=lost) from error

    def close(self) -> None:
        """Release the engine's resources outside of this process."""
        self._engine.close()

    def memory(self) -> dict[str, int]:
        """Return the peak resident bytes of this process and its engine's."""
        return {"peak_rss": peak_memory_with_children(), "pid": os.getpid()}


@contextmanager
def _engine_alive() -> Iterator[None]:
    """End this process if its engine is dead."""
    try:
        yield
    except EngineDeathError as error:
        story.error("%s; this explorer ends with it", error)
        os._exit(1)


@contextmanager
def _lease_folder(
    spec: ExplorerSpec, folder: Path, version: Version, clock: Callable[[], float] = time.time
) -> Iterator[Callable[[], None]]:
    """Lease a version's folder while it is read, so that the commit of a newer version does not delete it. The lease
    expires `sync.timeout_s`, and the time for the version's bytes, after the last read.
    """
    from trinity_sync.checkpoint.folder.leases import lease_checkpoint

    seconds, renewed = spec.sync_timeout_s, clock()

    def renew() -> None:
        nonlocal renewed
        if clock() - renewed < seconds / 4:
            return
        renewed = clock()
        with suppress(OSError):  # on a full disk, reading goes on: the reader notices a deleted folder itself
            lease.renew(seconds)

    with lease_checkpoint(folder.parent, version.step, reader=spec.name, seconds=seconds, clock=clock) as lease:
        seconds = grown(seconds, LOAD_HOPS * lease.nbytes)
        with suppress(OSError):
            lease.renew(seconds)
        yield renew


# Loads while an engine generates (`RolloutEngine.takes_beside`).


_POLL_S = 0.5
"""Limit of one wait for a newer version, and so of the thread's life after the generation."""


class Follower:
    """Loads each version that is published while its block runs.

    After the first failed load it tries no more. If that load has destroyed the weights, it stops the generation, and
    the block raises `LoadError`.

    Args:
        newer: waits so many seconds for a newer version than the loaded one and returns it; None: the run is over.
            Raises `WaitTimeout` if there is none yet.
        give_up: has the current generation raise, and each new one.

    Attributes:
        loads: the loads, each with the seconds since the block's begin.
        failed: why a load failed, where the version before is intact.
    """

    def __init__(
        self,
        newer: Callable[[float], Version | None],
        load: Callable[[], LoadReport],
        holds: Callable[[], bool],
        give_up: Callable[[], None],
    ) -> None:
        self._newer, self._load, self._holds, self._give_up = newer, load, holds, give_up
        self._loading = threading.Lock()
        self._over = False
        self._error: LoadError | None = None
        self.loads: list[tuple[float, LoadReport]] = []
        self.failed: str | None = None

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        threading.Thread(target=self._follow, name="follow versions", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._loading:  # waits for a running load
            self._over = True
        if self._error is not None:
            raise self._error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for a running load, prevent the next in the block. Raises LoadError if one destroyed the weights."""
        with self._loading:
            if self._error is not None:
                raise self._error
            yield

    def _follow(self) -> None:
        while not self._over:
            try:
                newest = self._newer(_POLL_S)
            except WaitTimeout:
                continue
            except Exception as error:
                with self._loading:
                    self._failed(error)
                return
            if newest is None or not self._take():
                return

    def _take(self) -> bool:
        with self._loading:
            if self._over:
                return False
            after = time.perf_counter() - self._began
            try:
                self.loads.append((after, self._load()))
            except Exception as error:
                self._failed(error)
                return False
        return True

    def _failed(self, error: Exception) -> None:
        """Note a failure. Called with the lock."""
        if self._over or self._holds():
            self.failed = str(error)
            return
        lost = isinstance(error, ProcessLoss)
        self._error = error if isinstance(error, LoadError) else LoadError(str(error), lost=lost)
        self._error.__cause__ = error.__cause__
        self._give_up()


# The plain values that an explorer is built from. The driver makes them, without torch.


_OF_THE_POOL = ("kind", "replicas", "max_restarts", "check_agreement", "timeout_s")
"""Keys of `explorer` that engines do not get."""


@dataclass(frozen=True, kw_only=True)
class ExplorerSpec:
    """The values that an explorer is built from."""

    member: RoundMember  # its name, such as ``"explorer-0"``, and a number that each restart changes
    engine: Mapping[str, object]  # class of the `RolloutEngine`, and its keyword arguments
    task: Settings  # the `task` node of the config, to be instantiated in the explorer for its rewards
    seed: int
    deterministic: bool
    sync: Mapping[str, object]  # the `sync` node of the config, to be instantiated for the explorer's half of the mode
    verify: str
    sync_timeout_s: float  # a `WaitLimit`
    log_dir: str | None
    processes: int = 1  # processes that hold its weights; one GPU each where there are GPUs
    servers: Sequence[str] = ()  # URLs of servers, one for each explorer

    @property
    def name(self) -> str:
        return self.member.name

    def of(self, member: RoundMember) -> ExplorerSpec:
        """Return the spec of one explorer."""
        if not self.servers:
            return replace(self, member=member)
        url = self.servers[int(member.name.rpartition("-")[2])]
        return replace(self, member=member, engine={**self.engine, "url": url})


def explorer_spec(cfg: Config, model_path: str, log_dir: str) -> ExplorerSpec:
    """Make the spec that all explorers share, without a `member`."""
    engine = {name: value for name, value in vars(cfg.explorer).items() if name not in _OF_THE_POOL} | {
        "model_path": model_path,
        "response_length": cfg.task["response_length"],
        "prompt_length": cfg.task.get("prompt_length"),
        "seed": cfg.seed,
        "attn_implementation": cfg.model.attn_implementation,
        "trust_remote_code": cfg.model.trust_remote_code,
    }
    # only where they are set, so that users' engines need not know them
    if cfg.task.get("too_long") == "truncate":
        engine["truncate_prompts"] = True
    if cfg.task.get("chat_template"):
        engine["chat_template"] = cfg.task["chat_template"]
    if cfg.sync.keep_fp32 is not None:
        engine["keep_fp32"] = list(cfg.sync.keep_fp32)
    servers: list[str] = []
    if isinstance(cfg.explorer, VllmServerConfig):
        servers, name = path_list(engine.pop("url")), engine.pop("key_env")
        engine["key"] = None if name is None else EnvironmentSecret(str(name), os.environ[str(name)])
        engine |= {"timeout_s": cfg.explorer.timeout_s, "start_timeout_s": cfg.cluster.start_timeout_s}
    if travels(cfg) == "adapter":
        adapter = adapter_of(cfg.model.lora)
        assert adapter is not None, "an adapter travels only if one is trained"
        engine["adapter"] = adapter
    return ExplorerSpec(
        member=RoundMember.new(""),
        engine=engine,
        task=cfg.task,
        seed=cfg.seed,
        deterministic=cfg.trainer.deterministic and cfg.trainer.schedule == "lockstep",
        sync=sync_settings(vars(cfg.sync), cfg.explorer.kind),
        verify=cfg.sync.verify,
        sync_timeout_s=cfg.sync.limit_s,
        log_dir=log_dir,
        processes=_processes(cfg),
        servers=servers,
    )


def _processes(cfg: Config) -> int:
    if isinstance(cfg.explorer, VllmServerConfig):
        return 0  # its server has them
    return cfg.explorer.tp if isinstance(cfg.explorer, VllmConfig) else 1
