"""How the ranks of a trainer do a save together, without a process group.

A process group ends with its first timeout, and a rank that fails before a collective call leaves its peers in it. The
ranks of a save exchange little, through torch's key-value store: in meetings, one for each save, that go from stage to
stage. All ranks pass a stage or none: the first rank that fails or times out decides that for all of them, and later
ranks hear it at once. The next meeting has keys of its own, so nothing of a failed one reaches it.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trinity_sync.errors import RunError, TrinityError, WaitTimeout
from trinity_sync.host.origin import error_line

T = TypeVar("T")

_CHUNK_BYTES = 4 << 20
"""The longest value of one call; the store closes the connection over values of more than 8 MiB."""

_ANSWER_S = 10.0
"""Timeout of one call of the store, seconds; a wait for a key has its own."""

_GO = "go"


class Store(Protocol):
    """torch's key-value store; torch's own types lack `clone` and bytes."""

    def clone(self) -> Store: ...

    def num_keys(self) -> int: ...

    def set(self, key: str, value: str | bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, value: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class Meetings:
    """One rank's part in the meetings. All ranks begin the same ones, in the same order. `store`: reached by all ranks,
    and served by rank 0. `timeout_s`: of the wait for the others in each stage, seconds (`checkpoint.timeout_s`).
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        # A wait blocks its client. The background thread waits on one of its own, so that training is not blocked.
        self._foreground, self._background = _KeyClient(store), _KeyClient(store)
        self._number = 0
        self._over: list[RankMeeting] = []

    @classmethod
    def of_default_group(cls, timeout_s: float) -> Meetings:
        """Make a meeting of the ranks of torch's default process group, through its store.

        All ranks make the same ones, in the same order; none waits for another here.
        """
        store = cast(Store, _get_default_store())
        rank = dist.get_rank()
        number = _KeyClient(store).call(lambda store: store.add(f"saves/made-by-{rank}", 1))
        prefixed = cast(Store, dist.PrefixStore(f"saves/{number}", cast(dist.Store, store)))
        return cls(prefixed, rank, dist.get_world_size(), timeout_s)

    def begin(self, what: str, prepare: Callable[[], None] = lambda: None) -> RankMeeting:
        """Begin the next one, on the training thread. On return all ranks are here, so collective calls are safe.
        `what`: names the save, such as ``"step 20"``. Raises RunError: on all ranks, if one fails to prepare or does
        not come; names the rank and the error.
        """
        self._number += 1
        meeting = RankMeeting(self, f"{self._number}/", what, self._foreground, self._background)
        over, self._over = self._over, [*self._over, meeting]
        meeting.begin(prepare)
        for earlier in over:  # all ranks are here, so the earlier meetings are over
            earlier.forget()
        self._over = [meeting]
        return meeting


