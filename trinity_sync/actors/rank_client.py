"""Client of a trainer rank, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.actors.client import MethodNames, RayClient, RemoteMethod
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.wire import WireFormat

if TYPE_CHECKING:
    import numpy as np
    from ray.actor import ActorHandle

    from trinity_sync.trainer.group import TrainerRank
    from trinity_sync.trainer.worker import TrinityWorker
    from trinity_sync.weights.layout import Cut, PartLayout
else:
    TrainerRank = MethodNames()
    TrinityWorker = MethodNames()


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
    """Client of a trainer rank. Collective calls go to all ranks.

    Args:
        handle: Ray's handle of the rank.
        rank: the rank's number.
    """

    def __init__(self, handle: ActorHandle, rank: int) -> None:
        super().__init__(handle, f"trainer rank {rank}")
        self.rank = rank

    import_engine = RemoteMethod(TrainerRank.import_engine, "import its engine")
    make_model = RemoteMethod(TrainerRank.make_model, "make the model {2}")
    initialise = RemoteMethod(TrainerRank.initialise, "build its engine")
    attach = RemoteMethod(TrinityWorker.attach, "attach to its node agent")

    train_step = RemoteMethod(TrinityWorker.train_step, "train step {0}")
    divergences = RemoteMethod(TrinityWorker.divergences, "compare step {0} with the reference")
    adapted = RemoteMethod(TrinityWorker.adapted, "adapt the coefficient")
    measure_loss = RemoteMethod(TrinityWorker.measure_loss, "measure the loss of the validation")
    recompute = RemoteMethod(TrinityWorker.recompute, "compute log-probs of the first samples")
    begin_at = RemoteMethod(TrinityWorker.begin_at, "set the schedule")

    stage = RemoteMethod(TrinityWorker.stage, "stage version {0}")
    send = RemoteMethod(TrinityWorker.send, "send version {0.version}")

    save = RemoteMethod(TrinityWorker.save, "copy the state of step {0}")
    save_blocked = RemoteMethod(TrinityWorker.save_blocked, "say how long they waited")
    finish_saves = RemoteMethod(TrinityWorker.finish_saves, "finish their background saves")
    load = RemoteMethod(TrinityWorker.load, "load {0}")
    writer_of = RemoteMethod(TrinityWorker.writer_of, "read {0}")

    memory = RemoteMethod(TrinityWorker.memory, "tell its memory")


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
