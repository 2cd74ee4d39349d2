"""Work of all ranks: an error on one rank is raised on every rank, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from trinity_sync.errors import RunError

T = TypeVar("T")

Pairs: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""Full tensors by name, each gathered from all ranks when it is asked for."""


def together(what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and wait for all ranks. Collective, over the default group. Raises RunError: on every
    rank, with the rank and its error, when any rank failed or died. `what`: for the message, such as ``"copy the state
    of step 3"``. `work`: must leave no peer in a collective call when it raises. Returns the results of all ranks
    (picklable), in rank order.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    found: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(found, (None if error is None else _describe(error), result))
    except RuntimeError as gone:
        raise RunError(f"could not {what}: a rank has died ({_describe(gone)})") from (error or gone)
    failed = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(found) if problem is not None]
    if failed:
        raise RunError(f"could not {what}: {'; '.join(failed)}") from error
    return [value for _, value in found]


def together_inside(what: str, run: Callable[[Callable[[], T]], object], work: Callable[[], T]) -> None:
    """As `together`, for collective work that another function calls or refuses to call: no rank begins the work before
    all ranks are about to. `work`: has collective calls.
    """
    begin, entered = f"begin to {what}", False

    def enter() -> T:
        nonlocal entered
        entered = True
        together(begin, lambda: None)
        return work()

    def whole() -> None:
        try:
            run(enter)
        except Exception as error:
            if not entered:
                together(begin, partial(_raise, error))
            raise

    together(what, whole)


def _raise(error: Exception) -> None:
    raise error


class GatherStream:
    """Gathered tensors that one rank uses. If it fails in between, `finish` takes part in the remaining gathers."""

    def __init__(self, tensors: Pairs) -> None:
        self._tensors = iter(tensors)

    def __iter__(self) -> GatherStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def finish(self) -> None:
        for _ in self._tensors:
            pass


def use_on_first_rank(what: str, tensors: Pairs, use: Callable[[Pairs], T]) -> T | None:
    """Call `use` on rank 0 with tensors that all ranks gather. Collective; a barrier at the end. Raises RunError: on
    every rank, when it failed. Returns its result on rank 0, None elsewhere.
    """
    result: list[T] = []

    def work() -> None:
        pairs = GatherStream(tensors)
        try:
            if dist.get_rank() == 0:
                result.append(use(pairs))
        finally:
            pairs.finish()

    together(what, work)
    return result[0] if result else None


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
