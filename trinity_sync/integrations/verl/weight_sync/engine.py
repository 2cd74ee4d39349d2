"""The engines that verl makes, one on each member of a sync: `WeightSync`, and `ShardedWeightSync` without a gather.

verl's `CheckpointEngineManager` calls, for each version: `prepare` on all members; `build_topology` in the driver;
`init_process_group` on all; `send_weights` on the trainer's ranks beside `receive_weights` on the rollout's workers;
`finalize` on all. After an error it calls nothing more, so each method that fails cleans up itself, and `prepare` first
ends what an earlier sync has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine

from trinity_sync.errors import RunError, take_back
from trinity_sync.integrations.verl.engine_weights import each_once
from trinity_sync.integrations.verl.weight_sync import BACKEND, NO_GATHER, link
from trinity_sync.integrations.verl.weight_sync.link import (
    Done,
    Hub,
    MemberPlace,
    MemberReady,
    Spoke,
    read,
)
from trinity_sync.integrations.verl.weight_sync.sending import Exported, Gathering, Sent, own_shards, send, travelling
from trinity_sync.integrations.verl.weight_sync.session import Named, Session, Stream, tensors, told
from trinity_sync.integrations.verl.weight_sync.transfers import transfer
from trinity_sync.weights.apply import ChecksumError
from trinity_sync.weights.shards import Shard, whole

logger = logging.getLogger(__name__)

Shards = Iterable[tuple[Shard, torch.Tensor]]


class WeightSync(CheckpointEngine):
    """Trainer rank 0 sends whole tensors, which all the trainer's ranks gather.

    Args:
        bucket_size: verl's, bytes; `Settings.bucket_mb` applies where it is less.
        is_master: whether this is the trainer's rank 0; None: this is not one of the trainer's.
        engine_kwargs: see `Settings`.

    Raises:
        ConfigError: names a key that is unknown or wrong.
    """

    wire_format = "named_tensors"
    _backend: ClassVar[str] = BACKEND
    _all_send: ClassVar[bool] = False

    def __init__(self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: object) -> None:
        self._settings = read(engine_kwargs, self._backend)
        self._bucket_bytes = min(bucket_size, self._settings.bucket_mb << 20)
        self._sends = bool(is_master) if not self._all_send else is_master is not None
        self._transfer = transfer(self._settings)
        self._session = Session(self._settings.timeout_s, None)
        self._gathering: Gathering[Any] | None = None
        self._last: dict[str, object] | None = None

    # ---- before and after

    def prepare(self) -> MemberReady:
        """Say what the others have to know of this member. On all members.

        Raises:
            RunError: what the mode needs cannot be made, or a gather of an earlier version still hangs.
            WaitTimeout: an earlier sync does not end here.
        """
        self._session.end("a new sync begins")
        if self._gathering is not None:
            self._gathering.wait()  # two at once would mix up what the trainer's ranks gather
        # asked for only now: a process that knows its GPU has taken memory on it
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._session = session = Session(self._settings.timeout_s, device)
        if not self._sends:
            return link.this_process(self._settings, None, None)
        with session.at_work():
            host = str(ray.util.get_node_ip_address()).strip("[]")
            session.hub = Hub(host, self._settings.timeout_s)
            session.sender = self._transfer.sender(host)
            return link.this_process(self._settings, session.hub.address, session.sender.meeting)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[MemberReady]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every member its place. In the driver.

        Args:
            actor_wg_world_size, rollout_world_size: how many members there are.
            metadata: what `prepare` returned, the trainer's ranks first.

        Raises:
            RunError: the members do not go together, such as where mode=memory and they are on two nodes.
        """
        ranks, rollout = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if len(rollout) != rollout_world_size:
            raise RunError(f"{len(metadata)} members are prepared of {actor_wg_world_size} + {rollout_world_size}")
        of_ranks, of_rollout = link.place(ranks, rollout, all_send=cls._all_send)
        return {"place": of_ranks}, {"place": of_rollout}

    def init_process_group(self, place: MemberPlace) -> None:
        """Meet the others. On all members, side by side.

        Raises:
            RunError: one is gone.
            WaitTimeout: one does not come.
        """
        session = self._session
        with session.at_work():
            if place.role == "sender":
                assert session.hub is not None, "a sender prepares"
                assert session.sender is not None, "a sender prepares"
                session.hub.meet(place.receivers)
                session.sender.connect(session.hub, place)
            elif place.role == "receiver":
                for sender in place.senders:
                    spoke = Spoke(sender.name, sender.address, place.index, self._settings.timeout_s)
                    with _or_give_up(spoke.give_up):
                        session.streams.append(Stream(spoke, self._transfer.receiver(spoke, place, sender)))
            session.place = place

    def finalize(self) -> None:
        """Give back what is still held. On all members; may be called again.

        Raises:
            WaitTimeout: a thread that is at work in the sync does not end.
        """
        self._session.end("the sync was ended")

    def last_version(self) -> dict[str, object] | None:
        """Return ``step``, ``digest``, ``mode``, ``bytes`` and ``seconds`` of the version that this member sent or
        received last; None: of none. A trainer's rank that only gathers has none.
        """
        return self._last

    # ---- the trainer's ranks

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, float] | None:
        """Send a version, and wait until all receivers have handed it to their engines. On the trainer's ranks.

        Every rank goes through all weights, because each is gathered from all ranks, also after an error.

        Args:
            weights: (name, whole tensor), from verl's training engine.
            global_steps: the trainer's step.

        Returns:
            On rank 0 what it did, for verl's metrics (all are numbers, since some trackers take nothing else).

        Raises:
            RunError: a member is gone, or has failed; or the digest of what arrived is another one.
            WaitTimeout: a member does not go on.
        """
        wire = self._settings.wire_dtype
        return await self._send(weights, lambda named: _whole(each_once(named), wire), global_steps)

    async def _send(
        self, items: Iterable[Any], shards: Callable[[Iterator[Any]], Shards], step: int | None
    ) -> dict[str, float] | None:
        session = self._session
        self._gathering = gathering = Gathering(items, _version(step), self._settings.timeout_s)
        giving = asyncio.ensure_future(asyncio.to_thread(self._give, session, gathering, shards(gathering), step))
        try:
            return await asyncio.shield(giving)  # which gathers what is left, whatever becomes of this call
        except asyncio.CancelledError:
            session.end("it was cancelled", briefly=True)
            raise

    def _give(
        self, session: Session, gathering: Gathering[Any], shards: Shards, step: int | None
    ) -> dict[str, float] | None:
        try:
            with session.at_work():
                place = _met(session, "send")
                if place.role == "gatherer":
                    gathering.finish()
                    return None
                return self._give_as_sender(session, place, shards, step)
        except BaseException as error:
            take_back(error, gathering.finish)
            raise
        finally:
            gathering.close()

    def _give_as_sender(
        self, session: Session, place: MemberPlace, shards: Shards, step: int | None
    ) -> dict[str, float] | None:
        assert session.hub is not None, "a sender prepares"
        assert session.sender is not None, "a sender prepares"
        started = time.perf_counter()
        full = self._settings.verify == "full" and not self._all_send
        sent = send(shards, session.sender, bucket_bytes=self._bucket_bytes, step=step, whole=full)
        done = session.hub.wait_done()
        digest = _agreed([*(one.digest for one in done), *([sent.digest] if full else [])], step)
        session.finish()
        seconds = time.perf_counter() - started
        self._remember(step, digest, done[0].nbytes, seconds)
        logger.info("%s was sent to %d receivers: %s", _version(step), len(done), self._last)
        return self._metrics(sent, done, digest, seconds) if place.index == 0 else None

    def _metrics(self, sent: Sent, done: list[Done], digest: str | None, seconds: float) -> dict[str, float]:
        found: dict[str, float] = {
            "weight_sync/bytes": done[0].nbytes,
            "weight_sync/seconds": seconds,
            "weight_sync/gather_seconds": sent.gather_s,
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

        Args:
            global_steps: the trainer's step.

        Yields:
            (name, tensor), the tensors of the receiver's own from then on, on the GPU if there is one. The last one
            comes only after every digest of the version was checked.

        Raises:
            RunError: a sender is gone, or has failed.
            WaitTimeout: nothing comes.
            ChecksumError: what came is not what was sent; nothing of it was handed out.
        """
        session = self._session
        receiving = self._receive(session, global_steps)
        # An engine that fails before it asks for a first tensor lets go of this, and nothing in it ever runs.
        weakref.finalize(receiving, session.end, "its engine did not take the weights", briefly=True).atexit = False
        return receiving

    async def _receive(self, session: Session, step: int | None) -> AsyncGenerator[Named, None]:
        started = time.perf_counter()
        _met(session, "receive")
        full = self._settings.verify == "full"
        arriving = _ArrivingTensors(session, tensors(session.streams, digest=full, device=session.device))
        try:
            while (batch := await asyncio.to_thread(arriving.next)) is not None:
                for named in batch:
                    yield named
        except GeneratorExit:
            session.end("its engine did not take all of them")
            raise
        except asyncio.CancelledError:
            session.end("it was cancelled", briefly=True)
            raise
        assert arriving.done is not None, "it has ended"
        self._remember(step, arriving.done.digest, arriving.done.nbytes, time.perf_counter() - started)

    # ---- both

    def _remember(self, step: int | None, digest: str | None, nbytes: int, seconds: float) -> None:
        self._last = {"step": step, "digest": digest, "mode": self._settings.mode, "bytes": nbytes, "seconds": seconds}


class ShardedWeightSync(WeightSync):
    """Each of the trainer's ranks sends what it holds of each tensor; receivers put the tensors together.

    verl hands the training engine over under one backend name only, so that is where this is registered. What an engine
    would have to convert on a gather is refused.
    """

    _backend = NO_GATHER
    _all_send = True

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """As `WeightSync.send_weights`.

        Args:
            weights: verl's training engine, which can be asked for ``get_per_tensor_param_shard``.
            global_steps: the trainer's step.
        """
        exported: Iterable[Exported] = weights.get_per_tensor_param_shard()[0]
        wire, family = self._settings.wire_dtype, weights.model_config.hf_config.model_type
        return await self._send(exported, lambda items: own_shards(items, wire, family), global_steps)


class _ArrivingTensors:
    """What `tensors` yields, and what it returns in the end."""

    def __init__(self, session: Session, batches: Generator[list[Named], None, Done]) -> None:
        self._session = session
        self._batches = batches
        self.done: Done | None = None

    def next(self) -> list[Named] | None:
        """The next ones; None: there are no more. A thread may not raise StopIteration into a coroutine."""
        with self._session.at_work():
            try:
                return next(self._batches)
            except StopIteration as ended:
                self._session.finish()
                self.done = ended.value
                return None


def _met(session: Session, what: str) -> MemberPlace:
    place, session.place = session.place, None
    if place is None:
        raise RunError(f"there is nobody to {what} weights: init_process_group comes before, once for each version")
    return place


def _whole(named: Iterable[Named], wire_dtype: str | None) -> Iterator[tuple[Shard, torch.Tensor]]:
    for name, tensor in named:
        yield whole(name, travelling(name, tensor, wire_dtype), tensor.shape), tensor


def _agreed(digests: list[str | None], step: int | None) -> str | None:
    """The digest that all have.

    Raises:
        ChecksumError: there are several.
    """
    if len(set(digests)) > 1:
        raise ChecksumError(f"the members of the sync have different weights of {_version(step)}: digests {digests}")
    return digests[0]


def _version(step: int | None) -> str:
    return "the weights" if step is None else f"the weights of step {step}"


@contextlib.contextmanager
def _or_give_up(give_up: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        give_up(told(error))
        raise
