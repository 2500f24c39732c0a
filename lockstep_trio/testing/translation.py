"""What the explorer found, as a schedule for the real client.

The explorer moves the machine and model ranks; a ``Schedule`` moves the whole client and ranks that speak the wire.
Each move has its counterpart but for two things that only the machine can be told: a START that is sent again for no
reason, and a suspicion of a split. One message of the wire may carry several outputs, which the explorer lets arrive
one by one; they arrive with the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import final

from lockstep_trio.core import WaveRule

from .explorer import Case, Move, World
from .rank_model import FromRank, Out
from .schedules import (
    AbortInStep,
    Action,
    CloseGroup,
    Deliver,
    Hold,
    Leave,
    Let,
    Lose,
    PauseGroup,
    Poll,
    Rest,
    ResumeGroup,
    Schedule,
    Step,
    Submit,
)


def schedule_of(case: Case, rule: Callable[[], WaveRule], moves: Sequence[Move]) -> Schedule:
    """The schedule that does the same with the real client.

    Args:
        case: What was explored.
        rule: The rule that it was explored with.
        moves: From ``World.start`` on.

    Raises:
        ValueError: One of the moves has no counterpart.
    """
    translator = _Translator(case, World.start(case, rule()))
    actions: list[Action] = [Hold(rank, to_rank=False) for rank in range(case.ranks)]
    for move in moves:
        actions += translator.translate(move)
    return Schedule(tuple(actions), ranks=case.ranks, sync=case.sync)


@final
class _Translator:
    def __init__(self, case: Case, world: World) -> None:
        self._case = case
        self._world = world
        self._callers: list[int] = []
        """Requests in the order in which they are submitted."""
        self._messages: list[deque[int]] = [deque() for _ in range(case.ranks)]
        """Per rank, for each frame that is not heard yet, which message of the wire it is part of."""
        self._sent = 0
        self._heard: set[int] = set()
        """Messages of which a part was heard, and a part is still to come."""

    def translate(self, move: Move) -> list[Action]:
        actions = list(self._actions(move))
        if move.kind in ("deliver", "lose"):
            self._messages[move.rank].popleft()
        self._world.apply(move)
        for rank, outbox in enumerate(self._world.outboxes):
            self._number(self._messages[rank], outbox)
        return actions

    def _number(self, messages: deque[int], outbox: Sequence[FromRank]) -> None:
        """All outputs that a rank sends at once are one message; everything else is one by itself."""
        self._sent += 1
        outputs = self._sent
        for frame in outbox[len(messages) :]:
            if not isinstance(frame, Out):
                self._sent += 1
            messages.append(outputs if isinstance(frame, Out) else self._sent)

    def _actions(self, move: Move) -> Iterator[Action]:
        match move.kind:
            case "submit":
                self._callers.append(move.request)
                rank, steps = self._case.requests[move.request]
                yield from (Submit(steps, pin=rank), Rest())
            case "abort":
                yield from (Leave(self._callers.index(move.request)), Rest())
            case "close":
                yield from (CloseGroup(), Rest())
            case "pause":
                yield from (PauseGroup(self._case.pause_mode), Rest())
            case "resume":
                yield from (ResumeGroup(), Rest())
            case "deliver":
                yield from self._hear(move.rank)
            case "lose":
                yield Lose(move.rank)
            case "poll":
                # The engine's input thread has read all that has arrived; its loop takes so much of it.
                yield from (Deliver(move.rank), Poll(move.rank, move.count))
            case "abort inside step":
                yield AbortInStep(move.rank, self._callers.index(move.request))
            case "step" | "resume together":
                yield Step()
            case _:
                raise ValueError(f"no schedule can do this: {move}")

    def _hear(self, rank: int) -> Iterator[Action]:
        message = self._messages[rank][0]
        if message not in self._heard:
            self._heard.add(message)
            yield from (Let(rank, to_rank=False, count=1), Rest())