class RankMeeting:
    """See `Meetings.begin`. All ranks go through the same stages; an error in a stage ends the meeting."""

    def __init__(self, of: Meetings, prefix: str, what: str, foreground: _KeyClient, background: _KeyClient) -> None:
        self.rank, self.ranks, self.timeout_s = of.rank, of.ranks, of.timeout_s
        self._prefix = prefix
        self._what = what
        self._foreground = foreground
        self._background = background
        self._stage = 0
        self._keys: list[str] = []

    def begin(self, prepare: Callable[[], None]) -> None:
        """Go through the first stage; see `Meetings.begin`."""
        with self._next(self._foreground, "begin to save", range(self.ranks)) as stage:
            stage.do(prepare)
            stage.arrive()
            stage.wait()

    def gather(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; return the results of all ranks on rank 0, in rank order, and nothing on the
        others. `what`: for errors, such as ``"write its share"``. Raises RunError: on all ranks, if one fails or does
        not come; names the rank and the error.
        """
        with self._next(self._background, what, range(self.ranks)) as stage:
            stage.put(self.rank, stage.do(work))
            stage.arrive()
            stage.wait()
            return [stage.get(rank) for rank in range(self.ranks)] if self.rank == 0 else []

    def scatter(self, what: str, work: Callable[[], Sequence[T]]) -> T:
        """Do something on rank 0, whose `work` returns a value for each rank; return this rank's. Errors as for
        `gather`.
        """
        with self._next(self._background, what, [0]) as stage:
            if self.rank == 0:
                for rank, value in enumerate(stage.do(work)):
                    stage.put(rank, value)
                stage.decide(_GO)
            stage.wait()
            found: T = stage.get(self.rank)
            return found

    def give_up(self, error: BaseException) -> None:
        """Fail the stage that this rank is in, and the next one, on all ranks. On any thread."""
        decision = f"rank {self.rank}: {_describe(error)}"
        with suppress(RunError, dist.DistError):
            client = _KeyClient(self._background._store)  # a waiting thread may block the other clients
            for stage in (self._stage, self._stage + 1):
                key = f"{self._prefix}{stage}/decision"
                client.call(partial(_decide, key, decision))
                self._keys.append(key)

    def forget(self) -> None:
        """Delete this rank's keys from the store, which would grow with every save."""
        for key in self._keys:
            self._foreground.call(partial(_forget, key))

    @contextmanager
    def _next(self, store: _KeyClient, what: str, awaited: Iterable[int]) -> Iterator[_Stage]:
        self._stage += 1
        try:
            yield _Stage(self, store, f"{self._prefix}{self._stage}/", f"{what} ({self._what})", awaited)
        except dist.DistError as error:
            raise RunError(
                f"rank 0, through which the ranks {what} together ({self._what}), has died: {error}"
            ) from error


class _KeyClient:
    """A client of the store whose calls time out.

    torch's own calls wait without limit for a server that hangs, and block the client for as long. Such a client is
    dropped, and the next call has another one.

    `store`: is cloned for each client. On rank 0 its server ends with it. Raises WaitTimeout if the server does not
    answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client: Store | None = None
        self.call(lambda store: store.num_keys())  # connects, which waits for the server too

    def call(self, ask: Callable[[Store], T], waits_s: float = 0.0) -> T:
        """Call the store: `ask` makes one call on a client, which may itself wait `waits_s` seconds for other ranks."""
        client = self._client
        outcome: list[tuple[Store | None, Callable[[], T]]] = []

        def run() -> None:
            try:
                used = client or self._store.clone()
                answer = ask(used)
                outcome.append((used, lambda: answer))
            except BaseException as error:
                outcome.append((client, partial(_raise, error)))

        thread = threading.Thread(target=run, name="meeting", daemon=True)
        thread.start()
        thread.join(waits_s + _ANSWER_S)
        if not outcome:
            self._client = None
            raise WaitTimeout("rank 0, through which the ranks meet,", "answer", waits_s + _ANSWER_S)
        self._client, answer = outcome[0]
        return answer()


class _Stage:
    """One stage of a meeting, as one rank goes through it."""

    def __init__(self, meeting: RankMeeting, store: _KeyClient, prefix: str, what: str, awaited: Iterable[int]) -> None:
        self._rank, self._ranks, self._timeout_s = meeting.rank, meeting.ranks, meeting.timeout_s
        self._keys = meeting._keys
        self._store = store
        self._prefix = prefix
        self._what = what
        self._awaited = awaited

    def do(self, work: Callable[[], T]) -> T:
        """Do this rank's work; an error ends the stage on all ranks."""
        try:
            return work()
        except BaseException as error:
            decision = self.decide(f"rank {self._rank}: {_describe(error)}")
            if not isinstance(error, Exception):
                raise
            raise RunError(decision) from error

    def put(self, rank: int, value: object) -> None:
        data = pickle.dumps(value)
        starts = range(0, len(data), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self._set(f"value-{rank}-{number}", data[start : start + _CHUNK_BYTES])
        self._set(f"value-{rank}", str(len(starts)))

    def get(self, rank: int) -> Any:
        chunks = int(self._get(f"value-{rank}"))
        return pickle.loads(b"".join(self._get(f"value-{rank}-{number}") for number in range(chunks)))

    def arrive(self) -> None:
        self._set(f"rank-{self._rank}", "")
        if self._rank == 0:
            self._keys.append(f"{self._prefix}arrived")
        if self._store.call(lambda store: store.add(f"{self._prefix}arrived", 1)) == self._ranks:
            self.decide(_GO)

    def wait(self) -> None:
        key, limit = f"{self._prefix}decision", timedelta(seconds=self._timeout_s)
        try:
            self._store.call(lambda store: store.wait([key], limit), waits_s=self._timeout_s)
            decision = self._get("decision").decode()
        except dist.DistStoreError:
            decision = self.decide(str(WaitTimeout(self._missing(), self._what, self._timeout_s)))
        if decision != _GO:
            raise RunError(decision)

    def decide(self, decision: str) -> str:
        key = f"{self._prefix}decision"
        self._keys.append(key)
        return self._store.call(partial(_decide, key, decision)).decode()

    def _missing(self) -> str:
        missing = [rank for rank in self._awaited if not self._here(rank)]
        return ", ".join(f"rank {rank}" for rank in missing) or "the last rank"

    def _here(self, rank: int) -> bool:
        return self._store.call(lambda store: store.check([f"{self._prefix}rank-{rank}"]))

    def _set(self, name: str, value: str | bytes) -> None:
        self._store.call(lambda store: store.set(self._prefix + name, value))
        self._keys.append(self._prefix + name)

    def _get(self, name: str) -> bytes:
        return self._store.call(lambda store: store.get(self._prefix + name))


def _decide(key: str, decision: str, store: Store) -> bytes:
    return store.compare_set(key, "", decision)


def _forget(key: str, store: Store) -> None:
    store.delete_key(key)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    if isinstance(error, TrinityError):
        return str(error)
    return error_line(error)
