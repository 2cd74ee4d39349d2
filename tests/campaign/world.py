"""The simulated machines: processes that can be killed, calls between them that come late or twice, a disk that fails.

`World` knows nothing of checkpoints. What is run in it is in `cluster` and `operations`; what has to hold is in
`invariants`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import itertools
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from tests.campaign.filesystem import FileSystem
from tests.campaign.patches import installed
from tests.campaign.scheduler import CURRENT, Crash, Process, Scheduler

#: The id of the call that is served, as Ray keeps it when it repeats one.
CALL_ID: contextvars.ContextVar[str] = contextvars.ContextVar("call_id")

#: What reads, and what writes, among the operations of the file system.
READS = frozenset({"stat", "list", "open", "read"})
WRITES = frozenset({"create", "write", "mkdir", "link", "rename", "exchange", "fsync", "truncate"})


@dataclass
class DiskFault:
    """Operations that fail for a while.

    Args:
        operations: which.
        within: a part of the path.
        until: seconds.
        share: how many of them fail.
        only: of this process; None: of all.
    """

    code: int
    operations: frozenset[str]
    within: str
    until: float
    share: float
    only: Process | None = None


class Violation(AssertionError):  # noqa: N818
    """Something that has to hold does not."""


@dataclass(eq=False)
class _Call:
    id: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: Process
    answer: asyncio.Future[Any]


@dataclass(eq=False)
class Service:
    """An actor that others call by name; while it is away its calls wait for it.

    Attributes:
        doubled: methods whose calls may come twice in one life.
    """

    world: World
    name: str
    doubled: frozenset[str] = frozenset()
    body: Any = None
    process: Process | None = None
    over: bool = False
    pending: dict[str, _Call] = field(default_factory=dict)

    def post(self, call: _Call) -> None:
        """Send a call; it arrives some time."""
        world = self.world
        self.pending[call.id] = call
        world.later(world.delay(), self._arrive, call)
        if call.method in self.doubled and world.rng.random() < world.doubling:
            world.later(world.delay() + world.delay(), self._arrive, call, True)

    def serve(self, body: Any, process: Process) -> None:
        """A new life begins: calls that were not answered are repeated."""
        self.body, self.process = body, process
        for call in list(self.pending.values()):
            self.world.later(self.world.delay(), self._arrive, call)

    def end(self) -> None:
        """It is not coming back."""
        self.over, self.body = True, None
        for call in self.pending.values():
            if not call.answer.done():
                call.answer.set_exception(RayError(f"{self.name} is gone"))
        self.pending.clear()

    def _arrive(self, call: _Call, again: bool = False) -> None:
        process = self.process
        if self.over:
            if not call.answer.done():
                call.answer.set_exception(RayError(f"{self.name} is gone"))
        elif process is not None and process.alive and (again or call.id in self.pending):
            self.world.step(
                f"{self.name} <- {call.method}{_shown(call.args, call.kwargs)}{' (again)' if again else ''}"
            )
            self.world.start(process, self._answer(call), call=call.id)

    async def _answer(self, call: _Call) -> None:
        process, result, error = self.process, None, None
        try:
            result = await getattr(self.body, call.method)(*call.args, **call.kwargs)
        except Exception as raised:
            error = raised
        if process is None or not process.alive:
            return
        self.pending.pop(call.id, None)
        self.world.later(self.world.delay(), _resolve, call, result, error)


def _resolve(call: _Call, result: Any, error: Exception | None) -> None:
    if call.answer.done() or not call.caller.alive:
        return
    if error is not None:
        call.answer.set_exception(error)
    else:
        call.answer.set_result(result)


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    told = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items() if name != "files"]
    text = f"({', '.join(told)})"
    return text if len(text) < 160 else text[:157] + "..."


class World:
    """One trial's machines.

    Args:
        rng: every choice of the trial is drawn from it.
        steps: operations after which the trial is to come to its end.
        lines: of the log that are kept.
    """

    def __init__(self, rng: random.Random, steps: int, lines: int = 40) -> None:
        self.rng = rng
        self.limit = steps
        self.scheduler = Scheduler(
            rng,
            switch_every=rng.choice((3.0, 8.0, 20.0, 60.0)),
            inline=rng.choice((0.2, 0.5, 0.9)),
            stops=rng.choice((1.0, 1.0, 12.0)),
        )
        self.loop = self.scheduler.loop
        self.disk = FileSystem(before=self._before, now=self.clock, owner=CURRENT.get, exchanges=rng.random() < 0.75)
        self.doubling = rng.choice((0.0, 0.05, 0.2))
        self.slowness = rng.choice((0.0, 0.05, 0.2))
        self.faults: list[DiskFault] = []
        self.processes: list[Process] = []
        self.steps = 0
        self.kinds: dict[str, int] = {}
        self.log: deque[str] = deque(maxlen=lines)
        self.calm = False
        self.faults_met = False
        self.after_step: Callable[[], None] = lambda: None
        self._broken: Exception | None = None
        self._serial = itertools.count(1)
        self._pids = itertools.count(100)
        self.outside = self.process("outside")

    # ---- the clock and the count

    def clock(self) -> float:
        """Seconds."""
        return self.scheduler.now

    def step(self, text: str) -> None:
        """Count one operation of the program, for the log."""
        self.steps += 1
        kind = text.partition("(")[0].rstrip("0123456789 -.")
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.note(f"#{self.steps} {text}")

    def note(self, text: str) -> None:
        """A line for the log."""
        self.log.append(f"{self.clock() - 1_000_000:9.3f} {text}")

    def broken(self, error: Exception) -> Exception:
        """Something does not hold: the trial ends. For code whose own caller may swallow what it raises."""
        self._broken = self._broken or error
        return error

    @property
    def over(self) -> bool:
        """The trial has done its share."""
        return self.steps >= self.limit

    def delay(self) -> float:
        """How long a message is on its way."""
        rng = self.rng
        if self.calm or rng.random() >= self.slowness:
            return rng.random() * 0.02
        return rng.choice((0.2, 1.0, 4.0, 15.0)) * rng.random()

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Call something in so many seconds, of no process."""
        context = contextvars.Context()
        context.run(CURRENT.set, self.outside)
        self.loop.call_later(seconds, callback, *args, context=context)

    # ---- processes

    def process(self, name: str) -> Process:
        """A new process."""
        made = Process(name, next(self._pids))
        self.processes.append(made)
        return made

    def start(self, process: Process, coroutine: Coroutine[Any, Any, Any], *, call: str = "") -> asyncio.Task[Any]:
        """Run a coroutine in a process."""
        context = contextvars.Context()
        context.run(CURRENT.set, process)
        context.run(CALL_ID.set, call)
        return self.loop.create_task(coroutine, context=context)

    def call(self, service: Service, method: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Call an actor from the process that is running."""
        caller = CURRENT.get()
        if not caller.alive:
            raise Crash
        call = _Call(f"call-{next(self._serial)}", method, args, kwargs, caller, self.loop.create_future())
        if service.over:
            call.answer.set_exception(RayError(f"{service.name} is gone"))
        else:
            service.post(call)
        return call.answer

    async def blocking(self, work: Callable[[], Any], *, process: Process | None = None, waits: bool = False) -> Any:
        """Do blocking work in a process, by default the one that is running."""
        if process is None:
            return await self.scheduler.do(CURRENT.get(), work, inline=not waits)
        token = CURRENT.set(process)
        try:
            future = self.scheduler.do(process, work, inline=not waits)
        finally:
            CURRENT.reset(token)
        return await future

    def kill(self, process: Process, *, told: bool = True) -> None:
        """End a process at once. `told`: it is worth a line in the log."""
        if not process.alive:
            return
        process.alive = False
        self.processes.remove(process)
        if told:
            self.note(f"     {process} (pid {process.pid}) is dead")
        self.disk.close_all(process)
        for task in list(process.tasks):
            task.cancel()
        for future in process.watched:
            self.later(self.delay(), _fail, future, f"{process} died")
        for told in process.on_death:
            self.later(self.delay(), told)

    def cut_power(self) -> None:
        """All processes end, and what was not durable is gone by chance."""
        for process in list(self.processes):
            if process is not self.outside:
                self.kill(process, told=False)
        self.disk.lose_power(self.rng)

    # ---- the disk

    def _before(self, operation: str, path: str) -> None:
        process = CURRENT.get()
        if process.dies_after == operation:
            process.dies_at, process.dies_after = self.rng.choice((1, 1, 2, 5)), None
        if process.alive and process.dies_at is not None:
            process.dies_at -= 1
            if process.dies_at < 0:
                self.note(f"     {process} is killed before {operation} {path}")
                self.kill(process)
        if not process.alive:
            raise Crash
        self.scheduler.at_operation(decisive=operation in ("rename", "exchange"))
        if not process.alive:
            raise Crash
        for fault in self.faults:
            meant = operation in fault.operations and fault.within in path and fault.only in (None, process)
            if meant and self.clock() < fault.until and self.rng.random() < fault.share:
                self.note(f"     {process}: {errno.errorcode[fault.code]} at {operation} {path}")
                raise OSError(fault.code, os.strerror(fault.code), path)

    def heal(self) -> None:
        """The disk works again."""
        self.faults.clear()

    # ---- driving

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block this thread is the world's."""

        def sleep(seconds: float) -> None:
            self.scheduler.sleep(seconds)
            if not CURRENT.get().alive:
                raise Crash

        def pid() -> int:
            process = CURRENT.get(None)
            return process.pid if process is not None else 1

        def token(nbytes: int = 16) -> str:
            return self.rng.randbytes(nbytes).hex()

        asyncio._set_running_loop(self.loop)
        context = CURRENT.set(self.outside)
        try:
            with installed(self.disk, clock=self.clock, sleep=sleep, pid=pid, token=token):
                try:
                    yield
                finally:
                    for process in list(self.processes):
                        self.kill(process, told=False)
                    self.scheduler.close()
        finally:
            CURRENT.reset(context)
            asyncio._set_running_loop(None)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run until `main` is done; `after_step` is called after each operation.

        Raises:
            Violation: something does not hold, or nothing goes on any more.
        """
        task = self.start(self.outside, main)
        seen = 0
        while not task.done():
            if not self.scheduler.turn():
                raise Violation("everybody waits and nothing will happen any more")
            if self._broken is not None:
                raise self._broken
            if self.loop.problems:
                raise Violation(self.loop.problems[0])
            if self.steps != seen:
                seen = self.steps
                self.after_step()
        task.result()


def _fail(future: asyncio.Future[Any], text: str) -> None:
    if not future.done():
        future.set_exception(RayError(text))
