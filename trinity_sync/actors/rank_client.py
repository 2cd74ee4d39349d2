"""Client of a trainer rank, and the messages of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trinity_sync.actors.agent_client import SharedDelta
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


class WeightsDigest(NamedTuple):
    """Version digest of weights (hex), and the dtypes that it was computed in."""

    digest: str
    wire: WireFormat


class UntrainedTensors(NamedTuple):
    """Tensors that are not trained."""

    folder: str  # absolute
    names: tuple[str, ...]
    digest: str  # of all of them as stored, hex
    tower: tuple[str, ...] = ()  # those of a vision tower


class LossSum(NamedTuple):
    """The loss of a data-parallel share of some pairs. Ranks that share a model compute the same."""

    share: int  # the data-parallel rank
    loss: float  # sum over the trained tokens, nats
    tokens: int  # their number


class LogProbShare(NamedTuple):
    """The log-probs that training computes for a share of some samples. Ranks that share a model compute the same."""

    rows: np.ndarray  # int64, numbers of the samples in their batch; may repeat
    log_probs: np.ndarray  # float32, of the tokens of all responses, concatenated, nats


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank's report to the driver once its engine is ready. The fields from `saved` on are set by rank 0 alone."""

    rank: int
    part: str
    layout: PartLayout | None  # None: the rank holds no weights of its own
    node: str  # Ray's id
    pid: int
    saved: dict[str, tuple[str, tuple[int, ...]]] | None = None  # name -> (dtype, shape) of a version's tensors
    base: WeightsDigest | None = None  # of an adapter, from the model's folder
    adapter: Mapping[str, object] | None = None  # content of adapter_config.json
    reference: str | None = None  # digest of the stored reference weights, hex; None: none, or the adapter's base
    left_out: UntrainedTensors | None = None  # tensors of the model's folder that the engine does not use


class Divergences(NamedTuple):
    """Divergences of a rank's samples from the reference, over the tokens of each response, nats."""

    rows: np.ndarray  # int64, numbers of the samples in their batch
    sums: np.ndarray  # float64
    means: np.ndarray  # float32


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


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """The broadcast of a version by the trainer's ranks to explorers, as its members know it."""

    id: int  # unique in the run
    version: Version
    slot: int  # of the senders
    host: str  # of the store at which the members meet, served by the driver
    port: int
    senders: Sequence[str]  # parts in order, one per rank that holds weights
    explorers: Sequence[str]  # names of the receivers in order, see `receivers`
    transport: str  # gloo or nccl
    cut: Cut  # buckets if each is checked before use, else tensors
    sync_timeout_s: float  # of each wait: a `WaitLimit`, which `grown` makes longer for bytes
    nbytes: Sequence[int]  # that each sender sends
    # What travels in place of the parts: the deltas from a version that all receivers hold, by part.
    base: Version | None = None
    deltas: Mapping[str, Sequence[SharedDelta]] = field(default_factory=dict)

    def prefix(self, sender: int) -> str:
        """Return the prefix of the store's keys for one sender."""
        return f"round-{self.id}/sender-{sender}/"


def receivers(explorer: str, processes: int) -> list[str]:
    """Return the names of an explorer's receiving processes; a single one has the explorer's name."""
    return [explorer] if processes == 1 else [f"{explorer}.{rank}" for rank in range(processes)]
