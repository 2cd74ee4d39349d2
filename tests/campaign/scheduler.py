"""Who runs next: one event loop, threads of blocking work, one clock, and a seeded choice at every file operation.

Nothing runs at the same time. One *baton* goes around: whoever has it runs until it ends, waits, or the scheduler
passes the baton on, which may happen at any file operation (`Scheduler.at_operation`). So two processes interleave in
a folder as finely as real ones do, and the same seed does it the same way again.

The code under test runs unchanged: its coroutines on `Loop`, an event loop with the simulated clock, and what it gives
to `asyncio.to_thread` on a thread of the scheduler's, under the baton.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

#: How long a file operation may take, seconds: mostly little, and sometimes the program was stopped for a while.
_PAUSES = (0.01, 0.3, 3.0, 60.0)


class Crash(BaseException):
    """The process in which this is raised is dead; it unwinds, and nothing that it does has an effect."""


@dataclass(eq=False)
class Process:
    """A simulated process.

    Attributes:
        dies_at: at the how-manieth file operation from now on it is killed; None: it is not.
        dies_after: an operation; soon after the next one of this kind it is killed.
        on_death: called once, when it is dead.
        watched: futures that fail with it, as references do that belong to a process in Ray.
    """

    name: str
    pid: int
    alive: bool = True
    dies_at: int | None = None
    dies_after: str | None = None
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    on_death: list[Callable[[], None]] = field(default_factory=list)
    watched: list[asyncio.Future[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name


#: Whose code is running; tasks and threads inherit it.
CURRENT: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


@dataclass(eq=False)
class _Actor:
    """Something that can hold the baton: the main thread, or a worker."""

    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    job: Callable[[], None] | None = None
    wakes: float = 0.0


class Scheduler:
    """The clock, the loop, the workers and the baton.

    Args:
        rng: every choice is drawn from it.
        switch_every: file operations between two passings of the baton, on average.
        inline: the share of blocking work that is done in one go.
        stops: the weight of long pauses, in which claims and leases run out, among a hundred short ones.
    """

    def __init__(
        self, rng: random.Random, *, switch_every: float = 6.0, inline: float = 0.7, stops: float = 1.0
    ) -> None:
        self.rng = rng
        self._stops = stops
        self.now = 1_000_000.0
        self.loop = Loop(self)
        self._switch_every, self._inline = switch_every, inline
        self._main = _Actor()
        self._running = self._main
        self._workers: list[_Actor] = []
        self._idle: list[_Actor] = []
        self._until_switch = 0
        self._serial = itertools.count(1)
        self.closing = False
        self.calm = False
        self._draw()

    # ---- for the code that runs

    def at_operation(self, *, decisive: bool = False) -> None:
        """A file operation is about to be done: perhaps somebody else comes first.

        Args:
            decisive: others see its effect, and what was looked at before it may not hold any more.
        """
        self._until_switch -= 1
        if decisive and self.rng.random() < 0.3:
            self._until_switch = 0
        if self._until_switch <= 0:
            self._draw()
            if self._running is not self._main and self.rng.random() < 0.5:
                stops = self._stops * (3 if decisive else 1)
                weights = (90, 10, 0, 0) if self.calm else (60, 30, 10, stops)
                self.sleep(self.rng.choices(_PAUSES, weights)[0] * self.rng.random())
                return
            others = [actor for actor in (self._main, *self._runnable()) if actor is not self._running]
            if others:
                self._pass_to(self.rng.choice(others))

    def sleep(self, seconds: float) -> None:
        """`time.sleep` of blocking code."""
        if self._running is not self._main:
            self._running.wakes = self.now + seconds
            self._pass_to(self._main)
        elif others := self._runnable():
            self._pass_to(self.rng.choice(others))
        else:
            self.now += seconds

    def do(self, process: Process, work: Callable[[], Any], *, inline: bool = True) -> asyncio.Future[Any]:
        """Do blocking work for a process; of a process that dies meanwhile the future never ends.

        Args:
            inline: it may be done in one go, as it waits for nobody.
        """
        future = self.loop.create_future()

        def job() -> None:
            try:
                result = work()
            except Crash:
                return
            except BaseException as error:
                if process.alive and not future.done():
                    future.set_exception(error)
                return
            if process.alive and not future.done():
                future.set_result(result)

        if inline and self._running is self._main and self.rng.random() < self._inline:
            contextvars.copy_context().run(job)
        else:
            self._start(contextvars.copy_context(), job)
        return future

    # ---- for the one who drives

    @property
    def quiet(self) -> bool:
        """No blocking work is under way anywhere."""
        return not self._workers and self._running is self._main

    def turn(self) -> bool:
        """Let somebody run a little; False: nobody ever will again."""
        ready = self.loop.ready
        runnable = self._runnable()
        if runnable and (not ready or self.rng.random() < 0.5):
            self._pass_to(self.rng.choice(runnable))
        elif ready:
            self.loop.run_one()
        else:
            return self._let_time_pass()
        return True

    def close(self) -> None:
        """End the threads; all processes are dead."""
        while self._workers:
            for actor in self._workers:
                actor.wakes = 0.0
            self._pass_to(self._workers[0])
        for _ in range(10_000):  # tasks that were cancelled unwind
            if not self.loop.ready:
                break
            self.loop.run_one()
        self.closing = True
        for actor in self._idle:
            actor.baton.release()
        self.loop.close()

    # ---- inside

    def _draw(self) -> None:
        self._until_switch = 1 + int(self.rng.expovariate(1.0 / self._switch_every))

    def _runnable(self) -> list[_Actor]:
        return [actor for actor in self._workers if actor.wakes <= self.now]

    def _let_time_pass(self) -> bool:
        wakes = [actor.wakes for actor in self._workers]
        due = self.loop.next_timer()
        if due is not None:
            wakes.append(due)
        if not wakes:
            return False
        self.now = max(self.now, min(wakes))
        self.loop.move_due()
        return True

    def _pass_to(self, actor: _Actor) -> None:
        me, self._running = self._running, actor
        actor.baton.release()
        me.baton.acquire()

    def _start(self, context: contextvars.Context, job: Callable[[], None]) -> None:
        if self._idle:
            actor = self._idle.pop()
        else:
            actor = _Actor()
            threading.Thread(
                target=self._serve, args=(actor,), name=f"worker-{next(self._serial)}", daemon=True
            ).start()
        actor.job, actor.wakes = lambda: context.run(job), 0.0
        self._workers.append(actor)

    def _serve(self, actor: _Actor) -> None:
        while True:
            actor.baton.acquire()
            if self.closing:
                return
            assert actor.job is not None
            actor.job()
            actor.job = None
            self._workers.remove(actor)
            self._idle.append(actor)
            self._running = self._main
            self._main.baton.release()


class Loop(asyncio.BaseEventLoop):
    """An event loop that runs one callback when it is told to, by the simulated clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.problems: list[str] = []
        self.set_task_factory(_task_of_process)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._scheduler.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return self._scheduler.do(CURRENT.get(), lambda: func(*args))

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @property
    def ready(self) -> bool:
        return bool(self._ready)  # type: ignore[attr-defined]

    def run_one(self) -> None:
        handle = self._ready.popleft()  # type: ignore[attr-defined]
        if not handle._cancelled:
            handle._run()

    def next_timer(self) -> float | None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        return timers[0].when() if timers else None

    def move_due(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].when() <= self._scheduler.now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            self._ready.append(handle)  # type: ignore[attr-defined]

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "never retrieved" not in context["message"]:
            self.problems.append(f"{context['message']}: {type(error).__name__}: {error}")

    # What a loop with a selector has to have; nothing comes from outside here.

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, events: Any) -> None:
        pass


def _task_of_process(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], context: Any = None) -> Any:
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = context.get(CURRENT) if context is not None else CURRENT.get(None)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda task: process.tasks.pop(task, None))
    return task
