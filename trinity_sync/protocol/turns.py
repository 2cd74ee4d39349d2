"""Who may write now: the queue behind the save strategies, used by `trinity_sync.protocol.commit`.

A turn belongs to one save of one writer process. Turns are given strictly in the order of asking, so nobody is
overtaken for ever. Collective saves never queue: a rank that waited here would keep a peer waiting in their barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

#: Who may write at once: one thread, the threads of one process, those of one node, or everybody.
SAVE_STRATEGIES = ("single_thread", "single_process", "single_node", "unrestricted")


#: A turn as JSON values: ticket, node_id, job_id, life, part, collective, granted.
TurnDump: TypeAlias = tuple[str, str, str, str, str | None, bool, bool]


@dataclass(slots=True, kw_only=True)
class Turn:
    """One save that writes (`granted`) or waits for its turn.

    Args:
        ticket: the name of this turn.
        node_id, job_id: the writer: its node, and its process on it.
        life: tells a process from an earlier one of the same name.
        step, part: what it writes; None where the writer did not say.
        collective: it has barriers with its peers; it is granted at once and stands in nobody's way.
        anonymous: its writer will report the end without the ticket.
        since: when it was asked for or, once granted, when that was, in seconds of the caller's clock.
    """

    ticket: str
    node_id: str
    job_id: str
    step: int | None
    part: str | None
    collective: bool
    anonymous: bool
    since: float
    life: str = ""
    granted: bool = False

    @property
    def writer(self) -> tuple[str, str, str]:
        """The process that writes."""
        return (self.node_id, self.job_id, self.life)


class TurnQueue:
    """Turns in the order in which they were asked for.

    Args:
        strategy: one of `SAVE_STRATEGIES`.
    """

    def __init__(self, strategy: str) -> None:
        if strategy not in SAVE_STRATEGIES:
            raise ValueError(f"save strategy {strategy!r} is not one of {', '.join(SAVE_STRATEGIES)}")
        self._strategy = strategy
        self._turns: dict[str, Turn] = {}

    def get(self, ticket: str) -> Turn | None:
        """Return the turn of this name, if it has not ended."""
        return self._turns.get(ticket)

    def select(self, which: Callable[[Turn], bool]) -> list[Turn]:
        """Return the turns that `which` is true of, oldest first."""
        return [turn for turn in self._turns.values() if which(turn)]

    def of_step(self, step: int) -> list[Turn]:
        """Return the turns of one step."""
        return self.select(lambda turn: turn.step == step)

    def ask(self, turn: Turn) -> None:
        """Queue up; the same ticket again changes nothing."""
        self._turns.setdefault(turn.ticket, turn)

    def release(self, ticket: str | None) -> bool:
        """End a turn; None ends the oldest one of a writer that does not name its tickets. False: there was none."""
        if ticket is None:
            ticket = next((turn.ticket for turn in self.select(lambda turn: turn.anonymous and turn.granted)), None)
        return ticket is not None and self._turns.pop(ticket, None) is not None

    def grant(self, now: float) -> list[str]:
        """Give out all turns that the strategy allows now; return their tickets."""
        granted = []
        for turn in self.select(lambda turn: turn.collective and not turn.granted):
            turn.granted, turn.since = True, now
            granted.append(turn.ticket)
        for turn in self.select(lambda turn: not turn.granted):
            if not self._may_join(turn):
                break
            turn.granted, turn.since = True, now
            granted.append(turn.ticket)
        return granted

    def dump(self, step: int) -> list[TurnDump]:
        """Return the turns of a step, as JSON values."""
        turns = self.of_step(step)
        return [(turn.ticket, *turn.writer, turn.part, turn.collective, turn.granted) for turn in turns]

    def restore(self, step: int, dumped: Iterable[TurnDump], now: float) -> None:
        """Take up the turns again that `dump` gave."""
        for ticket, node_id, job_id, life, part, collective, granted in dumped:
            self.ask(
                Turn(
                    ticket=ticket,
                    node_id=node_id,
                    job_id=job_id,
                    step=step,
                    part=part,
                    collective=bool(collective),
                    anonymous=False,
                    since=now,
                    life=life,
                    granted=bool(granted),
                )
            )

    def _may_join(self, turn: Turn) -> bool:
        others = self.select(lambda other: other.granted and not other.collective)
        if self._strategy == "unrestricted" or not others:
            return True
        if self._strategy == "single_node":
            return all(other.node_id == turn.node_id for other in others)
        if self._strategy == "single_process":
            return all(other.writer == turn.writer for other in others)
        return False
