"""Client of a trainer rank, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.calls import Call
from trinity_sync.actors.client import RayClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.wire import WireFormat

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from trinity_sync.samples.batch import PairBatch, SampleBatch
    from trinity_sync.weights.layout import Cut, PartLayout


class Digested(NamedTuple):
    """Weights as they were read: their version digest, hex, and the dtypes of which it is."""

    digest: str
    wire: WireFormat


class Untrained(NamedTuple):
    """Tensors that are not trained: their folder, absolute, the digest of all of them as they are stored, hex, and
    which of them are a vision tower's.
    """

    folder: str
    names: tuple[str, ...]
    digest: str
    tower: tuple[str, ...] = ()


class LossSum(NamedTuple):
    """The loss of a share of some pairs.

    Attributes:
        share: of which data-parallel rank; ranks that share a model compute the same.
        loss: of all tokens that are learnt together, in nats.
        tokens: how many these are.
    """

    share: int
    loss: float
    tokens: int


class Recomputed(NamedTuple):
    """The log-probs that training computes of a share of some samples; ranks that share a model compute the same.

    Attributes:
        rows: int64, numbers of these samples in their batch; some stand there several times.
        log_probs: float32, of the tokens of their responses, end to end, nats.
    """

    rows: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a rank tells the driver once its engine is up.

    Attributes:
        rank: the rank's number.
        part: the name of what it stages.
        layout: how the part is laid out, or None for a rank that holds nothing of its own.
        saved: rank 0: name -> (dtype, shape) of each tensor that a version has to hold; see `check_whole`.
        node: Ray's id of the rank's node.
        pid: its process id, shown where the process dies.
        base: rank 0 of a run that trains an adapter: what the model's folder has of the adapter's base.
        adapter: rank 0 of such a run: what the adapter's ``adapter_config.json`` says.
        reference: rank 0: digest of the stored weights of the reference that the policy is compared with, hex; None:
            there is none, or it is the adapter's base.
        left_out: rank 0: tensors of the model's folder that the engine has no use for; None: there are none.
    """

    rank: int
    part: str
    layout: PartLayout | None
    node: str
    pid: int
    saved: dict[str, tuple[str, tuple[int, ...]]] | None = None
    base: Digested | None = None
    adapter: Mapping[str, object] | None = None
    reference: str | None = None
    left_out: Untrained | None = None


class Divergences(NamedTuple):
    """How far responses are from what the reference would have said, of the samples that a rank has.

    Attributes:
        rows: int64, numbers of these samples in their batch.
        sums: float64, over the tokens of each response, nats.
        means: float32, likewise.
    """

    rows: np.ndarray
    sums: np.ndarray
    means: np.ndarray


