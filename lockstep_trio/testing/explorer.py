"""Walk every interleaving of the real ``GroupMachine`` with a group of model ranks.

The walk is breadth first, so the first bad state found is reached by a shortest schedule. What may happen in a state
is decided by nobody: see ``worlds``. A state is bad if it is

*stuck*
    nothing can move, yet a rank waits at the barrier or holds a request, or the client still waits for something;
*livelocked*
    it can move, but no state in which everything is settled can be reached from it;
*in breach*
    an invariant of the rule under test does not hold.

States that differ by names alone are one, which loses nothing (``orbits``). No order of moves is left out, though
many commute: a shortest schedule may need either order, an invariant may look at the state between them, and whether
something settled can be reached is asked of every state, whereas what makes orders dispensable preserves the dead
ends. Nor is it needed: three ranks with three requests take a minute or two.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs

from lockstep_trio.core import WaveRule

from .orbits import Orbits, Renaming, ToldApart, renamings
from .worlds import SHORT_WAVES, Case, Move, Step, World, replay

__all__ = [
    "EXACT_INVARIANTS",
    "SHORT_WAVES",
    "Case",
    "Found",
    "Invariant",
    "Move",
    "Result",
    "World",
    "clock_never_ahead",
    "explore",
    "one_start_per_wave",
    "replay",
]


@final
@attrs.frozen
class Found:
    """A bad state and a shortest way to it."""

    problem: str
    schedule: tuple[Move, ...]
    state: str
    """The bad state, for people."""

    def __str__(self) -> str:
        lines = [f"{number:3}. {move}" for number, move in enumerate(self.schedule, 1)]
        return "\n".join([*lines, f"=> {self.problem}", self.state])


@final
@attrs.frozen
class Result:
    """What a walk found."""

    states: int
    """Different states visited. Those that differ by names alone are one, unless nothing was reduced."""
    transitions: int
    complete: bool
    """All reachable states were visited; False if the limit was reached or something was found."""
    found: Found | None
    renamings: int = 1
    """In how many ways ranks and requests were renamed to tell whether a state is new; 1: not at all."""


Invariant: TypeAlias = Callable[["World"], str | None]
"""Looks at a state and returns what is wrong with it, None if nothing is. It should not tell ranks apart."""


def clock_never_ahead(world: World) -> str | None:
    """No START may raise a rank's wave number: the clock is at or below every rank's own."""
    clock = world.machine.clock
    lowest = min(rank.wave for rank in world.ranks)
    return f"clock {clock} is above a rank's wave {lowest}" if clock is not None and clock > lowest else None


def one_start_per_wave(world: World) -> str | None:
    """At most one START is broadcast per value of the clock, and never an older one."""
    return world.breach


EXACT_INVARIANTS: tuple[Invariant, ...] = (clock_never_ahead, one_start_per_wave)
"""What the exact rule promises in every state."""


def explore(
    case: Case,
    rule: Callable[[], WaveRule],
    *,
    invariants: Sequence[Invariant] = (),
    limit: int = 1_000_000,
    progress: Callable[[int, int], None] | None = None,
    reduce: bool = True,
) -> Result:
    """Visit every state that the case allows under a rule, breadth first, and stop at the first bad one.

    Args:
        case: Ranks, requests and what may happen to them.
        rule: Makes a fresh rule for ``case.ranks`` ranks.
        invariants: Looked at in every state.
        limit: States to visit at most; beyond it the result is not ``complete``.
        progress: Called every 10,000 states with (states visited, states waiting).
        reduce: Take states for one that differ by the names of ranks and requests alone. The verdict is the same and as
            short, if the invariants do not tell names apart. A rule that does is noticed, and explored without it.
    """
    group = renamings(case)
    checks = tuple(invariants)
    if reduce and len(group) > 1:
        try:
            return _Walk(case, rule(), checks, limit, progress, group).run()
        except ToldApart:
            pass
    return _Walk(case, rule(), checks, limit, progress, group[:1]).run()


@final
class _Walk:
    """One breadth-first walk: numbered states, how each was reached first, and all edges for the way back."""

    def __init__(
        self,
        case: Case,
        rule: WaveRule,
        invariants: tuple[Invariant, ...],
        limit: int,
        progress: Callable[[int, int], None] | None,
        group: Sequence[Renaming],
    ) -> None:
        self._invariants = invariants
        self._limit = limit
        self._progress = progress
        self._renamings = len(group)
        self._orbits = Orbits(group)
        self._start = World.start(case, rule)
        self._start.client.parts.check = self._orbits.check if len(group) > 1 else None
        # Everything below is by number of a state, and flat: of millions of states nothing else is kept.
        self._numbers: dict[int, int] = {}
        self._parents = array("I")
        self._moves = array("I")
        """By which move it was reached from there, by number."""
        self._move_numbers: dict[Move, int] = {}
        self._edges = array("I")
        """What each state leads to, one state behind the other."""
        self._first_edge = array("Q")
        self._settled: list[int] = []
        self._queue: deque[World] = deque()

    def run(self) -> Result:
        self._numbers[self._orbits.key(self._start.client, self._start.lanes)] = 0
        self._enter(self._start, 0, Move("start"))
        while self._queue:
            found = self._expand(self._queue.popleft())
            if found is not None or len(self._numbers) > self._limit:
                return self._result(found, complete=False)
        found = self._livelock()
        return self._result(found, complete=found is None)

    def _expand(self, world: World) -> Found | None:
        number = len(self._first_edge)  # states are expanded in the order in which they were found
        self._first_edge.append(len(self._edges))
        for step in world.steps():
            after = self._arrive(number, step)
            problem = after and self._breach(after)
            if after and problem:
                return self._found(problem, [*self._schedule(number), step[0]], after)
        if len(self._edges) > self._first_edge[number]:
            return None
        if not world.settled:
            return self._found("stuck: nothing can move", self._schedule(number), world)
        self._settled.append(number)
        return None

    def _arrive(self, source: int, step: Step) -> World | None:
        """Take down a move. Returns the state after it if that has to be looked at."""
        move, client, lanes, breach = step
        number = self._numbers.setdefault(self._orbits.key(client, lanes), len(self._numbers))
        self._edges.append(number)
        new = number == len(self._parents)
        if not new and breach is None:
            return None
        world = World(client, lanes, breach)
        if new:
            self._enter(world, source, move)
        return world

    def _enter(self, world: World, source: int, move: Move) -> None:
        number = len(self._parents)
        self._parents.append(source)
        self._moves.append(self._move_numbers.setdefault(move, len(self._move_numbers)))
        self._queue.append(world)
        if self._progress is not None and number % 10_000 == 0:
            self._progress(number, len(self._queue))

    def _breach(self, world: World) -> str | None:
        return next((problem for check in self._invariants if (problem := check(world))), None)

    def _livelock(self) -> Found | None:
        """A state from which none of the settled ones can be reached, the earliest found."""
        can_settle = bytearray(len(self._first_edge))
        for number in self._settled:
            can_settle[number] = 1
        self._first_edge.append(len(self._edges))
        waiting = [number for number, can in enumerate(can_settle) if not can]
        before = -1
        while waiting and len(waiting) != before:
            before = len(waiting)
            # Backwards, because most moves lead to states that were found later: then a few rounds do.
            for number in reversed(waiting):
                targets = self._edges[self._first_edge[number] : self._first_edge[number + 1]]
                can_settle[number] = any(map(can_settle.__getitem__, targets))
            waiting = [number for number in waiting if not can_settle[number]]
        if not waiting:
            return None
        schedule = self._schedule(waiting[0])
        return self._found("livelock: nothing settled can be reached", schedule, replay(self._start, schedule))

    def _schedule(self, number: int) -> list[Move]:
        """The moves by which a state was first reached."""
        moves = list(self._move_numbers)
        schedule: list[Move] = []
        while number:
            schedule.append(moves[self._moves[number]])
            number = self._parents[number]
        return schedule[::-1]

    def _found(self, problem: str, schedule: Sequence[Move], world: World) -> Found:
        return Found(problem, tuple(schedule), world.describe())

    def _result(self, found: Found | None, *, complete: bool) -> Result:
        return Result(len(self._numbers), len(self._edges), complete, found, self._renamings)
