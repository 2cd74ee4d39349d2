"""verl's checkpoint engines, one on each member of a sync: `WeightSync`, and `ShardedWeightSync` without a gather.

verl's `CheckpointEngineManager` calls, for each version: `prepare` on all members; `build_topology` in the driver;
`init_process_group` on all; `send_weights` on the trainer's ranks, concurrently with `receive_weights` on the rollout's
workers; `finalize` on all. After an error it makes no further call, so each method cleans up after its own errors, and
`prepare` first ends an earlier sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypedDict, TypeVar

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from trinity_sync.errors import ConfigError, RunError, WaitLimit, WaitTimeout, grown, take_back
from trinity_sync.integrations.verl.engine_functions import each_once
from trinity_sync.integrations.verl.weight_sync import membership
from trinity_sync.integrations.verl.weight_sync.membership import MemberPlace, MemberReady, WeightSyncSettings, read
from trinity_sync.integrations.verl.weight_sync.trainer_tensors import Exported, TimedItems, own_shards, travel_dtype
from trinity_sync.sync.base import BucketSender, BucketTransfer
from trinity_sync.sync.checkpoint import FolderTransfer
from trinity_sync.sync.links import Hub, Spoke, VersionReceipt
from trinity_sync.sync.memory import RoomTransfer
from trinity_sync.sync.nccl import GroupTransfer
from trinity_sync.sync.stream import BucketBase, Named, Stream, send, tensors
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.shards import Shard, whole

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine

logger = logging.getLogger(__name__)

BACKEND = "trinity"
"""The name under which verl finds it: ``checkpoint_engine.backend=trinity``."""

NO_GATHER = "delta_sharded"
"""The one backend name for which verl passes the training engine, and not gathered tensors."""

NO_GATHER_VARIABLE = "TRINITY_SYNC_NO_GATHER"

_UNDER_WAY = 2
"""Buckets that a member may wait for: one travels while the next one is filled."""

_BRIEFLY_S = 0.1
"""Timeout of a wait that must not block an event loop."""

T = TypeVar("T")
Shards = Iterable[tuple[Shard, torch.Tensor]]


class LastVersion(TypedDict):
    """A version that a member sent or received."""

    step: int | None  # None: verl did not say
    digest: str | None  # hex; None: it was not computed
    mode: str
    bytes: int  # to each receiver
    seconds: float


class WeightSync(CheckpointEngine):
    """Trainer rank 0 sends whole tensors, which all trainer ranks gather.

    Args:
        bucket_size: verl's, bytes; `WeightSyncSettings.bucket_mb` applies where it is less.
        is_master: whether this is the trainer's rank 0; None: this is a worker of the rollout.
        engine_kwargs: see `WeightSyncSettings`; ConfigError: names a key that is unknown or wrong.
    """

    wire_format = "named_tensors"
    _backend: ClassVar[str] = BACKEND
    _all_send: ClassVar[bool] = False

    def __init__(self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: object) -> None:
        self._settings = read(engine_kwargs, self._backend)
        self._bucket_bytes = min(bucket_size, self._settings.bucket_mb << 20)
        self._sends = bool(is_master) if not self._all_send else is_master is not None
        limit_s = WaitLimit(self._settings.timeout_s, self._settings.min_rate_mbps, ("timeout_s", "min_rate_mbps"))
        self._limit_s = grown(limit_s, _UNDER_WAY * self._bucket_bytes)
        self._transfer = _transfer(self._settings, self._limit_s)
        self._session = Session(self._settings.timeout_s, None)
        self._gathering: TimedItems[object] | None = None
        self._last: LastVersion | None = None
        self._held: str | None = None  # the whole version in `_bases`
        self._bases: list[BucketBase] = []  # by sender

    # ---- before and after

    def prepare(self) -> MemberReady:
        """Return the data that the other members need about this one. On all members."""
        self._session.end("a new sync begins")
        if self._gathering is not None:
            self._gathering.wait()  # two gathers at once would mix up the tensors of the trainer's ranks
        held, self._held = self._held, None
        # Not before: a process that asks for its GPU allocates memory on it.
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._session = session = Session(self._settings.timeout_s, device)
        if not self._sends:
            return membership.this_process(self._settings, None, None, held)
        with session.at_work():
            host = str(ray.util.get_node_ip_address()).strip("[]")
            session.hub = Hub(host, self._limit_s)
            session.sender = self._transfer.sender(host)
            return membership.this_process(self._settings, session.hub.address, session.sender.meeting, held)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[MemberReady]
    ) -> tuple[dict[str, list[MemberPlace]], dict[str, list[MemberPlace]]]:
        """Give every member its place. In the driver.

        Args:
            metadata: the answers of `prepare`, those of the trainer's ranks first.
        """
        ranks, rollout = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if len(rollout) != rollout_world_size:
            raise RunError(f"{len(metadata)} members are prepared of {actor_wg_world_size} + {rollout_world_size}")
        of_ranks, of_rollout = membership.place(ranks, rollout, all_send=cls._all_send)
        return {"place": of_ranks}, {"place": of_rollout}

    def init_process_group(self, place: MemberPlace) -> None:
        """Connect to the other members. On all members, concurrently."""
        session = self._session
        with session.at_work():
            bases = self._begin_bases(place)
            if place.role == "sender":
                assert session.hub is not None, "a sender prepares"
                assert session.sender is not None, "a sender prepares"
                session.hub.meet(place.receivers)
                session.sender.connect(session.hub, len(place.receivers))
            elif place.role == "receiver":
                for sender, base in zip(place.senders, bases, strict=True):
                    spoke = Spoke(sender.name, sender.address, place.index, self._limit_s)
                    try:
                        receiver = self._transfer.receiver(spoke, sender.meeting, place.index, len(place.receivers))
                    except BaseException as error:
                        spoke.give_up(describe_error(error))
                        raise
                    session.streams.append(Stream(spoke, receiver, base))
            session.place = place

    def _begin_bases(self, place: MemberPlace) -> Sequence[BucketBase | None]:
        """Return the copies over which deltas travel, one of a sender, and one of a receiver for each sender."""
        count = len(place.senders) if place.role == "receiver" else 1
        if self._settings.encoding == "full" or place.role == "gatherer":
            return [None] * count
        if len(self._bases) != count:
            self._bases = [BucketBase() for _ in range(count)]
        for base in self._bases:
            base.begin(follows=place.follows)
        return self._bases

    def finalize(self) -> None:
        """End the sync and free its resources. On all members; may be called again.

        Raises:
            WaitTimeout: a thread that works in the sync does not end.
        """
        self._session.end("the sync was ended")

    def last_version(self) -> LastVersion | None:
        """Return the last version that this member sent or received; None: there is none, as on a trainer rank that
        only gathers.
        """
        return self._last

    # ---- the trainer's ranks

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, float] | None:
        """Send a version, and wait until all receivers have handed it to their engines. On all trainer ranks.

        Each weight is a collective call, so every rank goes through all weights, also after an error.

        Returns:
            On rank 0 the metrics for verl (numbers only, for some trackers take nothing else).
        """
        wire = self._settings.wire_dtype
        return await self._send(weights, lambda named: _whole(each_once(named), wire), global_steps)

    async def _send(
        self, items: Iterable[T], shards: Callable[[Iterator[T]], Shards], step: int | None
    ) -> dict[str, float] | None:
        session = self._session
        self._gathering = gathering = TimedItems(items, _version(step), self._limit_s)
        sending = asyncio.ensure_future(asyncio.to_thread(self._send_all, session, gathering, shards(gathering), step))
        try:
            return await asyncio.shield(sending)  # a cancelled call must not stop the gathers
        except asyncio.CancelledError:
            session.end("it was cancelled", briefly=True)
            raise

    def _send_all(
        self, session: Session, gathering: TimedItems[object], shards: Shards, step: int | None
    ) -> dict[str, float] | None:
        try:
            with session.at_work():
                place = _met(session, "send")
                if place.role == "gatherer":
                    gathering.finish()
                    return None
                return self._send_as_sender(session, place, gathering, shards, step)
        except BaseException as error:
            take_back(error, gathering.finish)
            raise
        finally:
            gathering.close()

    def _send_as_sender(
        self, session: Session, place: MemberPlace, gathering: TimedItems[object], shards: Shards, step: int | None
    ) -> dict[str, float] | None:
        assert session.hub is not None, "a sender prepares"
        assert session.sender is not None, "a sender prepares"
        started = time.perf_counter()
        full = self._settings.verify == "full" and not self._all_send
        base = self._bases[0] if self._bases else None
        sent = send(shards, session.sender, bucket_bytes=self._bucket_bytes, step=step, whole=full, base=base)
        done = session.hub.wait_done()
        digest = _agreed([*(one.digest for one in done), *([sent.digest] if full else [])], step)
        session.finish()
        self._held = place.version if self._bases else None
        seconds = time.perf_counter() - started
        self._remember(step, digest, done[0].nbytes, seconds)
        logger.info("%s was sent to %d receivers: %s", _version(step), len(done), self._last)
        if place.index > 0:
            return None
        found: dict[str, float] = {
            "weight_sync/bytes": done[0].nbytes,
            "weight_sync/seconds": seconds,
            "weight_sync/gather_seconds": gathering.seconds,
            "weight_sync/tensors": sent.tensors,
            "weight_sync/buckets": sent.buckets,
            "weight_sync/receivers": len(done),
            f"weight_sync/mode_{self._settings.mode}": 1,
        }
        if digest is not None:
            found["weight_sync/digest_48bit"] = int(digest[:12], 16)  # which a double holds exactly
        return found

    # ---- the rollout's workers

    def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:
        """Receive a version. On the rollout's workers.

        Yields:
            (name, tensor), on the GPU if there is one; the tensors belong to the caller. The last one comes only after
            every digest of the version was checked.

        Raises:
            ChecksumError: a bucket is damaged (nothing of it was handed out), or the version's digest differs.
        """
        session = self._session
        receiving = self._receive(session, global_steps)
        # An engine that fails before the first tensor drops this generator, and no code in it ever runs.
        weakref.finalize(receiving, session.end, "its engine did not take the weights", briefly=True).atexit = False
        return receiving

    async def _receive(self, session: Session, step: int | None) -> AsyncGenerator[Named, None]:
        started = time.perf_counter()
        version = _met(session, "receive").version
        full = self._settings.verify == "full"
        batches = tensors(session.streams, digest=full, device=session.device)

        def receive() -> list[Named] | VersionReceipt:
            with session.at_work():
                batch = next(batches)
                if isinstance(batch, VersionReceipt):
                    session.finish()
                    self._held = version if self._bases else None
                return batch

        try:
            while not isinstance(batch := await asyncio.to_thread(receive), VersionReceipt):
                for named in batch:
                    yield named
        except GeneratorExit:
            session.end("its engine did not take all of them")
            raise
        except asyncio.CancelledError:
            session.end("it was cancelled", briefly=True)
            raise
        self._remember(step, batch.digest, batch.nbytes, time.perf_counter() - started)

    # ---- both

    def _remember(self, step: int | None, digest: str | None, nbytes: int, seconds: float) -> None:
        self._last = {"step": step, "digest": digest, "mode": self._settings.mode, "bytes": nbytes, "seconds": seconds}


class ShardedWeightSync(WeightSync):
    """Each trainer rank sends its shard of each tensor; receivers put the tensors together.

    verl passes the training engine to one backend name only (`NO_GATHER`), under which this is registered. A tensor
    that the engine converts in a gather is refused.
    """

    _backend = NO_GATHER
    _all_send = True

    async def send_weights(self, weights: BaseEngine, global_steps: int | None = None) -> dict[str, float] | None:
        """As `WeightSync.send_weights`.

        Args:
            weights: verl's training engine, with ``get_per_tensor_param_shard``.
        """
        exported: Iterable[Exported] = weights.get_per_tensor_param_shard()[0]
        wire, family = self._settings.wire_dtype, weights.model_config.hf_config.model_type
        return await self._send(exported, lambda items: own_shards(items, wire, family), global_steps)


def register() -> None:
    """Register the backend with verl, as at the import of this module.

    With ``TRINITY_SYNC_NO_GATHER=1`` in the environment it also takes the name `NO_GATHER` from verl's own engine;
    ConfigError: the variable is neither 0 nor 1.
    """
    CheckpointEngineRegistry.register(BACKEND)(WeightSync)
    asked = os.environ.get(NO_GATHER_VARIABLE, "0")
    if asked not in ("0", "1"):
        raise ConfigError(f"{NO_GATHER_VARIABLE}={asked}: set it to 1 to send without a gather, or to 0")
    if asked == "1":
        with contextlib.suppress(ImportError):  # imported later, it would take the name back
            import verl.checkpoint_engine.delta_checkpoint_engine  # noqa: F401
        CheckpointEngineRegistry.register(NO_GATHER)(ShardedWeightSync)


def _transfer(settings: WeightSyncSettings, limit_s: float) -> BucketTransfer:
    if settings.mode == "checkpoint":
        return FolderTransfer(Path(str(settings.dir)), settings.timeout_s)
    if settings.mode == "nccl":
        return GroupTransfer(settings.transport, limit_s)
    return RoomTransfer()


def _met(session: Session, what: str) -> MemberPlace:
    place, session.place = session.place, None
    if place is None:
        raise RunError(f"no member is connected to {what} weights: init_process_group comes before, for each version")
    return place


def _whole(named: Iterable[Named], wire_dtype: str | None) -> Iterator[tuple[Shard, torch.Tensor]]:
    for name, tensor in named:
        yield whole(name, travel_dtype(name, tensor, wire_dtype), tensor.shape), tensor


def _agreed(digests: list[str | None], step: int | None) -> str | None:
    """Return the digest that all members have; ChecksumError: there are several."""
    if len(set(digests)) > 1:
        raise ChecksumError(f"the members of the sync have different weights of {_version(step)}: digests {digests}")
    return digests[0]


def _version(step: int | None) -> str:
    return "the weights" if step is None else f"the weights of step {step}"


class Session:
    """One sync at one member: its resources, and their end in any thread. A later sync is another object, which threads
    of this one cannot reach.

    Args:
        timeout_s: timeout of the wait for a thread that works in it, seconds.
        device: this member's GPU; None: it has none.

    Attributes:
        place: this member's place; None: not known yet, or used already.
        hub, sender: of a sender.
        streams: of a receiver.
    """

    def __init__(self, timeout_s: float, device: torch.device | None) -> None:
        self.device = device
        self.place: MemberPlace | None = None
        self.hub: Hub | None = None
        self.sender: BucketSender | None = None
        self.streams: list[Stream] = []
        self._timeout_s = timeout_s
        self._work = threading.RLock()
        self._why: str | None = None
        self._over = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Give the calling thread the session's resources, one thread at a time. An error ends the sync."""
        # Without `device` a new thread would work, and allocate memory, on the first GPU.
        with self._work, torch.cuda.device(self.device) if self.device is not None else contextlib.nullcontext():
            try:
                self._check()
                yield
                self._check()
            except BaseException as error:
                take_back(error, partial(self._close, self._why or describe_error(error)))
                if self._why is not None:  # the end of the sync made the links fail
                    raise RunError(f"the sync was ended: {self._why}") from error
                raise

    def end(self, why: str, *, briefly: bool = False) -> None:
        """End the sync, unless it has ended, and tell the other members why. In any thread.

        Args:
            briefly: do not wait for the thread that works in the sync: it is interrupted, and ends the sync itself.

        Raises:
            WaitTimeout: that thread does not end.
        """
        if self._over:
            return
        self._why = self._why or why
        if not self._work.acquire(blocking=False):
            self._interrupt()
            limit = _BRIEFLY_S if briefly else self._timeout_s
            if not self._work.acquire(timeout=limit):
                if briefly:
                    return
                raise WaitTimeout("this member", "end its part in an earlier sync", limit)
        try:
            self._close(why)
        finally:
            self._work.release()

    def finish(self) -> None:
        """Close all resources, after success; called within `at_work`."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.close(failed=False)
        for stream in self.streams:
            stream.close()
        if self.hub is not None:
            self.hub.close()
        self._over = True

    def _check(self) -> None:
        if self._why is not None and not self._over:
            raise RunError(f"the sync was ended: {self._why}")

    def _interrupt(self) -> None:
        for end in (self.hub, *self.streams):
            if end is not None:
                end.interrupt()

    def _close(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        with ExitStack() as parts:  # the last one first, and each also after the error of another one
            if self.sender is not None:
                parts.callback(self.sender.close, failed=True)
            for stream in self.streams:
                parts.callback(stream.give_up, why)
            if self.hub is not None:
                parts.callback(self.hub.give_up, why)


def describe_error(error: BaseException) -> str:
    """Return the text of an error, for another member."""
    return f"{type(error).__name__}: {error}"


register()