class RankClient(RayClient):
    """See `trinity_sync.trainer.worker.TrinityWorker`, of which each method here has one. Those that are collective are
    called on all ranks.

    Args:
        handle: Ray's handle of the rank.
        rank: the rank's number.
    """

    def __init__(self, handle: ActorHandle, rank: int) -> None:
        super().__init__(handle, f"trainer rank {rank}")
        self.rank = rank

    def import_engine(self) -> Call[None]:
        """Have it import what the engine needs."""
        return self._call("import its engine", "import_engine")

    def make_model(self, architecture: Mapping[str, object], seed: int, folder: str) -> Call[None]:
        """Have it write a model of random weights, and its tokenizer."""
        return self._call(f"make the model {folder}", "make_model", architecture, seed, folder)

    def initialise(self) -> Call[RankInfo]:
        """Have it build model, optimizer and scheduler. Collective."""
        return self._call("build its engine", "initialise")

    def attach(
        self,
        agent: AgentClient,
        paths: Mapping[int, str],
        synchronizer: SynchronizerClient,
        make_coordinator: Callable[..., object],
        timeout_s: float,
    ) -> Call[None]:
        """Have it connect to its node's agent, its slots (slot -> file), the synchronizer and, through the
        coordinator that is made of `node_id` and `job_id`, the monitor.
        """
        arguments = (agent, dict(paths), synchronizer, make_coordinator, timeout_s)
        return self._call("attach to its node agent", "attach", *arguments)

    def train_step(
        self, step: int, batch: ObjectRef[SampleBatch | PairBatch], advantages: np.ndarray | None
    ) -> Call[dict[str, float]]:
        """Have it train on its share of the batch; the answer is its metrics. Collective."""
        return self._call(f"train step {step}", "train_step", step, batch, advantages)

    def divergences(self, step: int, batch: ObjectRef[SampleBatch]) -> Call[Divergences | None]:
        """Have it measure how far its share of the batch is from the reference, before it trains on it; None: it is
        not the one that can. Collective.
        """
        return self._call(f"compare step {step} with the reference", "divergences", step, batch)

    def adapted(self, coefficient: float, divergence: float, samples: int) -> Call[float]:
        """Have it compute the next coefficient of the divergence; see `trainer.divergence.adapted`."""
        return self._call("adapt the coefficient", "adapted", coefficient, divergence, samples)

    def measure_loss(self, batch: ObjectRef[PairBatch]) -> Call[LossSum | None]:
        """Have it measure the loss of its share of a batch, without learning; None: another stage of the pipeline has
        it. Collective.
        """
        return self._call("measure the loss of the validation", "measure_loss", batch)

    def recompute(self, batch: ObjectRef[SampleBatch]) -> Call[Recomputed | None]:
        """Have it compute the log-probs of its share of samples as training does, without learning; None: another stage
        of the pipeline has them. Collective.
        """
        return self._call("compute log-probs of the first samples", "recompute", batch)

    def stage(self, version: Version, slot: int, *, lazily: bool = False) -> Call[float]:
        """Have it copy its shards into a slot and tell the agent; the answer is how many seconds it stood still so far.
        Collective where the engine offloads.
        """
        return self._call(f"stage version {version}", "stage", version, slot, lazily)

    def send(self, broadcast: Broadcast) -> Call[int]:
        """Have it send its staged part to explorers; the answer is the bytes that were sent."""
        return self._call(f"send version {broadcast.version}", "send", broadcast)

    def save(self, step: int, folder: str) -> Call[float]:
        """Have it begin to save the training state into a staging folder; the answer: seconds in which it stood still.
        Collective.
        """
        return self._call(f"copy the state of step {step}", "save", step, folder)

    def save_blocked(self, step: int) -> Call[float]:
        """Ask how many seconds it stood still for the save of a step."""
        return self._call("say how long they waited", "save_blocked", step)

    def finish_saves(self) -> Call[None]:
        """Have it wait until its saves are in other hands, and have these hurry: training is over."""
        return self._call("finish their background saves", "finish_saves")

    def load(self, folder: str) -> Call[None]:
        """Have it restore the training state from a full checkpoint's folder. Collective."""
        return self._call(f"load {folder}", "load", folder)

    def begin_at(self, step: int) -> Call[None]:
        """Have it go to the place in the learning-rate schedule after a step. Collective."""
        return self._call("set the schedule", "begin_at", step)

    def writer_of(self, folder: str) -> Call[str | None]:
        """Ask who writes in a checkpoint folder, as it sees it."""
        return self._call(f"read {folder}", "writer_of", folder)

    def memory(self) -> Call[dict[str, int]]:
        """Ask for the peak resident bytes of its process."""
        return self._call("tell its memory", "memory")


# What all who take part in the broadcast of a version know of it.


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """One version, sent by the trainer's ranks to explorers.

    Attributes:
        id: unique in the run.
        version: the version that is sent.
        slot: number of the slot in which the senders have it.
        host, port: address of the store at which the members meet, served by the driver.
        senders: parts in sender order, one per rank that holds anything.
        explorers: names of the receivers, in order: an explorer's own, or those of its processes, see `receivers`.
        transport: ``gloo`` or ``nccl``.
        cut: what pieces the parts travel in: buckets where each is checked before it is used, else tensors.
        timeout_s: limit of each operation, seconds.
    """

    id: int
    version: Version
    slot: int
    host: str
    port: int
    senders: Sequence[str]
    explorers: Sequence[str]
    transport: str
    cut: Cut
    timeout_s: float

    def prefix(self, sender: int) -> str:
        """Return the prefix of the keys in the store by which one sender and the explorers meet."""
        return f"round-{self.id}/sender-{sender}/"


def receivers(explorer: str, processes: int) -> list[str]:
    """Name the processes of an explorer that receive weights: as the explorer where it is one process."""
    return [explorer] if processes == 1 else [f"{explorer}.{rank}" for rank in range(processes)]
